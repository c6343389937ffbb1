// Grouped product of coded experts (../gemm/pieces.cuh) over pairs of token and expert sorted by expert; x has a row per pair.
//
// FIRST: out [pairs, N / 2], by place, is silu(gate) * up, or if CLAMPED the activation of ClampedRows. Otherwise out [pairs, N],
// by pair, is multiplied by the expert's weight. Blocks are persistent; a tile is ROWS pairs of an expert by WGS * 64 rows of its
// matrix. The copying thread runs ahead, also into the next tile. Only the device can count the tiles.

constexpr int MAX_EXPERTS = 512;

struct ClampedRows : Rows {
  static constexpr bool CLAMPED = true;
  float alpha, limit;
  __device__ __forceinline__ ClampedRows(int count, u16* out, float alpha, float limit) : Rows{count, out}, alpha(alpha), limit(limit) {}
  __device__ __forceinline__ float activated(float upper, float lower) const {
    const float gate = fminf(rounded(upper), limit), up = fminf(fmaxf(rounded(lower), -limit), limit);
    return (up + 1.f) * __fdividef(gate, 1.f + __expf(-alpha * gate));
  }
};

struct PairRows {  // destination of sums by place: the row of each place's pair
  static constexpr bool CLAMPED = false;
  int count;
  u16* out;
  const int* order;
  const float* share;
  __device__ __forceinline__ u16* row(int m, int width) const { return out + long(order[m]) * width; }
  __device__ __forceinline__ float weight(int m) const { return share[order[m]]; }
};

template <class CODES, int ROWS, int WGS, int STAGES, int GROUPS, bool SCALED, bool FIRST, int REGISTERS, bool CLAMPED = false>
__device__ __forceinline__ void experts_coded(const unsigned char* weight, const TensorMap* x_map, const u16* bias, const int* order,
                                           const int* starts, const float* share, u16* out, int experts, int N, int K,
                                           float alpha = 0.f, float limit = 0.f) {
  extern __shared__ unsigned char shared[];
  __shared__ u64 full[STAGES], empty[STAGES];
  __shared__ int upto[MAX_EXPERTS];  // tiles of pairs of this and all earlier experts
  let_next_start();
  Ring<CODES, ROWS, WGS, STAGES, GROUPS, SCALED, FIRST> ring(shared, full, empty);
  wait_for_previous();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (warp == 0) {
    int before = 0;
    for (int first = 0; first < experts; first += 32) {
      const int expert = first + lane;
      int tiles = expert < experts ? (starts[expert + 1] - starts[expert] + ROWS - 1) / ROWS : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffff, tiles, step);
        if (lane >= step) tiles += other;
      }
      if (expert < experts) upto[expert] = before + tiles;
      before += __shfl_sync(0xffffffff, tiles, 31);
    }
  }
  __syncthreads();
  const int of_matrix = (N + WGS * 64 - 1) / (WGS * 64), all = upto[experts - 1] * of_matrix;
  const int pieces = N / PIECE_ROWS, chunks = (K + CHUNK - 1) / CHUNK;
  auto find = [&](int tile) {  // expert of this tile of pairs
    int low = 0, high = experts - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (upto[middle] > tile) high = middle;
      else low = middle + 1;
    }
    return low;
  };
  auto first_place = [&](int expert, int tile) { return starts[expert] + (tile - (expert ? upto[expert - 1] : 0)) * ROWS; };

  if (warp >= ring.CONSUMERS / 32) {
    give_registers<REGISTERS>();
    if (threadIdx.x == ring.CONSUMERS) {
      for (int i = blockIdx.x; i < all; i += gridDim.x) {
        const int expert = find(i / of_matrix), place = first_place(expert, i / of_matrix);
        const unsigned char* matrix = weight + long(expert) * pieces * chunks * ring.PIECE;
        for (int chunk = 0; chunk < chunks; chunk++) {
          wait_for(empty + ring.stage, ring.parity ^ 1);  // an unused barrier counts as being past the phase before its first
          ring.fetch_weight(matrix, i % of_matrix, pieces, chunks, chunk);
          ring.fetch_x(x_map, place, chunk);
          ring.advance();
        }
      }
    }
    return;
  }

  take_registers<REGISTERS>();
  for (int i = blockIdx.x; i < all; i += gridDim.x) {
    const int expert = find(i / of_matrix), place = first_place(expert, i / of_matrix), count = starts[expert + 1] - place;
    float sums[ROWS / 2] = {};
    ring.multiply(sums, chunks);
    const u16* of_expert = bias ? bias + long(expert) * N : bias;
    const int pair = i % of_matrix * WGS * 4 + warp;
    u16* by_place = out + long(place) * (N / 2);
    if constexpr (FIRST && CLAMPED)
      write_tile<ROWS, ring.CONSUMERS, true>(sums, nullptr, pair, N, of_expert, ClampedRows(count, by_place, alpha, limit), 0, 1);
    else if constexpr (FIRST)
      write_tile<ROWS, ring.CONSUMERS, true>(sums, nullptr, pair, N, of_expert, Rows{count, by_place}, 0, 1);
    else
      write_tile<ROWS, ring.CONSUMERS, false>(sums, nullptr, pair, N, of_expert, PairRows{count, out, order + place, share}, 0, 1);
  }
}

#define EXPERTS_CODED(NAME, CODES, ROWS, WGS, STAGES, GROUPS, SCALED, FIRST, BLOCKS, THREADS, REGISTERS)                 \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                          \
      NAME(const unsigned char* weight, const __grid_constant__ TensorMap x, const u16* bias, const int* order,          \
           const int* starts, const float* share, u16* out, int experts, int N, int K) {                                 \
    experts_coded<CODES, ROWS, WGS, STAGES, GROUPS, SCALED, FIRST, REGISTERS>(weight, &x, bias, order, starts, share,    \
                                                                              out, experts, N, K);                       \
  }

#define EXPERTS_CLAMPED(NAME, CODES, ROWS, WGS, STAGES, GROUPS, SCALED, FIRST, BLOCKS, THREADS, REGISTERS)               \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                          \
      NAME(const unsigned char* weight, const __grid_constant__ TensorMap x, const u16* bias, const int* order,          \
           const int* starts, const float* share, u16* out, int experts, int N, int K, float alpha, float limit) {       \
    experts_coded<CODES, ROWS, WGS, STAGES, GROUPS, SCALED, FIRST, REGISTERS, true>(weight, &x, bias, order, starts,     \
                                                                                    share, out, experts, N, K, alpha,    \
                                                                                    limit);                              \
  }
