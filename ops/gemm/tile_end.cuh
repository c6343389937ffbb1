// Output of a tile of sums from the registers of the multiplying warpgroups. The weight comes as pairs of eight rows, n and n +
// 8, or gate and up (GATED: out [M, N / 2] is silu(gate) * up, or the activation of ClampedRows). A thread's sums 4 j to 4 j + 3
// are row n of columns 8 j + 2 t and + 1, and then the same columns of the row's partner.

// Output rows of x's sums: this many rows, contiguous.
struct Rows {
  static constexpr bool CLAMPED = false;
  int count;
  u16* out;
  __device__ __forceinline__ u16* row(int m, int width) const { return out + long(m) * width; }
  __device__ __forceinline__ float weight(int m) const { return 1.f; }
};

// Four sums of block j of eight rows of x, of the pair of weight rows `n` in the tile.
template <bool GATED, class ROWS_OUT>
__device__ __forceinline__ void put(int j, const float (&v)[4], int pair, int N, const u16* bias, const ROWS_OUT& rows) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, width = GATED ? N / 2 : N;
  const int n = GATED ? pair * 8 + g : pair * 16 + g, partner = GATED ? N / 2 + n : n + 8;
  if (n >= width) return;
  const float b0 = bias ? to_float(bias[n]) : 0.f, b1 = bias ? to_float(bias[partner]) : 0.f;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const int m = 8 * j + 2 * t + c;
    if (m >= rows.count) continue;
    u16* row = rows.row(m, width);
    const float weight = rows.weight(m), first = (v[c] + b0) * weight, second = (v[c + 2] + b1) * weight;
    if constexpr (GATED && ROWS_OUT::CLAMPED) {
      row[n] = u16(pack(rows.activated(first, second), 0.f));
    } else if (GATED) {
      const float gate = rounded(first);
      row[n] = u16(pack(gate / (1.f + __expf(-gate)) * rounded(second), 0.f));
    } else {
      row[n] = u16(pack(first, 0.f));
      row[partner] = u16(pack(second, 0.f));
    }
  }
}

// Sums [ROWS / 2] of each of THREADS, of the pair of weight rows of this warp; the `splits` blocks of a cluster add their
// sums of the same tile, always in the same order. `room`: in shared memory, ROWS * THREADS * 2 bytes, free in all of them.
template <int ROWS, int THREADS, bool GATED, class ROWS_OUT>
__device__ __forceinline__ void write_tile(const float (&sums)[ROWS / 2], unsigned char* room, int pair, int N, const u16* bias,
                                           const ROWS_OUT& rows, int split, int splits) {
  if (splits == 1) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      const float v[4] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
      put<GATED>(j, v, pair, N, bias, rows);
    }
    return;
  }
  // Block j of a thread is at (j * THREADS + thread) * 16 bytes.
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
  float4* parts = reinterpret_cast<float4*>(room) + threadIdx.x;
#pragma unroll
  for (int j = 0; j < ROWS / 8; j++)
    parts[j * THREADS] = make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
  wait_for_cluster();
  // Latency of other blocks' memory: with many rows eight loads are started before one is awaited. (With up to 64 rows,
  // of which a block adds few, this gained nothing.)
  constexpr int BLOCKS = ROWS / 8, AT_ONCE = BLOCKS < 16 ? 1 : 4, OF_BLOCKS = BLOCKS < 16 ? 1 : 2;
#pragma unroll 1
  for (int first = split; first < BLOCKS && 8 * first < rows.count; first += AT_ONCE * splits) {
    float v[AT_ONCE][4] = {};
#pragma unroll 1
    for (int s = 0; s < splits; s += OF_BLOCKS) {
      float4 part[AT_ONCE][OF_BLOCKS] = {};
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
        for (int b = 0; b < OF_BLOCKS; b++)
          if (s + b < splits && first + i * splits < BLOCKS) part[i][b] = load_remote(parts + (first + i * splits) * THREADS, s + b);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
#pragma unroll
        for (int b = 0; b < OF_BLOCKS; b++)
          v[i][0] += part[i][b].x, v[i][1] += part[i][b].y, v[i][2] += part[i][b].z, v[i][3] += part[i][b].w;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (first + i * splits < BLOCKS) put<GATED>(first + i * splits, v[i], pair, N, bias, rows);
  }
  meet_cluster();  // no block may exit while others read its sums
}
