// Paged attention of rows with one query, from the qkv projection on: per-head norms, rotary embedding, KV cache write,
// attention. Up to 8 query heads share a KV head.
//
// A warp processes whole blocks of 16 keys, one or two at a time. It loads them from memory straight into the matrix
// instruction's registers while the next ones are in flight. scores^T = K q^T has keys as rows, out^T = V^T p^T the head's dims.
// A lane loads eight dims of one key. Warps, then the blocks of a cluster (`split`), merge by running maximum and sum (Milakov
// and Gimelshein 2018; Dao et al. 2023, Flash-Decoding).
//
// An 8-bit cache (E4M3) is converted to float16 for the matrix instruction, which represents all of its numbers exactly. Queries
// and weights are float16 there too. Scales are in `scale_log2` and `out_scale`; `per_k`, `per_v` multiply written values.
// An int8 cache has a scale after each head of a token (kv/eight_bits.py), which multiplies its score or its weight.

constexpr int KEYS = 16;  // keys per cache block
constexpr int QUERIES = 8;

typedef unsigned char u8;
typedef signed char s8;

// Common interface of the cache's number formats and the matrix instruction.
template <typename NUMBER>
struct Cached;

template <>
struct Cached<u16> {  // the model's own dtype
  static constexpr int AT_ONCE = 1;  // blocks that a warp processes at once
  static constexpr int BEHIND = 0;   // extra numbers after those of a head
  static constexpr bool SCALED = false;
  typedef Vec Eight;
  // The first of a lane's eight dims out of 8 * LANES, which `fetch` reads; the dims 2 i and 2 i + 1 of them; where a dim's query is.
  template <int LANES>
  static __device__ __forceinline__ int first(int lane) { return lane * 8; }
  template <int LANES>
  static __device__ __forceinline__ int dim(int lane, int i) { return lane * 8 + 2 * i; }
  static constexpr bool BY_TWO = false;  // whether one load may read two of a lane's groups of eight dims, which are then adjacent
  template <bool KEYS_BY_TWO>
  static __device__ __forceinline__ int place(int d) { return d; }
  template <int LANES>
  static __device__ __forceinline__ Eight fetch(const u16* from, bool) { return load_streamed(from); }
  static __device__ __forceinline__ Vec widened(const Eight& eight) { return eight; }
  // Of each of eight dims two keys, the first in the lower half.
  static __device__ __forceinline__ void pair(const Eight& one, const Eight& other, u32 (&dims)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      dims[2 * i] = __byte_perm(one.word[i], other.word[i], 0x5410);
      dims[2 * i + 1] = __byte_perm(one.word[i], other.word[i], 0x7632);
    }
  }
  static __device__ __forceinline__ u16 query(float value) { return u16(pack(value, 0.f)); }
  static __device__ __forceinline__ u16 number(float value, float) { return u16(pack(value, 0.f)); }
  static __device__ __forceinline__ u32 weights(float low, float high) { return pack(low, high); }
  static __device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma(d, a0, a1, a2, a3, b0, b1);
  }
};

// Eight 8-bit numbers, four of which NUMBERS::widen converts to float16.
struct alignas(8) EightBytes {
  u32 word[2];
};
template <typename NUMBERS>
struct Widening {
  typedef EightBytes Eight;
  static __device__ __forceinline__ Vec widened(const Eight& eight) {
    Vec wide;
#pragma unroll
    for (int i = 0; i < 2; i++) NUMBERS::widen(eight.word[i], wide.word[2 * i], wide.word[2 * i + 1]);
    return wide;
  }
  static __device__ __forceinline__ void pair(const Eight& one, const Eight& other, u32 (&dims)[8]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      NUMBERS::widen(__byte_perm(one.word[i], other.word[i], 0x5140), dims[4 * i], dims[4 * i + 1]);
      NUMBERS::widen(__byte_perm(one.word[i], other.word[i], 0x7362), dims[4 * i + 2], dims[4 * i + 3]);
    }
  }
};

template <>
struct Cached<u8> : Widening<Cached<u8>> {
  // As many bytes at once as with 16 bits, and half the arithmetic per key except for the products.
  static constexpr int AT_ONCE = 2, BEHIND = 0;
  static constexpr bool SCALED = false;
  template <int LANES>
  static __device__ __forceinline__ int first(int lane) { return lane * 8; }
  template <int LANES>
  static __device__ __forceinline__ int dim(int lane, int i) { return lane * 8 + 2 * i; }
  static constexpr bool BY_TWO = true;  // one H200, 256 requests of 576 keys: 86 us, instead of 90 with one
  template <bool KEYS_BY_TWO>
  static __device__ __forceinline__ int place(int d) {
    return KEYS_BY_TWO ? d / 64 * 64 + d % 16 / 8 * 32 + d % 64 / 16 * 8 + d % 8 : d;
  }
  static __device__ __forceinline__ void fetch_two(const u8* from, Eight& one, Eight& other) {
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(one.word[0]), "=r"(one.word[1]), "=r"(other.word[0]), "=r"(other.word[1])
                 : "l"(from));
  }
  template <int LANES>
  static __device__ __forceinline__ Eight fetch(const u8* from, bool) {
    Eight eight;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
                 : "=r"(eight.word[0]), "=r"(eight.word[1])
                 : "l"(from));
    return eight;
  }
  static __device__ __forceinline__ void widen(u32 four, u32& low, u32& high) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(low), "=r"(high)
        : "r"(four));
  }
  static __device__ __forceinline__ u16 query(float value) {  // rounded as if stored first, and finite
    return u16(weights(fminf(fmaxf(rounded(value), -65504.f), 65504.f), 0.f));
  }
  static __device__ __forceinline__ u8 number(float value, float per_scale) {
    u16 two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.f), "f"(rounded(value) * per_scale));
    return u8(two);
  }
  static __device__ __forceinline__ u32 weights(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
  static __device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

// Rows of such entries are aligned to words only. So that lanes read adjacent words, a lane's eight dims are four of the first half
// and four of the second half of all lanes' dims; the other lanes' words of a line are then in the L1 cache.
template <>
struct Cached<s8> : Widening<Cached<s8>> {
  static constexpr int AT_ONCE = 2, BEHIND = 4;
  static constexpr bool SCALED = true;
  template <int LANES>
  static __device__ __forceinline__ int first(int lane) { return lane * 4; }
  template <int LANES>
  static __device__ __forceinline__ int dim(int lane, int i) { return i / 2 * (4 * LANES) + lane * 4 + i % 2 * 2; }
  static constexpr bool BY_TWO = false;
  template <bool KEYS_BY_TWO>
  static __device__ __forceinline__ int place(int d) { return d / 32 * 32 + d % 16 / 4 * 8 + d % 32 / 16 * 4 + d % 4; }
  template <int LANES>
  static __device__ __forceinline__ Eight fetch(const s8* from, bool both) {  // `both`: both halves of the dims exist
    Eight eight = {word(from), 0};
    if (both) eight.word[1] = word(from + 4 * LANES);
    return eight;
  }
  static __device__ __forceinline__ u32 word(const s8* from) {
    u32 word;
    asm volatile("ld.global.L2::128B.u32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
  }
  // Bytes that are 128 too large are the end of a mantissa whose last bit is worth 1: 1024 and 128 are subtracted.
  static __device__ __forceinline__ void widen(u32 four, u32& low, u32& high) {
    const u32 bytes = four ^ 0x80808080;
    low = __byte_perm(bytes, 0x64646464, 0x4140), high = __byte_perm(bytes, 0x64646464, 0x4342);
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(low) : "r"(0x64806480));
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(high) : "r"(0x64806480));
  }
  static __device__ __forceinline__ u16 query(float value) { return Cached<u8>::query(value); }
  // Weights multiplied by scales, times 64: most are then far above the smallest float16; none is infinite.
  static constexpr float OF_WEIGHTS = 64.f;
  static __device__ __forceinline__ u32 weights(float low, float high) {
    return Cached<u8>::weights(fminf(low * OF_WEIGHTS, 65504.f), fminf(high * OF_WEIGHTS, 65504.f));
  }
  static __device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    Cached<u8>::multiply(d, a0, a1, a2, a3, b0, b1);
  }
  // Of a head, a warp's numbers of dims lane, lane + 32, ...: an entry.
  template <int COUNT>
  static __device__ __forceinline__ void write(s8* to, const float (&value)[COUNT]) {
    const int lane = threadIdx.x % 32;
    float largest = 0.f, broken = 0.f;  // NaN if a number is NaN or infinite
#pragma unroll
    for (int i = 0; i < COUNT; i++) largest = fmaxf(largest, fabsf(value[i])), broken += value[i] - value[i];
#pragma unroll
    for (int step = 16; step; step /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
      broken += __shfl_xor_sync(~0u, broken, step);
    }
    const float scale = largest / 127.f + broken;
#pragma unroll
    for (int i = 0; i < COUNT; i++) to[lane + i * 32] = scale > 0.f ? s8(__float2int_rn(value[i] / scale)) : s8(0);
    if (lane == 0) *reinterpret_cast<float*>(to + COUNT * 32) = scale;
  }
};

// 2^x by the device's instruction: 0 for results below the smallest normal number.
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Reads shared memory each time: volatile data is not kept in registers, of which none are free.
__device__ __forceinline__ Vec load_again(u32 address) {
  Vec v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "r"(address));
  return v;
}

// One warp processes a head: norm, rotate, `write` each dim, the lane's `i`th. cos, sin: of this lane's dims lane, lane + 32, ...
template <int HEAD>
struct Head {
  float cosine[HEAD / 32], sine[HEAD / 32];

  __device__ __forceinline__ void load_angles(const float* cos_sin, int rotary) {
    const int half = rotary / 2;
#pragma unroll
    for (int i = 0; i < HEAD / 32; i++) {
      const int d = threadIdx.x % 32 + i * 32;
      cosine[i] = d < rotary ? cos_sin[d % half] : 1.f;
      sine[i] = d < rotary ? cos_sin[half + d % half] : 0.f;
    }
  }

  template <typename WRITE>
  __device__ __forceinline__ void prepare(const u16* from, const u16* norm, float eps, int rotary, float (&scratch)[HEAD],
                                          WRITE write) const {
    const int lane = threadIdx.x % 32, half = rotary / 2;
    float value[HEAD / 32], weight[HEAD / 32], square = 0.f;
#pragma unroll
    for (int i = 0; i < HEAD / 32; i++) {
      value[i] = to_float(from[lane + i * 32]);
      weight[i] = norm ? to_float(norm[lane + i * 32]) : 1.f;
    }
    if (norm) {
#pragma unroll
      for (int i = 0; i < HEAD / 32; i++) square += value[i] * value[i];
#pragma unroll
      for (int step = 16; step; step /= 2) square += __shfl_xor_sync(~0u, square, step);
      const float scale = rsqrtf(square / HEAD + eps);
#pragma unroll
      for (int i = 0; i < HEAD / 32; i++) value[i] = rounded(value[i] * scale * weight[i]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < HEAD / 32; i++) scratch[lane + i * 32] = value[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < HEAD / 32; i++) {
      const int d = lane + i * 32;
      float turned = value[i] * cosine[i];
      if (d < rotary) turned += (d < half ? -scratch[d + half] : scratch[d - half]) * sine[i];
      write(i, d, turned);
    }
  }
};

template <int HEAD, int WARPS, typename NUMBER>
__device__ __forceinline__ void decode(const u16* qkv, int qkv_stride, const u16* q_norm, const u16* k_norm, float eps,
                                       const float* cos_sin, int rotary, int fused, NUMBER* k_cache, NUMBER* v_cache,
                                       const int* tables, int table_stride, const int* rows, const int* starts,
                                       const int* lens, u16* out, float scale_log2, int group, float per_k, float per_v,
                                       float out_scale) {
  typedef Cached<NUMBER> In;
  typedef typename In::Eight Eight;
  constexpr int UNITS = HEAD / 32, HALVES = (HEAD + 63) / 64, AT_ONCE = In::AT_ONCE, ROW = HEAD + In::BEHIND;
  constexpr bool KEYS_BY_TWO = In::BY_TWO && HEAD % 64 == 0, VALUES_BY_TWO = In::BY_TWO && HEAD % 128 == 0;
  const int split = blockIdx.x, kv_head = blockIdx.y, kv_heads = gridDim.y, line = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  __shared__ __align__(16) u16 q_shared[QUERIES][HEAD + 32];
  __shared__ float parts[WARPS][QUERIES][HEAD];  // the warps' outputs, and a scratch before that
  __shared__ float best_of[WARPS][QUERIES], sum_of[WARPS][QUERIES];
  __shared__ float joined[QUERIES * HEAD], joined_best[QUERIES], joined_sum[QUERIES];
  let_next_start();
  const int context = lens[line], token = starts[line];
  const int num_blocks = (context + KEYS - 1) / KEYS;
  const int active = min(int(gridDim.x), (num_blocks + WARPS - 1) / WARPS);  // blocks of the cluster that have keys
  const bool idle = starts[line + 1] - token != 1 || split >= active;
  const int stride = active * WARPS, first = split * WARPS + warp;
  const int* table = tables + long(rows ? max(rows[line], 0) : line) * table_stride;
  auto block_at = [&](int index) { return table[index] * kv_heads + kv_head; };  // in blocks of one head
  // Blocks beyond the last are not fetched: their weights are zero.
  Eight k[AT_ONCE][UNITS][2] = {}, v[AT_ONCE][HALVES][4] = {};
  int here[AT_ONCE] = {};
  const NUMBER* k_lane = k_cache + g * ROW + (KEYS_BY_TWO ? t * 16 : In::template first<4>(t));
  const NUMBER* v_lane = v_cache + 2 * t * ROW + (VALUES_BY_TWO ? g * 16 : In::template first<8>(g));
  asm volatile("" : "+l"(k_lane), "+l"(v_lane));  // kept in registers: recomputing them for each load would be half the loop's arithmetic
  auto find = [&](int index) {
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++)
      if (index + n * stride < num_blocks) here[n] = block_at(index + n * stride);
  };
  auto fetch_keys = [&](int index) {  // g and g + 8
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++)
      if (index + n * stride < num_blocks) {
        const NUMBER* from = k_lane + long(here[n]) * (KEYS * ROW);
#pragma unroll
        for (int u = 0; u < UNITS; u += 1 + KEYS_BY_TWO)
#pragma unroll
          for (int i = 0; i < 2; i++)
            if constexpr (KEYS_BY_TWO) In::fetch_two(from + u * 32 + i * 8 * ROW, k[n][u][i], k[n][u + 1][i]);
            else k[n][u][i] = In::template fetch<4>(from + u * 32 + i * 8 * ROW, true);
      }
  };
  auto fetch_values = [&](int index) {  // 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      const int left = context - (index + n * stride) * KEYS;
      const NUMBER* from = v_lane + long(here[n]) * (KEYS * ROW);
      auto fetch_all = [&](bool whole) {
#pragma unroll
        for (int h = 0; h < HALVES; h += 1 + VALUES_BY_TWO)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int key = i % 2 + i / 2 * 8;
            const bool is_key = whole || 2 * t + key < left;
            if constexpr (VALUES_BY_TWO) {
              v[n][h][i] = v[n][h + 1][i] = Eight{};
              if (is_key) In::fetch_two(from + key * ROW + h * 64, v[n][h][i], v[n][h + 1][i]);
            } else if (is_key && (HEAD % 64 == 0 || h * 64 + In::template dim<8>(g, 0) < HEAD))
              v[n][h][i] = In::template fetch<8>(from + key * ROW + h * 64, HEAD % 64 == 0 || h * 64 + 32 < HEAD);
            else v[n][h][i] = Eight{};
          }
      };
      // Uninitialised values may be NaN, and a weight of zero would not remove it.
      if (left >= KEYS) fetch_all(true);
      else if (left > 0) fetch_all(false);
    }
  };
  // This kernel itself writes the last block's last key; earlier steps wrote all keys before it.
  bool early = fused && !idle && first < num_blocks - 1;
#pragma unroll
  for (int n = 1; n < AT_ONCE; n++) early = early && first + n * stride != num_blocks - 1;
  if (!idle) find(first);
  Head<HEAD> head;
  if (early) {
    fetch_keys(first);
    fetch_values(first);
  }
  if (fused && !idle) head.load_angles(cos_sin + long(context - 1) * rotary, rotary);
  wait_for_previous();
  if (idle) return;

  const u16* heads = qkv + long(token) * qkv_stride;
  const int num_heads = kv_heads * group;
  if (fused) {
    const bool owns_last = (num_blocks - 1) % stride / WARPS == split;
    const long slot = (long(block_at((context - 1) / KEYS)) * KEYS + (context - 1) % KEYS) * ROW;
    float(&scratch)[HEAD] = parts[warp][0];
    for (int job = warp; job < (owns_last ? group + 2 : group); job += WARPS) {
      if (job < group)
        head.prepare(heads + (kv_head * group + job) * HEAD, q_norm, eps, rotary, scratch,
                     [&](int, int d, float value) { q_shared[job][In::template place<KEYS_BY_TWO>(d)] = In::query(value); });
      else if constexpr (In::SCALED) {
        float kept[HEAD / 32];
        if (job == group)
          head.prepare(heads + (num_heads + kv_head) * HEAD, k_norm, eps, rotary, scratch,
                       [&](int i, int, float value) { kept[i] = rounded(value); });
        else
#pragma unroll
          for (int i = 0; i < HEAD / 32; i++)
            kept[i] = to_float(heads[(num_heads + kv_heads + kv_head) * HEAD + lane + i * 32]);
        In::write((job == group ? k_cache : v_cache) + slot, kept);
      } else if (job == group)
        head.prepare(heads + (num_heads + kv_head) * HEAD, k_norm, eps, rotary, scratch,
                     [&](int, int d, float value) { k_cache[slot + d] = In::number(value, per_k); });
      else
        for (int d = lane; d < HEAD; d += 32)
          v_cache[slot + d] = In::number(to_float(heads[(num_heads + kv_heads + kv_head) * HEAD + d]), per_v);
    }
  } else {
    for (int i = threadIdx.x; i < group * HEAD; i += WARPS * 32)
      q_shared[i / HEAD][In::template place<KEYS_BY_TWO>(i % HEAD)] = In::query(to_float(heads[kv_head * group * HEAD + i]));
  }
  __syncthreads();

  const u32 q_at = u32(__cvta_generic_to_shared(&q_shared[min(g, group - 1)][t * 8]));
  float out_t[HALVES * 4][4] = {};
  float best[2] = {-1e30f, -1e30f}, total[2] = {};
  if (!early) fetch_keys(first);
  for (int index = first; index < num_blocks; index += AT_ONCE * stride) {
    if (index != first || !early) fetch_values(index);
    float of_keys[AT_ONCE][2] = {}, of_values[AT_ONCE][2] = {};  // scales of keys g and g + 8, from sectors in flight
    if constexpr (In::SCALED)
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const long at = (long(here[n]) * KEYS + g + 8 * i) * ROW + HEAD;
          if ((index + n * stride) * KEYS + g + 8 * i < context)
            of_keys[n][i] = __uint_as_float(In::word(k_cache + at)), of_values[n][i] = __uint_as_float(In::word(v_cache + at));
        }
    float score[AT_ONCE][4] = {};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      const Vec q = load_again(q_at + u * 64);
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++) {
        const Vec above = In::widened(k[n][u][0]), below = In::widened(k[n][u][1]);
        In::multiply(score[n], above.word[0], below.word[0], above.word[1], below.word[1], q.word[0], q.word[1]);
        In::multiply(score[n], above.word[2], below.word[2], above.word[3], below.word[3], q.word[2], q.word[3]);
      }
    }
    if constexpr (In::SCALED)
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) score[n][c] *= of_keys[n][c / 2];
    find(index + AT_ONCE * stride);
    fetch_keys(index + AT_ONCE * stride);
    if ((index + (AT_ONCE - 1) * stride + 1) * KEYS > context) {  // some keys are masked; at least one is not
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++) {
        const int left = context - (index + n * stride) * KEYS - g;
        if (left <= 0) score[n][0] = score[n][1] = __int_as_float(0xff800000);
        if (left <= 8) score[n][2] = score[n][3] = __int_as_float(0xff800000);
      }
    }
    float shrink[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {  // query 2t + c
      float top = fmaxf(score[0][c], score[0][c + 2]);
#pragma unroll
      for (int n = 1; n < AT_ONCE; n++) top = fmaxf(top, fmaxf(score[n][c], score[n][c + 2]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      top = fmaxf(top * scale_log2, best[c]);
      shrink[c] = exp2_of(best[c] - top);
      best[c] = top;
      total[c] *= shrink[c];
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++) {
        score[n][c] = exp2_of(score[n][c] * scale_log2 - top);
        score[n][c + 2] = exp2_of(score[n][c + 2] * scale_log2 - top);
        total[c] += score[n][c] + score[n][c + 2];
      }
    }
#pragma unroll
    for (int i = 0; i < HALVES * 4; i++)
      out_t[i][0] *= shrink[0], out_t[i][1] *= shrink[1], out_t[i][2] *= shrink[0], out_t[i][3] *= shrink[1];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      if constexpr (In::SCALED)
#pragma unroll
        for (int c = 0; c < 4; c++) score[n][c] *= of_values[n][c / 2];
      u32 p[2] = {In::weights(score[n][0], score[n][1]), In::weights(score[n][2], score[n][3])};
#pragma unroll
      for (int c = 0; c < 2; c++) asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(p[c]));
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        u32 near[8], far[8];  // by dim, keys 2t and 2t + 1, and those plus 8
        In::pair(v[n][h][0], v[n][h][1], near);
        In::pair(v[n][h][2], v[n][h][3], far);
#pragma unroll
        for (int i = 0; i < 4; i++)  // of 64 dims a lane's 2i and the one after
          In::multiply(out_t[h * 4 + i], near[2 * i], near[2 * i + 1], far[2 * i], far[2 * i + 1], p[0], p[1]);
      }
    }
  }

  if constexpr (In::SCALED) out_scale /= In::OF_WEIGHTS;
  __syncthreads();  // the scratch becomes `parts`
#pragma unroll
  for (int c = 0; c < 2; c++) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) total[c] += __shfl_xor_sync(~0u, total[c], step);
    if (g == 0) best_of[warp][2 * t + c] = best[c], sum_of[warp][2 * t + c] = total[c];
    if (2 * t + c < group)
#pragma unroll
      for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int dim = VALUES_BY_TWO ? h / 2 * 128 + g * 16 + h % 2 * 8 + 2 * i : h * 64 + In::template dim<8>(g, i);
          if (dim < HEAD) {
            parts[warp][2 * t + c][dim] = out_t[h * 4 + i][c];
            parts[warp][2 * t + c][dim + 1] = out_t[h * 4 + i][c + 2];
          }
        }
  }
  __syncthreads();

  u16* answer = out + (long(token) * num_heads + kv_head * group) * HEAD;
  for (int i = threadIdx.x; i < group * HEAD; i += WARPS * 32) {
    const int query = i / HEAD, dim = i % HEAD;
    float top = -1e30f, sum = 0.f, value = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, best_of[w][query]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float share = exp2_of(best_of[w][query] - top);
      sum += sum_of[w][query] * share;
      value += parts[w][query][dim] * share;
    }
    if (active == 1) {
      answer[i] = u16(pack(value * out_scale / sum, 0.f));
    } else {
      joined[i] = value;
      if (dim == 0) joined_best[query] = top, joined_sum[query] = sum;
    }
  }
  if (active == 1) return;
  wait_for_cluster();
  for (int i = split * WARPS * 32 + threadIdx.x; i < group * HEAD; i += active * WARPS * 32) {
    const int query = i / HEAD;
    float top = -1e30f, sum = 0.f, value = 0.f;
    for (int s = 0; s < active; s++) top = fmaxf(top, load_remote(&joined_best[query], s));
    for (int s = 0; s < active; s++) {
      const float share = exp2_of(load_remote(&joined_best[query], s) - top);
      sum += load_remote(&joined_sum[query], s) * share;
      value += load_remote(&joined[i], s) * share;
    }
    answer[i] = u16(pack(value * out_scale / sum, 0.f));
  }
  wait_for_cluster();  // no block may exit while others read its shared memory
}

#define DECODE(NAME, HEAD, WARPS, BLOCKS, NUMBER)                                                                        \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                                       \
      NAME(const u16* qkv, int qkv_stride, const u16* q_norm, const u16* k_norm, float eps, const float* cos_sin,        \
           int rotary, int fused, NUMBER* k_cache, NUMBER* v_cache, const int* tables, int table_stride,                 \
           const int* rows, const int* starts, const int* lens, u16* out, float scale_log2, int group, float per_k,      \
           float per_v, float out_scale) {                                                                               \
    decode<HEAD, WARPS, NUMBER>(qkv, qkv_stride, q_norm, k_norm, eps, cos_sin, rotary, fused, k_cache, v_cache, tables,  \
                                table_stride, rows, starts, lens, out, scale_log2, group, per_k, per_v, out_scale);      \
  }
