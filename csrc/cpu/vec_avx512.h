// Sixteen floats in one register, on AVX-512 (F, BW, DQ, VL). Included by avx512.cpp and
// quants_avx512*.cpp only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

struct Vec {
    static constexpr int kWidth = 16;
    static constexpr int kRegisters = 32;
    __m512 v;

    static Vec zero() { return {_mm512_setzero_ps()}; }
    static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
    static Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
    static Vec load_bfloat16(const uint16_t* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static Vec load_bfloat16(const uint16_t* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
    static Vec load_float16(const uint16_t* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static Vec load_int8(const int8_t* p) { return widen_int8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static Vec load_int8(const int8_t* p, int n) { return widen_int8(_mm_maskz_loadu_epi8(first(n), p)); }
    static Vec lane_index() { return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }

    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store(float* p, int n) const { _mm512_mask_storeu_ps(p, first(n), v); }
    void store_bfloat16(uint16_t* p, int n) const { _mm256_mask_storeu_epi16(p, first(n), narrow()); }
    // Of numbers in [-127, 127], rounded to nearest even.
    void store_int8(int8_t* p, int n) const { _mm_mask_storeu_epi8(p, first(n), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v))); }
    // Keeps the value in a register: the compiler must not fold its load into each use.
    void pin() { asm("" : "+v"(v)); }

    static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    // A NaN in b survives.
    static Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
    static Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
    friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
    friend Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
    friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
    friend Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
    static Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    // x * 2^n for whole n, right also where the result is subnormal, zero or infinite.
    static Vec scale_by_power(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
    // a where x <= limit, else b.
    static Vec select_le(Vec x, Vec limit, Vec a, Vec b) {
        return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_LE_OQ), b.v, a.v)};
    }
    float sum() const { return _mm512_reduce_add_ps(v); }
    float largest() const { return _mm512_reduce_max_ps(v); }

private:
    static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
    static Vec widen(__m256i h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))}; }
    static Vec widen_int8(__m128i bytes) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))}; }
    __m256i narrow() const {
        // Round to nearest even; a NaN keeps its top half and is made quiet.
        __m512i bits = _mm512_castps_si512(v);
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    }
};

// to[d * to_stride + i] = rows[i][d] for i < 16, d < 16.
inline void transpose_square(const Vec (&rows)[16], float* to, int64_t to_stride, int num_d) {
    __m512 t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
        t[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < 16; i += 4) {
        u[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
        u[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
        u[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
        u[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
    }
    // u[4g + j] holds, in 128-bit lane l, d = 4l + j of rows 4g to 4g + 3: what is left is a 4x4 transpose of lanes.
    for (int j = 0; j < 4; j++) {
        __m512 a = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x44), b = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x44);
        __m512 c = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xee), d = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xee);
        _mm512_storeu_ps(to + j * to_stride, _mm512_shuffle_f32x4(a, b, 0x88));
        _mm512_storeu_ps(to + (4 + j) * to_stride, _mm512_shuffle_f32x4(a, b, 0xdd));
        if (num_d < 16) continue;
        _mm512_storeu_ps(to + (8 + j) * to_stride, _mm512_shuffle_f32x4(c, d, 0x88));
        _mm512_storeu_ps(to + (12 + j) * to_stride, _mm512_shuffle_f32x4(c, d, 0xdd));
    }
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace
