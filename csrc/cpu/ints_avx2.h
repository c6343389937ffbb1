// Eight lanes of four bytes, on AVX2 with or without VNNI. Included by quants_avx*.cpp only, after vec_avx2.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ints.h"

namespace {

#if defined(__AVXVNNI__)
#define ONELOOP_DOT 1
// sum + the four products of each lane, unsigned weights times the same four signed bytes.
template <int>
inline Ints dot(Ints sum, Bytes weights, const uint8_t* four) {
    return {(Ints::Lanes)_mm256_dpbusd_avx_epi32((__m256i)sum.v, (__m256i)weights.v, (__m256i)Ints::broadcast(four_bytes(four)).v)};
}
#else
struct Shorts {
    __m256i v;

    static Shorts zero() { return {_mm256_setzero_si256()}; }
    // sum + the products of neighbours; sums must fit into 16 bits.
    static Shorts dot(Shorts sum, Bytes weights, const uint8_t* four) {
        sum.v = _mm256_add_epi16(sum.v, _mm256_maddubs_epi16((__m256i)weights.v, (__m256i)Ints::broadcast(four_bytes(four)).v));
        asm("" : "+x"(sum.v));  // else gcc keeps all products, in memory, to add them up as a tree
        return sum;
    }
    Ints pairs() const { return {(Ints::Lanes)_mm256_madd_epi16(v, _mm256_set1_epi16(1))}; }
};
#endif

// sum + the two products of each lane, of signed numbers of sixteen bits.
inline Ints dot_shorts(Ints sum, Bytes weights, Ints two) {
#if defined(__AVXVNNI__)
    return {(Ints::Lanes)_mm256_dpwssd_avx_epi32((__m256i)sum.v, (__m256i)weights.v, (__m256i)two.v)};
#else
    return {sum.v + (Ints::Lanes)_mm256_madd_epi16((__m256i)weights.v, (__m256i)two.v)};
#endif
}

inline Vec load_uint8(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec load_int8(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
// Converts integers of at most 127 to signed bytes; a NaN becomes any byte.
inline void store_int8(Vec x, uint8_t* p) {
    const __m256i whole = _mm256_cvtps_epi32(x.v);
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(shorts, shorts));
}
// The same of sixteen bits.
inline void store_shorts(Vec x, uint8_t* p) {
    const __m256i whole = _mm256_cvtps_epi32(x.v);
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), shorts);
}

}  // namespace
