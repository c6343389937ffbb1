// Four lanes of four bytes, on ARMv8 with or without its dot products. Included by quants_neon*.cpp only, after vec_neon.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "ints.h"

namespace {

#define ONELOOP_DOT 1
// sum + the four products of each lane, unsigned weights of kBits bits times the same four signed bytes.
template <int kBits>
inline Ints dot(Ints sum, Bytes weights, const uint8_t* four) {
    const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four_bytes(four)));
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return {vusdotq_s32(sum.v, weights.v, x)};
#elif defined(__ARM_FEATURE_DOTPROD)
    if constexpr (kBits < 8) return {vdotq_s32(sum.v, vreinterpretq_s8_u8(weights.v), x)};
    // Signed, they are 128 too small.
    const int8x16_t half = vdupq_n_s8(64);
    return {vdotq_s32(vdotq_s32(vdotq_s32(sum.v, vreinterpretq_s8_u8((weights ^ Bytes::broadcast(128)).v), x), half, x), half, x)};
#else
    if constexpr (kBits < 8) {  // two products of six bits and seven fit 16 bits
        const int8x16_t w = vreinterpretq_s8_u8(weights.v);
        const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
        return {vpadalq_s16(sum.v, vpaddq_s16(low, high))};
    }
    // One of eight and seven does: 255 * 128.
    const int16x8_t wide = vmovl_s8(vget_low_s8(x));
    const int16x8_t low = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(weights.v))), wide);
    const int16x8_t high = vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(weights.v)), wide);
    return {vaddq_s32(sum.v, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))};
#endif
}

// sum + the two products of each lane, of signed numbers of sixteen bits.
inline Ints dot_shorts(Ints sum, Bytes weights, Ints two) {
    const int16x8_t w = vreinterpretq_s16_u8(weights.v), x = vreinterpretq_s16_s32(two.v);
    return {vaddq_s32(sum.v, vpaddq_s32(vmull_s16(vget_low_s16(w), vget_low_s16(x)), vmull_high_s16(w, x)))};
}

inline Vec load_uint8(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, sizeof four);
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))))};
}
inline Vec load_int8(const uint8_t* p) { return Vec::load_int8(reinterpret_cast<const int8_t*>(p)); }
// Converts integers of at most 127 to signed bytes; a NaN becomes any byte.
inline void store_int8(Vec x, uint8_t* p) {
    const int16x4_t shorts = vqmovn_s32(vcvtq_s32_f32(x.v));
    const uint32_t four = vget_lane_u32(vreinterpret_u32_s8(vqmovn_s16(vcombine_s16(shorts, shorts))), 0);
    std::memcpy(p, &four, sizeof four);
}
// The same of sixteen bits.
inline void store_shorts(Vec x, uint8_t* p) {
    const int16x4_t shorts = vqmovn_s32(vcvtq_s32_f32(x.v));
    std::memcpy(p, &shorts, sizeof shorts);
}

}  // namespace
