// Integer vectors of 4-byte lanes, as many as Vec has floats. Included by ints_*.h only, after a vec_*.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr int kVectorBytes = 4 * Vec::kWidth;

inline int32_t four_bytes(const uint8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return four;
}

struct Ints {
    typedef int32_t Lanes __attribute__((vector_size(kVectorBytes)));
    typedef float Floats __attribute__((vector_size(kVectorBytes)));
    Lanes v;

    static Ints zero() { return {Lanes{}}; }
    static Ints broadcast(int32_t x) { return {Lanes{} + x}; }
    // Four bytes in every lane, kept in a register: AVX-512 might fold the load into each use.
    static Ints broadcast_from(const uint8_t* p) {
        Ints x = broadcast(four_bytes(p));
#if defined(__AVX512F__)
        asm("" : "+v"(x.v));
#endif
        return x;
    }
    friend Ints operator+(Ints a, Ints b) { return {a.v + b.v}; }
    template <int kBits>
    Ints shifted_left() const {
        return {v << kBits};
    }
    Vec floats() const { return {__builtin_convertvector(v, Floats)}; }
};

struct Bytes {
    typedef uint8_t Lanes __attribute__((vector_size(kVectorBytes)));
    typedef uint16_t Pairs __attribute__((vector_size(kVectorBytes)));
    Lanes v;

    static Bytes load(const uint8_t* p) {
        Bytes x;
        std::memcpy(&x.v, p, sizeof x.v);
        return x;
    }
    static Bytes broadcast(uint8_t x) { return {Lanes{} + x}; }
    void store(uint8_t* p) const { std::memcpy(p, &v, sizeof v); }
    friend Bytes operator&(Bytes a, Bytes b) { return {a.v & b.v}; }
    friend Bytes operator|(Bytes a, Bytes b) { return {a.v | b.v}; }
    friend Bytes operator^(Bytes a, Bytes b) { return {a.v ^ b.v}; }
    // Shifts left, or right if negative; bits cross byte borders.
    template <int kBits>
    Bytes shifted() const {
        if constexpr (kBits > 0) return {(Lanes)((Pairs)v << kBits)};
        return {(Lanes)((Pairs)v >> -kBits)};
    }
};

}  // namespace
