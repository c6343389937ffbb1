// out [M, N] = x weight^T for few rows M, as few_rows.cu, with a weight in codes and scales. Codes become 16-bit floats in
// registers, up to a factor or offset that is corrected in the float32 sums when scales are applied.
//
// A unit is 64 bytes of each of a warp's 16 rows, 16 per lane, processed as parts of eight codes, each with 16 bytes of x.
// SEGMENTS: of a unit, each with its own scale; 0 if a row has one scale, which is applied after the last unit. Scales are in
// the queue next to their codes. fp8: `scales` [groups, N], where a group is 2^shift segments; for four bits they are
// in the pieces of pieces.py. Instructions are the bottleneck: a multiprocessor has about 200 per scheduler and unit.

struct Fp8 {  // E4M3: 16 bytes are 16 adjacent columns
  static constexpr int COLUMNS = 64, PARTS = 2, UNITS = 4;
  static constexpr bool OFFSET = false;
  // A scale corrects half of the factor by which numbers are too small (codes.cuh); the sum is multiplied by the rest.
#ifdef FLOAT16
  static constexpr float OF_SCALE = 1.f, OF_SUM = 256.f;
#else
  static constexpr float OF_SCALE = 18446744073709551616.f, OF_SUM = 72057594037927936.f;  // 2^64 and 2^56
#endif
  // Bytes of `units` of a row, and of a row before the next one; first column of a lane.
  template <int SEGMENTS>
  static constexpr int UNIT = 64;
  template <int SEGMENTS>
  static __device__ __forceinline__ long row(int row, int units) { return long(row) * units * 64; }
  static __device__ __forceinline__ int first(int t) { return t * 16; }
  static __device__ __forceinline__ Vec columns(const u16* x, int part) { return load(x + part * 8); }
  template <int SEGMENTS>
  static __device__ __forceinline__ const u32* scale_of(const unsigned char*, const u32* scales, int row, int segment, int shift, int N) {
    return scales + long(segment >> shift) * N + row;
  }
  static __device__ __forceinline__ float scale(u32 word) { return __uint_as_float(word) * OF_SCALE; }
  static __device__ __forceinline__ float offset(u32) { return 0.f; }
  // Two codes as signed 16-bit numbers, shifted up until the first exponent bit is in place; the sign stays on top.
  // (__byte_perm cannot replicate the sign of another byte.)
  static __device__ __forceinline__ u32 two(u32 word, u32 selector) {
    u32 pair;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(pair) : "r"(word), "r"(selector));
    return pair << FP8_SHIFT & FP8_MASK;
  }
  static __device__ __forceinline__ void expand(const Vec& codes, int part, u32 (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      pairs[2 * i] = two(codes.word[2 * part + i], 0x9180);
      pairs[2 * i + 1] = two(codes.word[2 * part + i], 0xb3a2);
    }
  }
};

struct W8 : Fp8 {  // signed bytes, likewise
  static constexpr float OF_SUM = 1.f;
  static __device__ __forceinline__ float scale(u32 word) { return __uint_as_float(word); }
  // Seven bits become the end of the mantissa in codes.cuh; the sign subtracts the value of the next bit.
  static __device__ __forceinline__ u32 two(u32 word, u32 selector) {
    const u32 bytes = __byte_perm(word, 0, selector), below = (bytes & 0x00800080) | W4_BASE;
    u32 pair = (bytes & 0x007f007f) | W4_BASE;
    asm(DIFFERENCE " %0, %0, %1;" : "+r"(pair) : "r"(below));
    return pair;
  }
  static __device__ __forceinline__ void expand(const Vec& codes, int part, u32 (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      pairs[2 * i] = two(codes.word[2 * part + i], 0x4140);
      pairs[2 * i + 1] = two(codes.word[2 * part + i], 0x4342);
    }
  }
};

struct W4 {  // in pieces: a part is the 32 columns of a lane's word: 2 t, 2 t + 1, and these plus 8, 16 and 24
  static constexpr int COLUMNS = 128, PARTS = 4, UNITS = 2;
  static constexpr bool OFFSET = true;
  // Numbers are too large by the constant of codes.cuh and by their zero points.
#ifdef FLOAT16
  static constexpr u32 ONES = 0x3c003c00, WIDE_BASE = 0x44800000, WIDE_SHIFT = 13;  // 1024
#else
  static constexpr u32 ONES = 0x3f803f80, WIDE_BASE = 0x43000000, WIDE_SHIFT = 16;  // 128
#endif
  static constexpr float OF_SUM = 1.f;
  template <int SEGMENTS>
  static constexpr int UNIT = 32 * (64 + SEGMENTS * 4);
  template <int SEGMENTS>
  static __device__ __forceinline__ long row(int row, int units) { return long(row / 32) * units * UNIT<SEGMENTS> + row % 32 * 64; }
  static __device__ __forceinline__ int first(int t) { return t * 2; }
  static __device__ __forceinline__ Vec columns(const u16* x, int part) {
    const u32* at = reinterpret_cast<const u32*>(x + part * 32);
    return {at[0], at[4], at[8], at[12]};
  }
  template <int SEGMENTS>
  static __device__ __forceinline__ const u32* scale_of(const unsigned char* unit, const u32*, int row, int segment, int, int) {
    return reinterpret_cast<const u32*>(unit + 32 * 64 - row % 32 * 60 + segment % SEGMENTS * 128);  // from row 64 r to scale 4 r
  }
  // A float32 scale without its last 8 bits, which contain the zero point.
  static __device__ __forceinline__ float scale(u32 word) { return __uint_as_float(word & 0xffffff00); }
  static __device__ __forceinline__ float offset(u32 word) { return __uint_as_float((word & 15) << WIDE_SHIFT | WIDE_BASE); }
  static __device__ __forceinline__ u32 two(u32 word) {
    u32 pair;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(pair) : "r"(word), "r"(0x000f000f), "r"(W4_BASE));  // (a & b) | c
    return pair;
  }
  static __device__ __forceinline__ void expand(const Vec& codes, int part, u32 (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = two(codes.word[part] >> (4 * i));
  }
};

__device__ __forceinline__ void copy_async_to(u32 address, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_word_async_to(u32 address, const u32* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}

template <class CODES, int SEGMENTS, int WARPS, int BATCHES, int TILES, bool GATED>
__device__ __forceinline__ void few_coded(const u16* x, const unsigned char* weight, const u32* scales, const u16* bias, u16* out, int M, int N,
                                          int K, int shift, const unsigned char* next, int next_bytes) {
  constexpr int COUNT = CODES::UNITS, COLUMNS = CODES::COLUMNS, PARTS = CODES::PARTS, SLOTS = BATCHES * COUNT;
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int units = K / COLUMNS, share = (units + WARPS - 1) / WARPS, slabs = N / 16;
  const int first_unit = warp * share, own_units = min(units - first_unit, share), batches = (share + COUNT - 1) / COUNT;
  const Vec* queue = reinterpret_cast<const Vec*>(shared) + warp * SLOTS * 64 + lane;
  const u32* scale_queue = reinterpret_cast<const u32*>(shared + WARPS * SLOTS * 1024) + warp * SLOTS * SEGMENTS * 64 + lane;
  float* parts = reinterpret_cast<float*>(shared + WARPS * SLOTS * (1024 + SEGMENTS * 256));
  const u32 queue_address = u32(__cvta_generic_to_shared(queue)), scale_address = u32(__cvta_generic_to_shared(scale_queue));
  let_next_start();

  constexpr int UNIT = CODES::template UNIT<SEGMENTS>;
  auto upper_of = [&](int slab) { return GATED ? slab * 8 + g : slab * 16 + g; };
  const int to_lower = GATED ? N / 2 : 8;
  auto start_of = [&](int row) { return weight + CODES::template row<SEGMENTS>(row, units) + first_unit * UNIT; };
  int ahead_slab = blockIdx.x, ahead_unit = 0, ahead_place = 0;
  const unsigned char *ahead = start_of(upper_of(ahead_slab)), *ahead_lower = start_of(upper_of(ahead_slab) + to_lower);
  auto fetch = [&] {
    if (ahead_slab < slabs) {
      const int upper = upper_of(ahead_slab);
#pragma unroll
      for (int u = 0; u < COUNT; u++) {
        if (ahead_unit + u < own_units) {
          const u32 to = queue_address + (ahead_place * COUNT + u) * 1024;
          copy_async_to(to, ahead + u * UNIT + t * 16);
          copy_async_to(to + 512, ahead_lower + u * UNIT + t * 16);
#pragma unroll
          for (int i = 0; i < SEGMENTS; i++) {
            const u32 scale_to = scale_address + ((ahead_place * COUNT + u) * SEGMENTS + i) * 256;
            const int segment = (first_unit + ahead_unit + u) * SEGMENTS + i;
            auto of = [&](const unsigned char* unit, int row) {
              return CODES::template scale_of<SEGMENTS>(unit + u * UNIT, scales, row, segment, shift, N);
            };
            copy_word_async_to(scale_to, of(ahead, upper));
            copy_word_async_to(scale_to + 128, of(ahead_lower, upper + to_lower));
          }
        }
      }
    }
    end_of_batch();
    ahead_place = ahead_place == BATCHES - 1 ? 0 : ahead_place + 1;
    ahead_unit += COUNT, ahead += COUNT * UNIT, ahead_lower += COUNT * UNIT;
    if (ahead_unit >= batches * COUNT) {
      ahead_unit = 0, ahead_slab += gridDim.x;
      ahead = start_of(upper_of(ahead_slab)), ahead_lower = start_of(upper_of(ahead_slab) + to_lower);
    }
  };
#pragma unroll
  for (int i = 0; i < BATCHES; i++) fetch();
  const u16* rows[TILES];  // rows beyond the last repeat it: their products are not used
#pragma unroll
  for (int j = 0; j < TILES; j++) rows[j] = x + long(min(j * 8 + g, M - 1)) * K + first_unit * COLUMNS + CODES::first(t);
  wait_for_previous();

  int place = 0, buffer = 0;
  for (int slab = blockIdx.x; slab < slabs; slab += gridDim.x) {
    float sum[TILES][4] = {};
    u32 whole[2] = {};
    if (SEGMENTS == 0) whole[0] = scales[upper_of(slab)], whole[1] = scales[upper_of(slab) + to_lower];
    for (int first = 0; first < batches * COUNT; first += COUNT) {
      Vec values[COUNT][TILES][PARTS];  // zeros for units beyond this warp's share, regardless of the queue's contents
#pragma unroll
      for (int u = 0; u < COUNT; u++)
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
          for (int p = 0; p < PARTS; p++) {
            values[u][j][p] = {0, 0, 0, 0};
            if (first + u < own_units) values[u][j][p] = CODES::columns(rows[j] + (first + u) * COLUMNS, p);
          }
      wait_for_batches<BATCHES - 1>();
#pragma unroll
      for (int u = 0; u < COUNT; u++) {
        const int slot = place * COUNT + u;
        const Vec a = queue[slot * 64], b = queue[slot * 64 + 32];
        constexpr int PER_SEGMENT = PARTS / (SEGMENTS ? SEGMENTS : 1);
        float part_sum[TILES][4], x_sum[TILES][4];
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
          if (SEGMENTS && p % PER_SEGMENT == 0) {
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
              for (int c = 0; c < 4; c++) part_sum[j][c] = x_sum[j][c] = 0.f;
          }
          u32 upper[4], lower[4];
          CODES::expand(a, p, upper);
          CODES::expand(b, p, lower);
#pragma unroll
          for (int j = 0; j < TILES; j++) {
            const Vec& v = values[u][j][p];
            float(&to)[4] = SEGMENTS ? part_sum[j] : sum[j];
            mma(to, upper[0], lower[0], upper[1], lower[1], v.word[0], v.word[1]);
            mma(to, upper[2], lower[2], upper[3], lower[3], v.word[2], v.word[3]);
            if constexpr (CODES::OFFSET) {
              mma(x_sum[j], CODES::ONES, CODES::ONES, CODES::ONES, CODES::ONES, v.word[0], v.word[1]);
              mma(x_sum[j], CODES::ONES, CODES::ONES, CODES::ONES, CODES::ONES, v.word[2], v.word[3]);
            }
          }
          if (SEGMENTS && p % PER_SEGMENT == PER_SEGMENT - 1) {
            const u32* words = scale_queue + (slot * SEGMENTS + p / PER_SEGMENT) * 64;
            const bool own = first + u < own_units;
            const u32 word[2] = {own ? words[0] : 0, own ? words[32] : 0};
#pragma unroll
            for (int j = 0; j < TILES; j++)
#pragma unroll
              for (int c = 0; c < 4; c++) {
                float value = part_sum[j][c];
                if (CODES::OFFSET) value -= CODES::offset(word[c / 2]) * x_sum[j][c];
                sum[j][c] += value * CODES::scale(word[c / 2]);
              }
          }
        }
      }
      place = place == BATCHES - 1 ? 0 : place + 1;
      fetch();
    }
    if (warp == 0 && slab + gridDim.x >= slabs) bring_ahead(next, next_bytes, lane * gridDim.x + blockIdx.x, gridDim.x * 32);
    // Two buffers, so that one barrier a slab is enough.
    float* part = parts + buffer * WARPS * TILES * 128;
    buffer ^= 1;
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float value = SEGMENTS ? sum[j][c] : sum[j][c] * CODES::scale(whole[c / 2]);
        part[((warp * TILES + j) * 4 + c) * 32 + lane] = value * CODES::OF_SUM;
      }
    __syncthreads();
    write_slab<WARPS, TILES, GATED>(part, slab, M, N, bias, out);
  }
}

#define FEW_CODED(NAME, CODES, SEGMENTS, WARPS, BATCHES, TILES, GATED)                                                   \
  extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                               \
      NAME(const u16* x, const unsigned char* weight, const u32* scales, const u16* bias, u16* out, int M, int N, int K, int shift, \
           const unsigned char* next, int next_bytes) {                                                                  \
    few_coded<CODES, SEGMENTS, WARPS, BATCHES, TILES, GATED>(x, weight, scales, bias, out, M, N, K, shift, next,         \
                                                             next_bytes);                                                \
  }
