// out [M, N] = x weight^T for few rows M, as few_rows.cu computes it, of a weight in codes and scales: codes become 16-bit floats in
// registers, exactly, and sums in float32 meet the scales.
//
// A unit is 64 bytes of each of a warp's 16 rows, 16 of a lane, which are taken as parts of eight codes of neighbouring columns, each
// beside 16 bytes of x. `scales` [groups, N]: a group is 2^shift segments; SEGMENTS: of a unit, 0 where a row has one scale, which
// is applied behind the last unit. Scales are in the queue beside the codes that they belong to.

struct Fp8 {  // E4M3: 16 bytes are 16 neighbouring columns
  static constexpr int COLUMNS = 64, PARTS = 2, UNITS = 4;
#ifdef FLOAT16
  static constexpr u32 SHIFT = 1, MAGNITUDE = 0x3f803f80, FACTOR = 0x5c005c00;  // 2^8 between the biases of the exponents
#else
  static constexpr u32 SHIFT = 4, MAGNITUDE = 0x07f007f0, FACTOR = 0x7b807b80;  // 2^120
#endif
  static __device__ __forceinline__ int column(int t, int part) { return t * 16 + part * 8; }
  static __device__ __forceinline__ float scale(u32 word) { return __uint_as_float(word); }
  static __device__ __forceinline__ u32 zero(u32) { return 0; }
  static __device__ __forceinline__ u32 two(u32 word, u32 selector) {
    const u32 spread = __byte_perm(word, 0, selector);  // each code atop 16 bits
    u32 pair = (spread >> SHIFT & MAGNITUDE) | (spread & 0x80008000);
#ifdef FLOAT16
    asm("mul.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(FACTOR));
#else
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(FACTOR));
#endif
    return pair;
  }
  static __device__ __forceinline__ void expand(const Vec& codes, int part, u32, u32 (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      pairs[2 * i] = two(codes.word[2 * part + i], 0x1404);
      pairs[2 * i + 1] = two(codes.word[2 * part + i], 0x3424);
    }
  }
  static __device__ __forceinline__ Vec arranged(const Vec& x) { return x; }
};

struct W4 {  // a byte's lower half is a column of the first 64, its upper half the one 64 on: 16 bytes are 16 neighbours of each
  static constexpr int COLUMNS = 128, PARTS = 4, UNITS = 2;
#ifdef FLOAT16
  static constexpr u32 BASE = 0x64006400;  // 1024: the last bit of its mantissa is worth 1
#else
  static constexpr u32 BASE = 0x43004300;  // 128
#endif
  static __device__ __forceinline__ int column(int t, int part) { return part / 2 * 64 + t * 16 + part % 2 * 8; }
  // A scale without its last 8 bits, in which the zero point is.
  static __device__ __forceinline__ float scale(u32 word) { return __uint_as_float(word & 0xffffff00); }
  static __device__ __forceinline__ u32 zero(u32 word) { return (word & 15) * 0x00010001 | BASE; }
  // Of four columns the first and the third are a pair, and the second and the fourth.
  static __device__ __forceinline__ u32 two(u32 word, u32 zero) {
    u32 pair = (word & 0x000f000f) | BASE;
#ifdef FLOAT16
    asm("sub.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(zero));
#else
    asm("sub.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(zero));
#endif
    return pair;
  }
  static __device__ __forceinline__ void expand(const Vec& codes, int part, u32 zero, u32 (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u32 word = codes.word[part % 2 * 2 + i] >> (part / 2 * 4);
      pairs[2 * i] = two(word, zero);
      pairs[2 * i + 1] = two(word >> 8, zero);
    }
  }
  static __device__ __forceinline__ Vec arranged(const Vec& x) {
    return {__byte_perm(x.word[0], x.word[1], 0x5410), __byte_perm(x.word[0], x.word[1], 0x7632),
            __byte_perm(x.word[2], x.word[3], 0x5410), __byte_perm(x.word[2], x.word[3], 0x7632)};
  }
};

__device__ __forceinline__ void copy_word_async(u32* to, const u32* from) {
  const u32 address = u32(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
}

template <class CODES, int SEGMENTS, int WARPS, int BATCHES, int TILES, bool GATED>
__device__ __forceinline__ void few_coded(const u16* x, const Vec* weight, const u32* scales, const u16* bias, u16* out, int M, int N,
                                          int K, int shift) {
  constexpr int COUNT = CODES::UNITS, COLUMNS = CODES::COLUMNS, PARTS = CODES::PARTS, SLOTS = BATCHES * COUNT;
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int units = K / COLUMNS, share = (units + WARPS - 1) / WARPS, slabs = N / 16;
  const int first_unit = warp * share, end_unit = min(units, first_unit + share), batches = (share + COUNT - 1) / COUNT;
  Vec* queue = reinterpret_cast<Vec*>(shared) + warp * SLOTS * 64 + lane;
  u32* scale_queue = reinterpret_cast<u32*>(shared + WARPS * SLOTS * 1024) + warp * SLOTS * SEGMENTS * 64 + lane;
  float* parts = reinterpret_cast<float*>(shared + WARPS * SLOTS * (1024 + SEGMENTS * 256));
  let_next_start();

  auto upper_of = [&](int slab) { return GATED ? slab * 8 + g : slab * 16 + g; };
  auto lower_of = [&](int slab) { return GATED ? N / 2 + upper_of(slab) : upper_of(slab) + 8; };
  int ahead_slab = blockIdx.x, ahead_batch = 0, ahead_place = 0;
  auto fetch = [&] {
    if (ahead_slab < slabs) {
      const int upper = upper_of(ahead_slab), lower = lower_of(ahead_slab);
#pragma unroll
      for (int u = 0; u < COUNT; u++) {
        const int unit = first_unit + ahead_batch * COUNT + u, slot = ahead_place * COUNT + u;
        if (unit < end_unit) {
          copy_async(queue + slot * 64, reinterpret_cast<const u16*>(weight + (long(upper) * units + unit) * 4 + t));
          copy_async(queue + slot * 64 + 32, reinterpret_cast<const u16*>(weight + (long(lower) * units + unit) * 4 + t));
#pragma unroll
          for (int i = 0; i < SEGMENTS; i++) {
            const u32* row = scales + long((unit * SEGMENTS + i) >> shift) * N;
            copy_word_async(scale_queue + (slot * SEGMENTS + i) * 64, row + upper);
            copy_word_async(scale_queue + (slot * SEGMENTS + i) * 64 + 32, row + lower);
          }
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
    u32 whole[2] = {};
    if (SEGMENTS == 0) whole[0] = scales[upper_of(slab)], whole[1] = scales[lower_of(slab)];
    for (int batch = 0; batch < batches; batch++) {
      Vec values[COUNT][TILES][PARTS];
#pragma unroll
      for (int u = 0; u < COUNT; u++)
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
          for (int p = 0; p < PARTS; p++) {
            // Rows beyond the last repeat it, and so do units beyond this warp's share: their products are never used.
            const int row = min(j * 8 + g, M - 1), unit = min(first_unit + batch * COUNT + u, units - 1);
            values[u][j][p] = load(x + long(row) * K + unit * COLUMNS + CODES::column(t, p));
          }
      wait_for_batches<BATCHES - 1>();
#pragma unroll
      for (int u = 0; u < COUNT; u++)
        if (first_unit + batch * COUNT + u < end_unit) {
          const int slot = place * COUNT + u;
          const Vec a = queue[slot * 64], b = queue[slot * 64 + 32];
          constexpr int PER_SEGMENT = PARTS / (SEGMENTS ? SEGMENTS : 1);
          float part_sum[TILES][4];
          u32 upper = 0, lower = 0;
#pragma unroll
          for (int p = 0; p < PARTS; p++) {
            if (SEGMENTS && p % PER_SEGMENT == 0) {
              upper = scale_queue[(slot * SEGMENTS + p / PER_SEGMENT) * 64];
              lower = scale_queue[(slot * SEGMENTS + p / PER_SEGMENT) * 64 + 32];
#pragma unroll
              for (int j = 0; j < TILES; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) part_sum[j][c] = 0.f;
            }
            u32 first[4], second[4];
            CODES::expand(a, p, CODES::zero(upper), first);
            CODES::expand(b, p, CODES::zero(lower), second);
#pragma unroll
            for (int j = 0; j < TILES; j++) {
              const Vec v = CODES::arranged(values[u][j][p]);
              float(&to)[4] = SEGMENTS ? part_sum[j] : sum[j];
              mma(to, first[0], second[0], first[1], second[1], v.word[0], v.word[1]);
              mma(to, first[2], second[2], first[3], second[3], v.word[2], v.word[3]);
            }
            if (SEGMENTS && p % PER_SEGMENT == PER_SEGMENT - 1) {
              const float of_upper = CODES::scale(upper), of_lower = CODES::scale(lower);
#pragma unroll
              for (int j = 0; j < TILES; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) sum[j][c] += part_sum[j][c] * (c < 2 ? of_upper : of_lower);
            }
          }
        }
      place = place == BATCHES - 1 ? 0 : place + 1;
      fetch();
    }
    // Two buffers, so that one barrier a slab is enough.
    float* part = parts + buffer * WARPS * TILES * 128;
    buffer ^= 1;
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float value = SEGMENTS ? sum[j][c] : sum[j][c] * CODES::scale(whole[c / 2]);
        part[((warp * TILES + j) * 4 + c) * 32 + lane] = value;
      }
    __syncthreads();
    write_slab<WARPS, TILES, GATED>(part, slab, M, N, bias, out);
  }
}

#define FEW_CODED(NAME, CODES, SEGMENTS, WARPS, BATCHES, TILES, GATED)                                                   \
  extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                               \
      NAME(const u16* x, const Vec* weight, const u32* scales, const u16* bias, u16* out, int M, int N, int K, int shift) { \
    few_coded<CODES, SEGMENTS, WARPS, BATCHES, TILES, GATED>(x, weight, scales, bias, out, M, N, K, shift);              \
  }
