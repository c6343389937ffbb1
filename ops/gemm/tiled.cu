// out [M, N] = x weight^T for M up to ROWS: the weight once, at the speed of memory, beside matrix instructions.
//
// A block computes 128 rows of the weight by all rows of x, over a share of K. One thread keeps STAGES tiles of 64 columns under
// way, the first of the weight before the kernel that computes x has ended; two warpgroups multiply. The `splits` blocks of a
// cluster share K, and at the end each adds up its part of the tile, always in the same order.
//
// The weight comes as pairs of eight rows, n and n + 8, or gate and up (GATED: out [M, N / 2] is silu(gate) * up), so that a
// thread holds both: its sums 4 j to 4 j + 3 are row n of columns 8 j + 2 t and + 1, and then those of the row's partner.

constexpr int TILE_ROWS = 128, TILE_BYTES = TILE_ROWS * 128, CONSUMERS = 256;

template <int ROWS>
struct Products {  // sums += weight[64, 16] x[ROWS, 16]^T; see tiled.py
  static __device__ void add(float (&sums)[ROWS / 2], u64 weight, u64 x, int begun);
};

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

template <int ROWS, int STAGES, bool GATED>
__device__ __forceinline__ void tiled(const TensorMap* weight_map, const TensorMap* x_map, const u16* bias, u16* out, int M, int N,
                                      int K, int splits) {
  constexpr int STAGE_BYTES = TILE_BYTES + ROWS * 128;
  extern __shared__ unsigned char unaligned[];
  __shared__ u64 full[STAGES], empty[STAGES];
  unsigned char* stages = unaligned + (1024 - address_of(unaligned) % 1024) % 1024;
  const int warp = threadIdx.x / 32, split = blockIdx.x % splits, tile = blockIdx.x / splits;
  const int units = (K + 63) / 64, first = units * split / splits, count = units * (split + 1) / splits - first;
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      make_barrier(full + i, 1);
      make_barrier(empty + i, CONSUMERS / 32);
    }
    barriers_are_made();
  }
  __syncthreads();

  if (warp == CONSUMERS / 32) {
    if (threadIdx.x % 32 == 0) {
      auto fetch_weight = [&](int i) {
        expect_bytes(full + i % STAGES, STAGE_BYTES);
        copy_tile(stages + i % STAGES * STAGE_BYTES, weight_map, full + i % STAGES, (first + i) * 64, 0, 0, tile * (TILE_ROWS / 16));
      };
      auto fetch_x = [&](int i) {
        copy_tile(stages + i % STAGES * STAGE_BYTES + TILE_BYTES, x_map, full + i % STAGES, (first + i) * 64, 0);
      };
      const int at_once = min(count, STAGES);
      for (int i = 0; i < at_once; i++) fetch_weight(i);
      wait_for_previous();
      for (int i = 0; i < at_once; i++) fetch_x(i);
      for (int i = at_once; i < count; i++) {
        wait_for(empty + i % STAGES, (i / STAGES - 1) & 1);
        fetch_weight(i);
        fetch_x(i);
      }
    }
    __syncwarp();
    if (splits > 1) meet_cluster(), meet_cluster();
    return;
  }

  float sums[ROWS / 2] = {};
  for (int i = 0; i < count; i++) {
    const unsigned char* stage = stages + i % STAGES * STAGE_BYTES;
    wait_for(full + i % STAGES, i / STAGES & 1);
    const u64 weight = operand(stage + warp / 4 * (TILE_BYTES / 2)), x = operand(stage + TILE_BYTES);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) Products<ROWS>::add(sums, weight + 2 * k, x + 2 * k, i + k);
    end_products();
    wait_for_products<1>();  // so the stage before has been read
    if (i > 0 && threadIdx.x % 32 == 0) arrive(empty + (i - 1) % STAGES);
  }
  wait_for_products<0>();
  const int pair = tile * (TILE_ROWS / 16) + warp;
  if (splits == 1) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      const float v[4] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
      put<GATED>(j, v, pair, M, N, bias, out);
    }
    return;
  }
  // All have been multiplied, so the stages are free to hold sums: block j of a thread at (j * CONSUMERS + thread) * 16 bytes.
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
  float4* parts = reinterpret_cast<float4*>(stages) + threadIdx.x;
#pragma unroll
  for (int j = 0; j < ROWS / 8; j++)
    parts[j * CONSUMERS] = make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
  wait_for_cluster();
  for (int j = split; j < ROWS / 8 && 8 * j < M; j += splits) {
    float v[4] = {};
    for (int s = 0; s < splits; s++) {
      const float4 part = load_remote(parts + j * CONSUMERS, s);
      v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
    }
    put<GATED>(j, v, pair, M, N, bias, out);
  }
  meet_cluster();  // nobody leaves while others read its sums
}

#define TILED(NAME, ROWS, STAGES, GATED)                                                                                 \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 2)                                                        \
      NAME(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const u16* bias, u16* out,     \
           int M, int N, int K, int splits) {                                                                            \
    tiled<ROWS, STAGES, GATED>(&weight, &x, bias, out, M, N, K, splits);                                                 \
  }
