// IEEE half precision on any machine.
#pragma once

#include <cstdint>
#include <cstring>

namespace oneloop {

static inline float float_of(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
    // A half's bits in a float are 2^112 too small, also subnormal ones; infinities and NaNs need all exponent bits.
    uint32_t bits = rest << 13;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    x *= 5.192296858534828e33f;
    std::memcpy(&bits, &x, sizeof bits);
    if (rest >= 0x7c00) bits = 0x7f800000 | rest << 13;
    bits |= sign;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Rounds to nearest, ties to even, for x from 0 to 65504.
static inline uint16_t half_of(float x) {
    uint32_t bits;
    if (x < 6.103515625e-05f) {  // 2^-14: smaller halves are multiples of 2^-24, like floats in [0.5, 1)
        const float aligned = x + 0.5f;
        std::memcpy(&bits, &aligned, sizeof bits);
        return static_cast<uint16_t>(bits - 0x3f000000);
    }
    std::memcpy(&bits, &x, sizeof bits);
    bits -= 112u << 23;
    return static_cast<uint16_t>((bits + 0xfff + (bits >> 13 & 1)) >> 13);
}

}  // namespace oneloop
