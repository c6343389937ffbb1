// out [M, N] = x weight^T for M up to ROWS: reads the weight once, at memory speed, and multiplies on tensor cores.
//
// A block computes 128 rows of the weight by all rows of x, over a share of K. One thread keeps STAGES tiles of 64 columns in
// flight, the weight's first ones before the kernel that computes x ends; two warpgroups multiply. The `splits` blocks of a
// cluster share K; at the end each adds up its part of the tile, always in the same order.
//
// RANK: rank of the adapters to add, gathered meanwhile by a warp of its own (low_rank.cuh); 0: none.
//
// The weight comes as pairs of eight rows (tile_end.cuh), n and n + 8, or gate and up, so that a thread holds both.

constexpr int TILE_ROWS = 128, TILE_BYTES = TILE_ROWS * 128, CONSUMERS = 256;

template <int ROWS>
struct Products {  // sums += weight[64, 16] x[ROWS, 16]^T; see warpgroups.py
  static __device__ void add(float (&sums)[ROWS / 2], u64 weight, u64 x, int begun);
};

template <int ROWS, int STAGES, bool GATED, int RANK>
__device__ __forceinline__ void tiled(const TensorMap* weight_map, const TensorMap* x_map, const u16* bias, u16* out, int M, int N,
                                      int K, int splits, const LowRank& low) {
  constexpr int STAGE_BYTES = TILE_BYTES + ROWS * 128;
  extern __shared__ unsigned char unaligned[];
  __shared__ u64 full[STAGES], empty[STAGES];
  __shared__ Gathered<ROWS, RANK, GATED ? 2 : 1> added;
  unsigned char* stages = unaligned + (1024 - address_of(unaligned) % 1024) % 1024;
  const int warp = threadIdx.x / 32, split = blockIdx.x % splits, tile = blockIdx.x / splits;
  const int units = (K + 63) / 64, first = units * split / splits, count = units * (split + 1) / splits - first;
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      make_barrier(full + i, 1);
      make_barrier(empty + i, CONSUMERS / 32);
    }
    added.make();
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

  if (warp > CONSUMERS / 32) {
    if (split == 0) added.gather(low, tile, M, N);
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
    wait_for_products<1>();  // the previous stage has been read
    if (i > 0 && threadIdx.x % 32 == 0) arrive(empty + (i - 1) % STAGES);
  }
  wait_for_products<0>();
  if (split == 0) added.add(sums, low, tile, warp, N);
  write_tile<ROWS, CONSUMERS, GATED>(sums, stages, tile * (TILE_ROWS / 16) + warp, N, bias, Rows{M, out}, split, splits);
}

#define TILED(NAME, ROWS, STAGES, GATED)                                                                                 \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 2)                                                        \
      NAME(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const u16* bias, u16* out,     \
           int M, int N, int K, int splits) {                                                                            \
    tiled<ROWS, STAGES, GATED, 0>(&weight, &x, bias, out, M, N, K, splits, LowRank{});                                   \
  }

#define TILED_PLUS(NAME, ROWS, STAGES, GATED, RANK)                                                                      \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 64, 2)                                                        \
      NAME(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const u16* bias, u16* out,     \
           int M, int N, int K, int splits, const float* h, const u16* b, const float* scales, const int* order,         \
           const int* slots, const int* tiles, const int* used, const int* parts, int stride, int stride_scale,          \
           int row_size, int pieces) {                                                                                   \
    const LowRank low = {h, b, scales, order, slots, tiles, used, parts, stride, stride_scale, row_size, pieces};        \
    tiled<ROWS, STAGES, GATED, RANK>(&weight, &x, bias, out, M, N, K, splits, low);                                      \
  }
