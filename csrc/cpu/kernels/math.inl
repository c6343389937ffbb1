// Common parts of all kernels: lane counts, exponentials, and conversion of element types to float32 in registers.

constexpr int W = Vec::kWidth;
constexpr int kVecsPerPanel = kPanel / W;

#define ONELOOP_UNROLL _Pragma("GCC unroll 32")

inline int lanes(int64_t left) { return left < W ? static_cast<int>(left) : W; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// e^x within 2 ulp: x = n ln 2 + r, |r| <= ln 2 / 2, a Taylor-like polynomial in r (Cephes' expf coefficients), then 2^n.
// -inf and anything under -104 give 0, NaN stays NaN; x may not be over 89.
inline Vec exp_upto_89(Vec x) {
    x = Vec::max(Vec::broadcast(-104.0f), x);
    Vec n = Vec::round(x * Vec::broadcast(1.44269504088896341f));
    Vec r = Vec::fma(n, Vec::broadcast(-0.693359375f), x);
    r = Vec::fma(n, Vec::broadcast(2.12194440e-4f), r);
    Vec p = Vec::broadcast(1.9875691500e-4f);
    p = Vec::fma(p, r, Vec::broadcast(1.3981999507e-3f));
    p = Vec::fma(p, r, Vec::broadcast(8.3334519073e-3f));
    p = Vec::fma(p, r, Vec::broadcast(4.1665795894e-2f));
    p = Vec::fma(p, r, Vec::broadcast(1.6666665459e-1f));
    p = Vec::fma(p, r, Vec::broadcast(5.0000001201e-1f));
    p = Vec::fma(p, r * r, r) + Vec::broadcast(1.0f);
    return Vec::scale_by_power(p, n);
}

// The same for any x: over 89 gives inf.
inline Vec exp(Vec x) { return exp_upto_89(Vec::min(Vec::broadcast(89.0f), x)); }

// Element types in memory, all float32 in a register.
struct Float32 {
    using Element = float;
    static Vec load(const float* p) { return Vec::load(p); }
    static Vec load(const float* p, int n) { return Vec::load(p, n); }
};
struct BFloat16 {
    using Element = uint16_t;
    static Vec load(const uint16_t* p) { return Vec::load_bfloat16(p); }
    static Vec load(const uint16_t* p, int n) { return Vec::load_bfloat16(p, n); }
};
struct Float16 {
    using Element = uint16_t;
    static Vec load(const uint16_t* p) { return Vec::load_float16(p); }
};
struct Int8 {  // whose scales are elsewhere: of a line of a cache behind it
    using Element = int8_t;
    static Vec load(const int8_t* p) { return Vec::load_int8(p); }
};
