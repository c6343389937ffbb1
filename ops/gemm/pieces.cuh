// Products of a weight in codes: 4-bit (integers, E2M1 or table indices), fp8 or int8. Codes become exact 16-bit floats in the
// registers that matrix instructions read. Scales multiply a group's float32 sums without rounding. If SCALED, they multiply the
// numbers, rounded to 16 bits, so that no sum is waited for: faster with many rows of x.
//
// A piece of the weight (pieces.py) is 32 rows by 128 columns: a lane's codes of a row are 16 or 32 bytes; GROUPS scales of each
// row follow them.

constexpr int CHUNK = 128, PIECE_ROWS = 32;

template <int ROWS>
struct Products {  // sums (+)= weight[64, 16] x[ROWS, 16]^T, the weight in registers; see warpgroups.py
  static __device__ void add(float (&sums)[ROWS / 2], const u32 (&weight)[4], u64 x, int begun);
};

__device__ __forceinline__ Vec load_vec(const unsigned char* shared) { return *reinterpret_cast<const Vec*>(shared); }
__device__ __forceinline__ u32 load_word(const unsigned char* shared) { return *reinterpret_cast<const u32*>(shared); }

// Conversion of a chunk's codes to numbers: VECS of 16 bytes of a row per lane, and words of scale and zero point. Assembly is
// volatile so that it is not moved away from concurrent products.
#ifdef FLOAT16
#define PRODUCT "mul.rn.f16x2"
#else
#define PRODUCT "mul.rn.bf16x2"
#endif

struct W4Codes {
  static constexpr int VECS = 1;
  static constexpr bool BY_TABLE = false;
  // A float32 scale without its last 8 bits, which contain the zero point.
  static __device__ __forceinline__ float scale(u32 word) { return __uint_as_float(word & 0xffffff00); }
  // Of 16 columns, the `step`th of a chunk: two of the first eight or of the last eight.
  static __device__ __forceinline__ u32 two(const Vec (&codes)[VECS], int step, int upper, u32 scale) {
    const u32 word = codes[0].word[step / 2] >> (step % 2 * 8 + upper * 4), zeros = W4_BASE | (scale & 15) * 0x10001;
    u32 pair;
    asm volatile("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(pair) : "r"(word), "r"(0x000f000f), "r"(W4_BASE));  // (a & b) | c
    asm volatile(DIFFERENCE " %0, %0, %1;" : "+r"(pair) : "r"(zeros));
    return pair;
  }
};

struct Q4Codes {  // like W4Codes, but zero point and scale are float16: in the lower and the upper half of a word
  static constexpr int VECS = 1;
  static constexpr bool BY_TABLE = false;
  static __device__ __forceinline__ float half(u32 bits) {
    float value;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "r"(bits & 0xffff));
    return value;
  }
  static __device__ __forceinline__ float scale(u32 word) { return half(word >> 16); }
  static __device__ __forceinline__ u32 two(const Vec (&codes)[VECS], int step, int upper, u32 scale) {
    const u32 word = codes[0].word[step / 2] >> (step % 2 * 8 + upper * 4);
    const float zero = half(scale);
    const u32 zeros = pack(zero, zero);
    u32 pair;
    asm volatile("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(pair) : "r"(word), "r"(0x000f000f), "r"(W4_BASE));
    asm volatile(DIFFERENCE " %0, %0, %1;" : "+r"(pair) : "r"(W4_BASE));
    asm volatile(DIFFERENCE " %0, %0, %1;" : "+r"(pair) : "r"(zeros));
    return pair;
  }
};

struct W8Codes {  // signed bytes, in the layout of fp8
  static constexpr int VECS = 2;
  static constexpr bool BY_TABLE = false;
  static __device__ __forceinline__ float scale(u32 word) { return __uint_as_float(word); }
  // Seven bits become the end of such a mantissa; the sign subtracts the value of the next bit.
  static __device__ __forceinline__ u32 two(const Vec (&codes)[VECS], int step, int upper, u32) {
    const u32 bytes = __byte_perm(codes[step / 4].word[step % 4], 0, upper ? 0x4342 : 0x4140);
    const u32 below = (bytes & 0x00800080) | W4_BASE;
    u32 pair = (bytes & 0x007f007f) | W4_BASE;
    asm volatile(DIFFERENCE " %0, %0, %1;" : "+r"(pair) : "r"(below));
    return pair;
  }
};

struct Q8Codes : W8Codes {  // and words as in Q4Codes
  static __device__ __forceinline__ float scale(u32 word) { return Q4Codes::scale(word); }
  static __device__ __forceinline__ u32 two(const Vec (&codes)[VECS], int step, int upper, u32 scale) {
    const float zero = Q4Codes::half(scale);
    const u32 zeros = pack(zero, zero);
    u32 pair = W8Codes::two(codes, step, upper, scale);
    asm volatile(DIFFERENCE " %0, %0, %1;" : "+r"(pair) : "r"(zeros));
    return pair;
  }
};

struct E2m1Codes {  // its two exponent bits become the lowest bits of a wider exponent
  static constexpr int VECS = 1;
  static constexpr bool BY_TABLE = false;
#ifdef FLOAT16
  static constexpr u32 SHIFT = 9, LACKS = 0x74007400;  // 2^14
#else
  static constexpr u32 SHIFT = 6, LACKS = 0x7e807e80;  // 2^126
#endif
  static __device__ __forceinline__ float scale(u32 word) { return __uint_as_float(word); }
  static __device__ __forceinline__ u32 two(const Vec (&codes)[VECS], int step, int upper, u32) {
    const u32 word = codes[0].word[step / 2] >> (step % 2 * 8 + upper * 4);
    u32 pair = (word & 0x00070007) << SHIFT | (word & 0x00080008) << 12;
    asm volatile(PRODUCT " %0, %0, %1;" : "+r"(pair) : "r"(LACKS));
    return pair;
  }
};

// Indices of sixteen 16-bit numbers: TABLE's words 0 to 3 are their lower bytes, 4 to 7 the upper ones (pieces.py).
template <class TABLE>
struct TableCodes {
  static constexpr int VECS = 1;
  static constexpr bool BY_TABLE = true;
  static __device__ __forceinline__ float scale(u32 word) { return __uint_as_float(word); }
  // Bytes of four codes, the lowest nibbles of `places`: from the first eight and from the last eight entries, then one of both.
  static __device__ __forceinline__ u32 bytes(const u32* table, u32 places, u32 which) {
    return out_of(out_of(table[0], table[1], places), out_of(table[2], table[3], places), which);
  }
  static __device__ __forceinline__ u32 out_of(u32 low, u32 high, u32 places) {  // __byte_perm would mask them
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(places));
    return bytes;
  }
  // For a quarter of a chunk, two steps: pairs of the first eight and of the last eight columns of a step, one byte each.
  static __device__ __forceinline__ void quarter(const Vec (&codes)[VECS], int quarter, u32 (&pairs)[4]) {
    constexpr u32 LOWER[4] = {TABLE::WORDS[0], TABLE::WORDS[1], TABLE::WORDS[2], TABLE::WORDS[3]};
    constexpr u32 UPPER[4] = {TABLE::WORDS[4], TABLE::WORDS[5], TABLE::WORDS[6], TABLE::WORDS[7]};
    const u32 word = codes[0].word[quarter], places = word & 0x77777777, which = word >> 1 & 0x44444444 | 0x32103210;
#pragma unroll
    for (int step = 0; step < 2; step++) {  // of `places`, only the lower half is used
      const u32 at = places >> (step * 16), of = which >> (step * 16);
      const u32 lower = bytes(LOWER, at, of), upper = bytes(UPPER, at, of);
      pairs[2 * step] = __byte_perm(lower, upper, 0x5140);
      pairs[2 * step + 1] = __byte_perm(lower, upper, 0x7362);
    }
  }
};
struct Fp8Codes {  // factor by which numbers are too small
  static constexpr int VECS = 2;
  static constexpr bool BY_TABLE = false;
#ifdef FLOAT16
  static constexpr u32 LACKS = 0x5c005c00;  // 2^8
#else
  static constexpr u32 LACKS = 0x7b807b80;  // 2^120
#endif
  static __device__ __forceinline__ float scale(u32 word) { return __uint_as_float(word); }
  static __device__ __forceinline__ u32 two(const Vec (&codes)[VECS], int step, int upper, u32) {
    u32 pair;
    asm volatile("prmt.b32 %0, %1, 0, %2;" : "=r"(pair) : "r"(codes[step / 4].word[step % 4]), "r"(upper ? 0xb3a2 : 0x9180));
    pair = pair << FP8_SHIFT & FP8_MASK;
    asm volatile(PRODUCT " %0, %0, %1;" : "+r"(pair) : "r"(LACKS));
    return pair;
  }
};

// Chunks of 128 columns in flight from memory to the WGS multiplying warpgroups, STAGES at a time: WGS * 64 rows of the
// weight and ROWS of x. GATED: half the rows are gates, the rest their ups.
template <class CODES, int ROWS, int WGS, int STAGES, int GROUPS, bool SCALED, bool GATED>
struct Ring {
  static constexpr int PIECE = PIECE_ROWS * (CODES::VECS * 64 + GROUPS * 4), X_BYTES = ROWS * CHUNK * 2, W_BYTES = 2 * WGS * PIECE;
  static constexpr int CONSUMERS = WGS * 128;
  static_assert(SCALED || GROUPS <= 4, "sums end with quarters of a chunk");
  unsigned char *x_stages, *w_stages;
  u64 *full, *empty;
  int stage = 0, parity = 0;

  // `shared`: STAGES * (X_BYTES + W_BYTES) bytes after the next multiple of 1024. All threads synchronise after this.
  __device__ __forceinline__ Ring(unsigned char* shared, u64* full, u64* empty) : full(full), empty(empty) {
    x_stages = shared + (1024 - address_of(shared) % 1024) % 1024;
    w_stages = x_stages + STAGES * X_BYTES;
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; i++) {
        make_barrier(full + i, 1);
        make_barrier(empty + i, CONSUMERS / 32);
      }
      barriers_are_made();
    }
  }

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }

  // Called by one thread: chunk `at` of a tile's rows, of a weight of this many pieces, each of `chunks`.
  __device__ __forceinline__ void fetch_weight(const unsigned char* weight, int tile, int pieces, int chunks, int at) {
    expect_bytes(full + stage, X_BYTES + W_BYTES);
#pragma unroll
    for (int p = 0; p < 2 * WGS; p++) {  // pieces beyond the last repeat it
      const int piece = min(GATED ? p % 2 * (pieces / 2) + tile * WGS + p / 2 : tile * WGS * 2 + p, pieces - 1);
      copy_bytes(w_stages + stage * W_BYTES + p * PIECE, weight + (long(piece) * chunks + at) * PIECE, PIECE, full + stage);
    }
  }
  __device__ __forceinline__ void fetch_x(const TensorMap* x_map, int first_row, int at) {
    unsigned char* to = x_stages + stage * X_BYTES;
    copy_tile(to, x_map, full + stage, at * CHUNK, first_row);
    copy_tile(to + X_BYTES / 2, x_map, full + stage, at * CHUNK + CHUNK / 2, first_row);
  }

  // Called by all multiplying threads: sums += the next `count` chunks, at least one.
  __device__ __forceinline__ void multiply(float (&sums)[ROWS / 2], int count) {
    // The first eight of a warp's 16 rows are one unit of a piece, their partners another.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, of_group = warp / 4, in_group = warp % 4;
    const int upper_row = GATED ? in_group * 8 + g : in_group % 2 * 16 + g, lower_row = GATED ? upper_row : upper_row + 8;
    const int upper_piece = of_group * 2 + (GATED ? 0 : in_group / 2), lower_piece = GATED ? upper_piece + 1 : upper_piece;
    const unsigned char* upper_at = w_stages + upper_piece * PIECE + upper_row * 64 + lane % 4 * 16;
    const unsigned char* lower_at = w_stages + lower_piece * PIECE + lower_row * 64 + lane % 4 * 16;
    const int upper_scale = upper_piece * PIECE + PIECE_ROWS * CODES::VECS * 64 + upper_row * 4;
    const int lower_scale = lower_piece * PIECE + PIECE_ROWS * CODES::VECS * 64 + lower_row * 4;

    float part[SCALED ? 1 : ROWS / 2];
    u32 numbers[2][2][4];  // each of a quarter of a chunk
    Vec codes[2][CODES::VECS];
    u32 scale[GROUPS][2];
    auto load_codes = [&](int stage) {
#pragma unroll
      for (int i = 0; i < CODES::VECS; i++) {
        codes[0][i] = load_vec(upper_at + stage * W_BYTES + i * PIECE_ROWS * 64);
        codes[1][i] = load_vec(lower_at + stage * W_BYTES + i * PIECE_ROWS * 64);
      }
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        scale[i][0] = load_word(w_stages + stage * W_BYTES + upper_scale + i * PIECE_ROWS * 4);
        scale[i][1] = load_word(w_stages + stage * W_BYTES + lower_scale + i * PIECE_ROWS * 4);
      }
    };
    auto expand = [&](int quarter) {
      u32 found[2][4];
      if constexpr (CODES::BY_TABLE) {
        CODES::quarter(codes[0], quarter, found[0]);
        CODES::quarter(codes[1], quarter, found[1]);
      }
#pragma unroll
      for (int step = 0; step < 2; step++)
#pragma unroll
        for (int row = 0; row < 2; row++) {
          const u32 of_group = scale[(quarter * 2 + step) * GROUPS / 8][row];
          u32(&to)[4] = numbers[quarter % 2][step];
          if constexpr (CODES::BY_TABLE) {
            to[row] = found[row][step * 2], to[row + 2] = found[row][step * 2 + 1];
          } else {
            to[row] = CODES::two(codes[row], quarter * 2 + step, 0, of_group);
            to[row + 2] = CODES::two(codes[row], quarter * 2 + step, 1, of_group);
          }
          if constexpr (SCALED) {
            const float by = CODES::scale(of_group);
            const u32 both = pack(by, by);
            asm volatile(PRODUCT " %0, %0, %1;" : "+r"(to[row]) : "r"(both));
            asm volatile(PRODUCT " %0, %0, %1;" : "+r"(to[row + 2]) : "r"(both));
          }
        }
    };
    wait_for(full + stage, parity);
    load_codes(stage);
    expand(0);
    int before = stage;
    for (int i = 0; i < count; i++) {
      const u64 x = operand(x_stages + stage * X_BYTES);
      const int current = stage;
      float by[GROUPS][2];
#pragma unroll
      for (int group = 0; group < GROUPS; group++)
#pragma unroll
        for (int row = 0; row < 2; row++) by[group][row] = CODES::scale(scale[group][row]);
#pragma unroll
      for (int quarter = 0; quarter < 4; quarter++) {
        begin_products();
#pragma unroll
        for (int step = 0; step < 2; step++) {
          const int at = quarter * 2 + step;  // of the chunk's steps of 16 columns
          const u64 of_x = x + at / 4 * (X_BYTES / 32) + at % 4 * 2;
          if constexpr (SCALED) Products<ROWS>::add(sums, numbers[quarter % 2][step], of_x, 1);
          else Products<ROWS>::add(part, numbers[quarter % 2][step], of_x, at % (8 / GROUPS));
        }
        end_products();
        // Meanwhile the next quarter is converted, in the registers of the last one.
        if (quarter == 3) {
          advance();
          if (i + 1 < count) {
            wait_for(full + stage, parity);
            load_codes(stage);
          }
        }
        wait_for_products<1>();
        if (SCALED && quarter == 0 && i > 0 && lane == 0) arrive(empty + before);
        expand((quarter + 1) % 4);
        if constexpr (!SCALED) {
          if ((quarter + 1) * GROUPS % 4) continue;
          wait_for_products<0>();
          settle(part);
          const int group = quarter * GROUPS / 4;
#pragma unroll
          for (int j = 0; j < ROWS / 2; j++) sums[j] += part[j] * by[group][j / 2 % 2];
        }
      }
      if (!SCALED && lane == 0) arrive(empty + current);
      before = current;
    }
    if constexpr (SCALED) {
      wait_for_products<0>();
      settle(sums);
      if (lane == 0) arrive(empty + before);
    }
  }
};
