// Conversion of codes to 16-bit floats: positions of their bits.

// E4M3: its four exponent bits become the lowest bits of a wider exponent, so the number is too small by the difference of the
// biases. A code in the top of its 16 bits, with copies of its sign above, is shifted and masked.
#ifdef FLOAT16
constexpr u32 FP8_SHIFT = 7, FP8_MASK = 0xbf80bf80;  // 2^8 too small
#else
constexpr u32 FP8_SHIFT = 4, FP8_MASK = 0x87f087f0;  // 2^120
#endif

// Four bits become the end of the mantissa of a number whose last bit is worth 1, which is too large by that number.
#ifdef FLOAT16
constexpr u32 W4_BASE = 0x64006400;  // 1024
#else
constexpr u32 W4_BASE = 0x43004300;  // 128
#endif

#ifdef FLOAT16
#define DIFFERENCE "sub.rn.f16x2"
#else
#define DIFFERENCE "sub.rn.bf16x2"
#endif
