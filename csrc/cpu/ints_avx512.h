// Sixteen lanes of four bytes, on AVX-512 with or without VNNI. Included by quants_avx512*.cpp only, after vec_avx512.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

inline __m512i broadcast_four(const uint8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}

struct Ints {
    __m512i v;

    static Ints zero() { return {_mm512_setzero_si512()}; }
    static Ints broadcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
    // Four bytes in every lane, kept in a register: the compiler must not fold the load into each use.
    static Ints broadcast_from(const uint8_t* p) {
        Ints x{broadcast_four(p)};
        asm("" : "+v"(x.v));
        return x;
    }
    friend Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
    template <int kBits>
    Ints shifted_left() const {
        return {_mm512_slli_epi32(v, kBits)};
    }
    Vec floats() const { return {_mm512_cvtepi32_ps(v)}; }
};

struct Bytes {
    __m512i v;

    static Bytes load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
    static Bytes broadcast(uint8_t x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
    void store(uint8_t* p) const { _mm512_storeu_si512(p, v); }
    friend Bytes operator&(Bytes a, Bytes b) { return {_mm512_and_si512(a.v, b.v)}; }
    friend Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
    friend Bytes operator^(Bytes a, Bytes b) { return {_mm512_xor_si512(a.v, b.v)}; }
    // To the left, or to the right below zero; bits cross the borders of bytes.
    template <int kBits>
    Bytes shifted() const {
        if constexpr (kBits == 0) return *this;
        if constexpr (kBits > 0) return {_mm512_slli_epi16(v, kBits)};
        return {_mm512_srli_epi16(v, -kBits)};
    }
};

#if defined(__AVX512VNNI__)
#define ONELOOP_DOT 1
// sum + the four products of each lane, unsigned weights times the same four signed bytes.
template <int>
inline Ints dot(Ints sum, Bytes weights, const uint8_t* four) {
    return {_mm512_dpbusd_epi32(sum.v, weights.v, broadcast_four(four))};
}
#else
struct Shorts {
    __m512i v;

    static Shorts zero() { return {_mm512_setzero_si512()}; }
    // sum + the products of neighbours; no sum may leave 16 bits.
    static Shorts dot(Shorts sum, Bytes weights, const uint8_t* four) {
        sum.v = _mm512_add_epi16(sum.v, _mm512_maddubs_epi16(weights.v, broadcast_four(four)));
        asm("" : "+v"(sum.v));  // else gcc keeps all products, in memory, to add them up as a tree
        return sum;
    }
    Ints pairs() const { return {_mm512_madd_epi16(v, _mm512_set1_epi16(1))}; }
};
#endif

// sum + the two products of each lane, of signed numbers of sixteen bits.
inline Ints dot_shorts(Ints sum, Bytes weights, Ints two) {
#if defined(__AVX512VNNI__)
    return {_mm512_dpwssd_epi32(sum.v, weights.v, two.v)};
#else
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(weights.v, two.v))};
#endif
}

inline Vec load_uint8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec load_int8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Whole numbers of at most 127 as signed bytes; a NaN is any byte.
inline void store_int8(Vec x, uint8_t* p) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
// The same of sixteen bits.
inline void store_shorts(Vec x, uint8_t* p) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v)));
}

}  // namespace
