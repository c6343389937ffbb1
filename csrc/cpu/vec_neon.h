// Four floats in one register, on ARMv8's Advanced SIMD. Included by neon.cpp and quants_neon*.cpp only.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace {

struct Vec {
    static constexpr int kWidth = 4;
    static constexpr int kRegisters = 32;
    float32x4_t v;

    static Vec zero() { return {vdupq_n_f32(0.0f)}; }
    static Vec load(const float* p) { return {vld1q_f32(p)}; }
    static Vec load(const float* p, int n) {
        if (n == 4) return load(p);
        float whole[4] = {};
        for (int i = 0; i < n; i++) whole[i] = p[i];
        return load(whole);
    }
    static Vec broadcast(float x) { return {vdupq_n_f32(x)}; }
    static Vec load_bfloat16(const uint16_t* p) { return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))}; }
    static Vec load_bfloat16(const uint16_t* p, int n) {
        uint16_t whole[4] = {};
        for (int i = 0; i < n; i++) whole[i] = p[i];
        return load_bfloat16(whole);
    }
    static Vec load_float16(const uint16_t* p) { return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))}; }
    static Vec load_int8(const int8_t* p) {
        // Loads four bytes, not a whole register of eight: the next ones may be outside the allocation.
        uint32_t four;
        __builtin_memcpy(&four, p, sizeof four);
        return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))))};
    }
    static Vec load_int8(const int8_t* p, int n) {
        int8_t whole[4] = {};
        for (int i = 0; i < n; i++) whole[i] = p[i];
        return load_int8(whole);
    }
    static Vec lane_index() {
        static constexpr float kIndex[4] = {0, 1, 2, 3};
        return load(kIndex);
    }

    void store(float* p) const { vst1q_f32(p, v); }
    void store(float* p, int n) const {
        if (n == 4) return store(p);
        float whole[4];
        store(whole);
        for (int i = 0; i < n; i++) p[i] = whole[i];
    }
    void store_bfloat16(uint16_t* p, int n) const {
        uint16_t whole[4];
        vst1_u16(whole, narrow());
        for (int i = 0; i < n; i++) p[i] = whole[i];
    }
    // Of numbers in [-127, 127], rounded to nearest even.
    void store_int8(int8_t* p, int n) const {
        const int16x4_t shorts = vqmovn_s32(vcvtnq_s32_f32(v));
        int8_t whole[8];
        vst1_s8(whole, vqmovn_s16(vcombine_s16(shorts, shorts)));
        for (int i = 0; i < n; i++) p[i] = whole[i];
    }
    void pin() { asm("" : "+w"(v)); }

    static Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
    // A NaN in b survives: vmaxq_f32 would keep one in a as well.
    static Vec max(Vec a, Vec b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
    static Vec min(Vec a, Vec b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
    friend Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
    friend Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
    friend Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
    friend Vec operator/(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
    static Vec round(Vec a) { return {vrndnq_f32(a.v)}; }
    // x * 2^n for whole n in [-252, 254], in two steps so that results may be subnormal, zero or infinite.
    static Vec scale_by_power(Vec x, Vec n) {
        const int32x4_t whole = vcvtq_s32_f32(n.v), half = vshrq_n_s32(whole, 1);
        return {vmulq_f32(vmulq_f32(x.v, power(half)), power(vsubq_s32(whole, half)))};
    }
    // a where x <= limit, else b.
    static Vec select_le(Vec x, Vec limit, Vec a, Vec b) { return {vbslq_f32(vcleq_f32(x.v, limit.v), a.v, b.v)}; }
    // Same lane order as the other instruction sets, so that results have the same bits.
    float sum() const {
        const float32x2_t pairs = vadd_f32(vget_low_f32(v), vget_high_f32(v));
        return vget_lane_f32(pairs, 0) + vget_lane_f32(pairs, 1);
    }
    float largest() const {
        const float32x2_t low = vget_low_f32(v), high = vget_high_f32(v);
        const float32x2_t pairs = vbsl_f32(vcgt_f32(low, high), low, high);
        const float a = vget_lane_f32(pairs, 0), b = vget_lane_f32(pairs, 1);
        return a > b ? a : b;
    }

private:
    static float32x4_t power(int32x4_t n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }
    uint16x4_t narrow() const {
        // Round to nearest even; a NaN keeps its top half and is made quiet.
        const uint32x4_t bits = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16);
    }
};

// to[d * to_stride + i] = rows[i][d] for i < 4, d < 4.
inline void transpose_square(const Vec (&rows)[4], float* to, int64_t to_stride, int) {
    const float32x4x2_t a = vtrnq_f32(rows[0].v, rows[1].v), b = vtrnq_f32(rows[2].v, rows[3].v);
    for (int d = 0; d < 2; d++) {
        vst1q_f32(to + d * to_stride, vcombine_f32(vget_low_f32(a.val[d]), vget_low_f32(b.val[d])));
        vst1q_f32(to + (2 + d) * to_stride, vcombine_f32(vget_high_f32(a.val[d]), vget_high_f32(b.val[d])));
    }
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
