// out [M, N] = x weight^T with E4M3 codes of both, as tiled.cu: tiles in shared memory, any number of rows.
//
// A block computes WGS * 64 rows of the weight by ROWS rows of x, over a share of K, in chunks of 128 columns. GROUPED: each
// chunk has scales of every row of both, copied with the codes and applied to its float32 sums. Otherwise a row has one scale,
// applied at the end. The weight comes in pairs of eight rows (tile_end.cuh).

constexpr int CHUNK = 128;

template <int ROWS>
struct Products {  // sums (+)= weight[64, 32] x[ROWS, 32]^T; see warpgroups.py
  static __device__ void add(float (&sums)[ROWS / 2], u64 weight, u64 x, int begun);
};

template <int ROWS, int WGS, int STAGES, bool GROUPED, bool GATED, int REGISTERS>
__device__ __forceinline__ void tiled_fp8(const TensorMap* weight_map, const float* weight_scales, const TensorMap* x_map,
                                          const float* x_scales, int x_stride, const u16* bias, u16* out, int M, int N, int K,
                                          int splits, int row_tiles) {
  constexpr int TILE = WGS * 64, W_BYTES = TILE * CHUNK, X_BYTES = ROWS * CHUNK, CONSUMERS = WGS * 128;
  constexpr int SCALES = GROUPED ? TILE + ROWS : 0, STAGE_BYTES = W_BYTES + X_BYTES + SCALES * 4;
  extern __shared__ unsigned char unaligned[];
  __shared__ u64 full[STAGES], empty[STAGES];
  unsigned char* stages = unaligned + (1024 - address_of(unaligned) % 1024) % 1024;
  float* scale_stages = reinterpret_cast<float*>(stages + STAGES * (W_BYTES + X_BYTES));
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int split = blockIdx.x % splits, first_row = blockIdx.x / splits % row_tiles * ROWS, tile = blockIdx.x / splits / row_tiles;
  const int chunks = (K + CHUNK - 1) / CHUNK, first = chunks * split / splits, count = chunks * (split + 1) / splits - first;
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      make_barrier(full + i, 1);
      make_barrier(empty + i, CONSUMERS / 32);
    }
    barriers_are_made();
  }
  __syncthreads();

  if (warp >= CONSUMERS / 32) {
    give_registers<REGISTERS>();
    if (threadIdx.x == CONSUMERS) {
      auto fetch_weight = [&](int i, int stage) {
        expect_bytes(full + stage, STAGE_BYTES);
        copy_tile(stages + stage * (W_BYTES + X_BYTES), weight_map, full + stage, (first + i) * CHUNK, 0, 0, tile * (TILE / 16));
        if constexpr (GROUPED) {  // data beyond N belongs to rows that are not written
          float* to = scale_stages + stage * SCALES;
          const float* from = weight_scales + long(first + i) * N + tile * (GATED ? TILE / 2 : TILE);
          copy_bytes(to, from, GATED ? TILE * 2 : TILE * 4, full + stage);
          if (GATED) copy_bytes(to + TILE / 2, from + N / 2, TILE * 2, full + stage);
        }
      };
      auto fetch_x = [&](int i, int stage) {
        copy_tile(stages + stage * (W_BYTES + X_BYTES) + W_BYTES, x_map, full + stage, (first + i) * CHUNK, first_row);
        if constexpr (GROUPED)
          copy_bytes(scale_stages + stage * SCALES + TILE, x_scales + long(first + i) * x_stride + first_row, ROWS * 4, full + stage);
      };
      const int at_once = min(count, STAGES);
      for (int i = 0; i < at_once; i++) fetch_weight(i, i);
      wait_for_previous();
      for (int i = 0; i < at_once; i++) fetch_x(i, i);
      int stage = 0, parity = 0;
      for (int i = at_once; i < count; i++) {
        wait_for(empty + stage, parity);
        fetch_weight(i, stage);
        fetch_x(i, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
    __syncwarp();
    if (splits > 1) meet_cluster(), meet_cluster();
    return;
  }

  take_registers<REGISTERS>();
  const int g = lane / 4, t = lane % 4;
  float sums[ROWS / 2] = {}, part[GROUPED ? ROWS / 2 : 1];
  int stage = 0, parity = 0, before = 0;
  for (int i = 0; i < count; i++) {
    wait_for(full + stage, parity);
    const unsigned char* at = stages + stage * (W_BYTES + X_BYTES);
    const u64 weight = operand(at + warp / 4 * (64 * CHUNK)), x = operand(at + W_BYTES);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if constexpr (GROUPED) Products<ROWS>::add(part, weight + 2 * k, x + 2 * k, k);
      else Products<ROWS>::add(sums, weight + 2 * k, x + 2 * k, i + k);
    }
    end_products();
    if constexpr (GROUPED) {
      const float* scale = scale_stages + stage * SCALES;
      const float upper = scale[GATED ? warp * 8 + g : warp * 16 + g], lower = scale[GATED ? TILE / 2 + warp * 8 + g : warp * 16 + g + 8];
      const float2* of_x = reinterpret_cast<const float2*>(scale + TILE) + t;
      wait_for_products<0>();
      settle(part);
#pragma unroll
      for (int j = 0; j < ROWS / 8; j++) {
        const float2 s = of_x[4 * j];
        sums[4 * j] += part[4 * j] * (upper * s.x);
        sums[4 * j + 1] += part[4 * j + 1] * (upper * s.y);
        sums[4 * j + 2] += part[4 * j + 2] * (lower * s.x);
        sums[4 * j + 3] += part[4 * j + 3] * (lower * s.y);
      }
      if (lane == 0) arrive(empty + stage);
    } else {
      wait_for_products<1>();  // the previous stage has been read
      if (i > 0 && lane == 0) arrive(empty + before);
      before = stage;
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  const int pair = tile * WGS * 4 + warp;
  if constexpr (!GROUPED) {
    wait_for_products<0>();
    settle(sums);
    const int n = min(GATED ? pair * 8 + g : pair * 16 + g, GATED ? N / 2 - 1 : N - 9), partner = n + (GATED ? N / 2 : 8);
    const float upper = weight_scales[n], lower = weight_scales[partner];
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      const int m = first_row + 8 * j + 2 * t;
      const float s0 = x_scales[min(m, M - 1)], s1 = x_scales[min(m + 1, M - 1)];
      sums[4 * j] *= upper * s0;
      sums[4 * j + 1] *= upper * s1;
      sums[4 * j + 2] *= lower * s0;
      sums[4 * j + 3] *= lower * s1;
    }
  }
  const int width = GATED ? N / 2 : N;
  const Rows rows{M - first_row, out + long(first_row) * width};
  write_tile<ROWS, CONSUMERS, GATED>(sums, stages, pair, N, bias, rows, split, splits);
}

#define TILED_FP8(NAME, ROWS, WGS, STAGES, GROUPED, GATED, BLOCKS, THREADS, REGISTERS)                                   \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                          \
      NAME(const __grid_constant__ TensorMap weight, const float* weight_scales, const __grid_constant__ TensorMap x,    \
           const float* x_scales, int x_stride, const u16* bias, u16* out, int M, int N, int K, int splits,              \
           int row_tiles) {                                                                                              \
    tiled_fp8<ROWS, WGS, STAGES, GROUPED, GATED, REGISTERS>(&weight, weight_scales, &x, x_scales, x_stride, bias, out,   \
                                                            M, N, K, splits, row_tiles);                                 \
  }
