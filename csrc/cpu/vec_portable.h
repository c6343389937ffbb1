// Four floats in one register, by the compiler's own vectors: SSE2 on x86-64, NEON on ARM. Included by portable.cpp
// and quants_portable.cpp only.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "float16.h"

namespace {

struct Vec {
    static constexpr int kWidth = 4;
#if defined(__aarch64__)
    static constexpr int kRegisters = 32;
#else
    static constexpr int kRegisters = 16;
#endif
    typedef float Lanes __attribute__((vector_size(16)));
    typedef int32_t Ints __attribute__((vector_size(16)));
    Lanes v;

    static Vec zero() { return {Lanes{0, 0, 0, 0}}; }
    static Vec load(const float* p) {
        Vec x;
        std::memcpy(&x.v, p, sizeof x.v);
        return x;
    }
    static Vec load(const float* p, int n) {
        Vec x = zero();
        for (int i = 0; i < n; i++) x.v[i] = p[i];
        return x;
    }
    static Vec broadcast(float x) { return {Lanes{x, x, x, x}}; }
    static Vec load_bfloat16(const uint16_t* p) { return load_bfloat16(p, 4); }
    static Vec load_bfloat16(const uint16_t* p, int n) {
        uint32_t bits[4] = {};
        for (int i = 0; i < n; i++) bits[i] = static_cast<uint32_t>(p[i]) << 16;
        Vec x;
        std::memcpy(&x.v, bits, sizeof x.v);
        return x;
    }
    static Vec load_float16(const uint16_t* p) {
        Vec x;
        for (int i = 0; i < kWidth; i++) x.v[i] = oneloop::float_of(p[i]);
        return x;
    }
    static Vec load_int8(const int8_t* p) { return load_int8(p, 4); }
    static Vec load_int8(const int8_t* p, int n) {
        Vec x = zero();
        for (int i = 0; i < n; i++) x.v[i] = p[i];
        return x;
    }
    static Vec lane_index() { return {Lanes{0, 1, 2, 3}}; }

    void store(float* p) const { std::memcpy(p, &v, sizeof v); }
    void store(float* p, int n) const {
        for (int i = 0; i < n; i++) p[i] = v[i];
    }
    void store_bfloat16(uint16_t* p, int n) const {
        // Round to nearest even; a NaN keeps its top half and is made quiet.
        for (int i = 0; i < n; i++) {
            uint32_t bits;
            float x = v[i];
            std::memcpy(&bits, &x, sizeof bits);
            bits = x == x ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
            p[i] = static_cast<uint16_t>(bits >> 16);
        }
    }
    // Of numbers in [-127, 127], rounded to nearest even.
    void store_int8(int8_t* p, int n) const {
        const Vec whole = round(*this);
        for (int i = 0; i < n; i++) p[i] = static_cast<int8_t>(whole.v[i]);
    }
    void pin() {}

    static Vec fma(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
        return {(Lanes)vfmaq_f32((float32x4_t)c.v, (float32x4_t)a.v, (float32x4_t)b.v)};
#else
        return {a.v * b.v + c.v};
#endif
    }
    // A NaN in b survives.
    static Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
    static Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
    friend Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
    friend Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
    friend Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
    friend Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
    // For |a| < 2^22: adding and taking away 1.5 * 2^23 leaves the nearest whole number.
    static Vec round(Vec a) {
        Lanes magic = broadcast(12582912.0f).v;
        return {(a.v + magic) - magic};
    }
    // x * 2^n for whole n in [-252, 254], in two steps so that results may be subnormal, zero or infinite.
    static Vec scale_by_power(Vec x, Vec n) {
        Ints whole = __builtin_convertvector(n.v, Ints);
        Ints half = whole >> 1;
        return {x.v * power(half) * power(whole - half)};
    }
    // a where x <= limit, else b.
    static Vec select_le(Vec x, Vec limit, Vec a, Vec b) { return {x.v <= limit.v ? a.v : b.v}; }
    float sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
    float largest() const {
        float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
        return a > b ? a : b;
    }

private:
    static Lanes power(Ints n) {
        Ints bits = (n + 127) << 23;
        Lanes x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }
};

// to[d * to_stride + i] = rows[i][d] for i < 4, d < 4.
inline void transpose_square(const Vec (&rows)[4], float* to, int64_t to_stride, int) {
    for (int d = 0; d < 4; d++) Vec{Vec::Lanes{rows[0].v[d], rows[1].v[d], rows[2].v[d], rows[3].v[d]}}.store(to + d * to_stride);
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
