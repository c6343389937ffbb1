// out [M, N] = x weight^T for few rows M: one stream of the weight at the speed of memory.
//
// A warp owns 16 rows of the weight (a slab) and a share of K. A lane's 16 bytes are eight values of one weight row, used as the
// columns of two matrix instructions; x is read in the same order, so no value changes lanes. Several batches of weights are in
// flight at any time, the first ones before the kernel that computes x ends. The warps' shares of K are added in shared memory.
//
// After its own loads, each block prefetches its share of the bytes read next (`ahead`) into L2.
//
// GATED: weight holds gate and up, a slab is 8 rows of each, out [M, N / 2] is silu(gate) * up.

constexpr int UNITS = 4;  // 32 columns each: a batch of weights of one warp

// Sums the warps' parts, stored as [warp][(tile * 4 + c) * 32 + lane], and writes one slab of the output.
template <int WARPS, int TILES, bool GATED>
__device__ __forceinline__ void write_slab(const float* parts, int slab, int M, int N, const u16* bias, u16* out) {
  auto total = [&](int tile, int c, int lane) {
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += parts[((w * TILES + tile) * 4 + c) * 32 + lane];
    return all;
  };
  for (int i = threadIdx.x; i < TILES * (GATED ? 64 : 128); i += WARPS * 32) {
    const int lane = i % 32, g = lane / 4, t = lane % 4;
    const int tile = GATED ? i / 64 : i / 128, c = GATED ? i / 32 % 2 : i / 32 % 4;
    const int m = tile * 8 + t * 2 + c % 2;
    if (m >= M) continue;
    const int n = GATED ? slab * 8 + g : slab * 16 + g + c / 2 * 8;
    float value = total(tile, c, lane);
    if (bias) value += to_float(bias[n]);
    if (GATED) {
      float up = total(tile, c + 2, lane);
      if (bias) up += to_float(bias[N / 2 + n]);
      const float gate = rounded(value);
      value = gate / (1.f + __expf(-gate)) * rounded(up);
    }
    out[long(m) * (GATED ? N / 2 : N) + n] = u16(pack(value, 0.f));
  }
}

template <int WARPS, int BATCHES, int TILES, bool GATED>
__device__ __forceinline__ void few_rows(const u16* x, const u16* weight, const u16* bias, u16* out, int M, int N, int K,
                                         const unsigned char* ahead, int ahead_bytes) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int units = K / 32, share = (units + WARPS - 1) / WARPS, slabs = N / 16;
  const int first_unit = warp * share, end_unit = min(units, first_unit + share), batches = (share + UNITS - 1) / UNITS;
  Vec* queue = reinterpret_cast<Vec*>(shared) + warp * BATCHES * UNITS * 64 + lane;
  float* parts = reinterpret_cast<float*>(shared + WARPS * BATCHES * UNITS * 1024);
  let_next_start();

  int ahead_slab = blockIdx.x, ahead_batch = 0, ahead_place = 0;
  auto fetch = [&] {
    if (ahead_slab < slabs) {
      const long upper = GATED ? ahead_slab * 8 + g : ahead_slab * 16 + g, lower = GATED ? N / 2 + upper : upper + 8;
#pragma unroll
      for (int u = 0; u < UNITS; u++) {
        const int unit = first_unit + ahead_batch * UNITS + u;
        if (unit < end_unit) {
          const int k = unit * 32 + t * 8;
          copy_async(queue + (ahead_place * UNITS + u) * 64, weight + upper * K + k);
          copy_async(queue + (ahead_place * UNITS + u) * 64 + 32, weight + lower * K + k);
        }
      }
    }
    end_of_batch();
    ahead_place = ahead_place == BATCHES - 1 ? 0 : ahead_place + 1;
    if (++ahead_batch == batches) ahead_batch = 0, ahead_slab += gridDim.x;
  };
#pragma unroll
  for (int i = 0; i < BATCHES; i++) fetch();
  wait_for_previous();

  int place = 0, buffer = 0;
  for (int slab = blockIdx.x; slab < slabs; slab += gridDim.x) {
    float sum[TILES][4] = {};
    for (int batch = 0; batch < batches; batch++) {
      Vec values[UNITS][TILES];
#pragma unroll
      for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int j = 0; j < TILES; j++) {
          // Rows beyond the last repeat it, as do units beyond this warp's share: their products are unused.
          const int row = min(j * 8 + g, M - 1), unit = min(first_unit + batch * UNITS + u, units - 1);
          values[u][j] = load(x + long(row) * K + unit * 32 + t * 8);
        }
      wait_for_batches<BATCHES - 1>();
#pragma unroll
      for (int u = 0; u < UNITS; u++)
        if (first_unit + batch * UNITS + u < end_unit) {
          const Vec a = queue[(place * UNITS + u) * 64], b = queue[(place * UNITS + u) * 64 + 32];
#pragma unroll
          for (int j = 0; j < TILES; j++) {
            const Vec& v = values[u][j];
            mma(sum[j], a.word[0], b.word[0], a.word[1], b.word[1], v.word[0], v.word[1]);
            mma(sum[j], a.word[2], b.word[2], a.word[3], b.word[3], v.word[2], v.word[3]);
          }
        }
      place = place == BATCHES - 1 ? 0 : place + 1;
      fetch();
    }
    if (warp == 0 && slab + gridDim.x >= slabs) bring_ahead(ahead, ahead_bytes, lane * gridDim.x + blockIdx.x, gridDim.x * 32);
    // Two buffers, so that one barrier a slab is enough.
    float* part = parts + buffer * WARPS * TILES * 128;
    buffer ^= 1;
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) part[((warp * TILES + j) * 4 + c) * 32 + lane] = sum[j][c];
    __syncthreads();
    write_slab<WARPS, TILES, GATED>(part, slab, M, N, bias, out);
  }
}

#define FEW_ROWS(NAME, WARPS, BATCHES, TILES, GATED)                                                                     \
  extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                               \
      NAME(const u16* x, const u16* weight, const u16* bias, u16* out, int M, int N, int K, const unsigned char* ahead,  \
           int ahead_bytes) {                                                                                            \
    few_rows<WARPS, BATCHES, TILES, GATED>(x, weight, bias, out, M, N, K, ahead, ahead_bytes);                           \
  }
