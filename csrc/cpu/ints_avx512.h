// Sixteen lanes of four bytes, on AVX-512 with or without VNNI. Included by quants_avx512*.cpp only, after vec_avx512.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ints.h"

namespace {

#if defined(__AVX512VNNI__)
#define ONELOOP_DOT 1
// sum + the four products of each lane, unsigned weights times the same four signed bytes.
template <int>
inline Ints dot(Ints sum, Bytes weights, const uint8_t* four) {
    return {(Ints::Lanes)_mm512_dpbusd_epi32((__m512i)sum.v, (__m512i)weights.v, (__m512i)Ints::broadcast(four_bytes(four)).v)};
}
#else
struct Shorts {
    __m512i v;

    static Shorts zero() { return {_mm512_setzero_si512()}; }
    // sum + the products of neighbours; sums must fit into 16 bits.
    static Shorts dot(Shorts sum, Bytes weights, const uint8_t* four) {
        sum.v = _mm512_add_epi16(sum.v, _mm512_maddubs_epi16((__m512i)weights.v, (__m512i)Ints::broadcast(four_bytes(four)).v));
        asm("" : "+v"(sum.v));  // else gcc keeps all products, in memory, to add them up as a tree
        return sum;
    }
    Ints pairs() const { return {(Ints::Lanes)_mm512_madd_epi16(v, _mm512_set1_epi16(1))}; }
};
#endif

// sum + the two products of each lane, of signed numbers of sixteen bits.
inline Ints dot_shorts(Ints sum, Bytes weights, Ints two) {
#if defined(__AVX512VNNI__)
    return {(Ints::Lanes)_mm512_dpwssd_epi32((__m512i)sum.v, (__m512i)weights.v, (__m512i)two.v)};
#else
    return {sum.v + (Ints::Lanes)_mm512_madd_epi16((__m512i)weights.v, (__m512i)two.v)};
#endif
}

inline Vec load_uint8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec load_int8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Converts integers of at most 127 to signed bytes; a NaN becomes any byte.
inline void store_int8(Vec x, uint8_t* p) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
// The same of sixteen bits.
inline void store_shorts(Vec x, uint8_t* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v)));
}

}  // namespace
