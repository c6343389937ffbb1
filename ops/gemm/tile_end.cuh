// How a tile of sums leaves the registers of the warpgroups that multiplied it: the weight comes as pairs of eight rows, n and
// n + 8, or gate and up (GATED: out [M, N / 2] is silu(gate) * up), and a thread's sums 4 j to 4 j + 3 are row n of columns
// 8 j + 2 t and + 1, and then those of the row's partner.

// Four sums of block j of eight rows of x, of the pair of weight rows `n` in the tile.
template <bool GATED>
__device__ __forceinline__ void put(int j, const float (&v)[4], int pair, int M, int N, const u16* bias, u16* out) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, width = GATED ? N / 2 : N;
  const int n = GATED ? pair * 8 + g : pair * 16 + g, partner = GATED ? N / 2 + n : n + 8;
  if (n >= width) return;
  const float b0 = bias ? to_float(bias[n]) : 0.f, b1 = bias ? to_float(bias[partner]) : 0.f;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const int m = 8 * j + 2 * t + c;
    if (m >= M) continue;
    u16* row = out + long(m) * width;
    const float first = v[c] + b0, second = v[c + 2] + b1;
    if (GATED) {
      const float gate = rounded(first);
      row[n] = u16(pack(gate / (1.f + __expf(-gate)) * rounded(second), 0.f));
    } else {
      row[n] = u16(pack(first, 0.f));
      row[partner] = u16(pack(second, 0.f));
    }
  }
}

// Sums [ROWS / 2] of each of THREADS, of the pair of weight rows of this warp; the `splits` blocks of a cluster add up what each
// has of the same tile, always in the same order. `room`: in shared memory, ROWS * THREADS * 2 bytes, free in all of them.
template <int ROWS, int THREADS, bool GATED>
__device__ __forceinline__ void write_tile(const float (&sums)[ROWS / 2], unsigned char* room, int pair, int M, int N,
                                           const u16* bias, u16* out, int split, int splits) {
  if (splits == 1) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      const float v[4] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
      put<GATED>(j, v, pair, M, N, bias, out);
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
  for (int j = split; j < ROWS / 8 && 8 * j < M; j += splits) {
    float v[4] = {};
    for (int s = 0; s < splits; s++) {
      const float4 part = load_remote(parts + j * THREADS, s);
      v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
    }
    put<GATED>(j, v, pair, M, N, bias, out);
  }
  meet_cluster();  // nobody leaves while others read its sums
}
