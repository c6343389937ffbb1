// Four lanes of four bytes, by the compiler's own vectors. Included by quants_portable.cpp only, after vec_portable.h.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "ints.h"

namespace {

#define ONELOOP_DOT 1
// sum + the four products of each lane, unsigned weights times the same four signed bytes.
template <int>
inline Ints dot(Ints sum, Bytes weights, const uint8_t* four) {
#if defined(__SSE2__)
    const __m128i zero = _mm_setzero_si128(), w = (__m128i)weights.v, x = _mm_cvtsi32_si128(four_bytes(four));
    const __m128i shorts = _mm_srai_epi16(_mm_unpacklo_epi8(x, x), 8), twice = _mm_unpacklo_epi64(shorts, shorts);
    const __m128 low = _mm_castsi128_ps(_mm_madd_epi16(_mm_unpacklo_epi8(w, zero), twice));
    const __m128 high = _mm_castsi128_ps(_mm_madd_epi16(_mm_unpackhi_epi8(w, zero), twice));
    return {sum.v + (Ints::Lanes)_mm_shuffle_ps(low, high, 0x88) + (Ints::Lanes)_mm_shuffle_ps(low, high, 0xdd)};
#elif defined(__aarch64__)
    const int16x8_t x = vmovl_s8(vreinterpret_s8_u32(vld1_dup_u32(reinterpret_cast<const uint32_t*>(four))));
    const uint8x16_t w = (uint8x16_t)weights.v;
    // 255 * 128 fits 16 bits.
    const int32x4_t low = vpaddlq_s16(vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(w))), x));
    const int32x4_t high = vpaddlq_s16(vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(w)), x));
    return {sum.v + (Ints::Lanes)vpaddq_s32(low, high)};
#else
    int8_t x[4];
    std::memcpy(x, four, sizeof x);
    for (int i = 0; i < 4; i++)
        sum.v[i] +=
            weights.v[4 * i] * x[0] + weights.v[4 * i + 1] * x[1] + weights.v[4 * i + 2] * x[2] + weights.v[4 * i + 3] * x[3];
    return sum;
#endif
}

// sum + the two products of each lane, of signed numbers of sixteen bits.
inline Ints dot_shorts(Ints sum, Bytes weights, Ints two) {
#if defined(__SSE2__)
    return {sum.v + (Ints::Lanes)_mm_madd_epi16((__m128i)weights.v, (__m128i)two.v)};
#else
    int16_t w[8], x[8];
    std::memcpy(w, &weights.v, sizeof w);
    std::memcpy(x, &two.v, sizeof x);
    for (int i = 0; i < 4; i++) sum.v[i] += w[2 * i] * x[2 * i] + w[2 * i + 1] * x[2 * i + 1];
    return sum;
#endif
}

inline Vec load_uint8(const uint8_t* p) { return {Vec::Lanes{float(p[0]), float(p[1]), float(p[2]), float(p[3])}}; }
inline Vec load_int8(const uint8_t* p) {
    int8_t x[4];
    std::memcpy(x, p, sizeof x);
    return {Vec::Lanes{float(x[0]), float(x[1]), float(x[2]), float(x[3])}};
}
// Converts integers of at most 127 to signed bytes; a NaN becomes any byte.
inline void store_int8(Vec x, uint8_t* p) {
    for (int i = 0; i < Vec::kWidth; i++) {
        const float f = x.v[i] > -128.0f ? x.v[i] : -128.0f;
        p[i] = static_cast<uint8_t>(static_cast<int8_t>(f < 127.0f ? f : 127.0f));
    }
}

// The same of sixteen bits.
inline void store_shorts(Vec x, uint8_t* p) {
    int16_t shorts[Vec::kWidth];
    for (int i = 0; i < Vec::kWidth; i++) {
        const float f = x.v[i] > -32768.0f ? x.v[i] : -32768.0f;
        shorts[i] = static_cast<int16_t>(f < 32767.0f ? f : 32767.0f);
    }
    std::memcpy(p, shorts, sizeof shorts);
}

}  // namespace
