// Eight floats in one register, on AVX2, FMA and F16C. Included by avx2.cpp and quants_avx*.cpp only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct Vec {
    static constexpr int kWidth = 8;
    static constexpr int kRegisters = 16;
    __m256 v;

    static Vec zero() { return {_mm256_setzero_ps()}; }
    static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Vec load(const float* p, int n) { return {_mm256_maskload_ps(p, first(n))}; }
    static Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
    static Vec load_bfloat16(const uint16_t* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static Vec load_bfloat16(const uint16_t* p, int n) {
        alignas(16) uint16_t whole[8] = {};
        for (int i = 0; i < n; i++) whole[i] = p[i];
        return load_bfloat16(whole);
    }
    static Vec load_float16(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
    static Vec load_int8(const int8_t* p) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
    }
    static Vec load_int8(const int8_t* p, int n) {
        alignas(8) int8_t whole[8] = {};
        for (int i = 0; i < n; i++) whole[i] = p[i];
        return load_int8(whole);
    }
    static Vec lane_index() { return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)}; }

    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store(float* p, int n) const { _mm256_maskstore_ps(p, first(n), v); }
    void store_bfloat16(uint16_t* p, int n) const {
        alignas(16) uint16_t whole[8];
        _mm_store_si128(reinterpret_cast<__m128i*>(whole), narrow());
        for (int i = 0; i < n; i++) p[i] = whole[i];
    }
    // Of numbers in [-127, 127], rounded to nearest even.
    void store_int8(int8_t* p, int n) const {
        const __m256i whole = _mm256_cvtps_epi32(v);
        const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        alignas(16) int8_t bytes[16];
        _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm_packs_epi16(halves, halves));
        for (int i = 0; i < n; i++) p[i] = bytes[i];
    }
    void pin() { asm("" : "+x"(v)); }

    static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
    // A NaN in b survives.
    static Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
    static Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
    friend Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
    friend Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
    friend Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
    friend Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
    static Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    // x * 2^n for whole n in [-252, 254], in two steps so that results may be subnormal, zero or infinite.
    static Vec scale_by_power(Vec x, Vec n) {
        __m256i whole = _mm256_cvtps_epi32(n.v);
        __m256i half = _mm256_srai_epi32(whole, 1);
        return {_mm256_mul_ps(_mm256_mul_ps(x.v, power(half)), power(_mm256_sub_epi32(whole, half)))};
    }
    // a where x <= limit, else b.
    static Vec select_le(Vec x, Vec limit, Vec a, Vec b) {
        return {_mm256_blendv_ps(b.v, a.v, _mm256_cmp_ps(x.v, limit.v, _CMP_LE_OQ))};
    }
    float sum() const {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    float largest() const {
        __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_max_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
    }

private:
    static __m256i first(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
    static __m256 power(__m256i n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    }
    static Vec widen(__m128i h) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))}; }
    __m128i narrow() const {
        // Round to nearest even; a NaN keeps its top half and is made quiet.
        __m256i bits = _mm256_castps_si256(v);
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        __m256i top = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(top, top), 0x08);
        return _mm256_castsi256_si128(packed);
    }
};

// to[d * to_stride + i] = rows[i][d] for i < 8, d < 8.
inline void transpose_square(const Vec (&rows)[8], float* to, int64_t to_stride, int) {
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
        t[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int j = 0; j < 4; j++) {
        _mm256_storeu_ps(to + j * to_stride, _mm256_permute2f128_ps(u[j], u[4 + j], 0x20));
        _mm256_storeu_ps(to + (4 + j) * to_stride, _mm256_permute2f128_ps(u[j], u[4 + j], 0x31));
    }
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace
