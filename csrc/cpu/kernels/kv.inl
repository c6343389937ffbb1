// Conversion of a key or value to bfloat16 or int8 for the cache.

void to_bfloat16(const float* x, uint16_t* y, int64_t n) {
    for (int64_t i = 0; i < n; i += W) {
        const int count = lanes(n - i);
        Vec::load(x + i, count).store_bfloat16(y + i, count);
    }
}

void to_int8(const float* x, int8_t* line, int64_t n) {
    Vec top = Vec::zero(), strange = Vec::zero();
    for (int64_t i = 0; i < n; i += W) {
        const Vec value = Vec::load(x + i, lanes(n - i));
        top = Vec::max(Vec::max(value, Vec::zero() - value), top);
        strange = Vec::fma(value, Vec::zero(), strange);  // NaN behind NaNs and infinities
    }
    const float scale = top.largest() / 127.0f + strange.sum();
    __builtin_memcpy(line + n, &scale, sizeof scale);
    if (!(scale > 0.0f)) {
        __builtin_memset(line, 0, n);
        return;
    }
    const Vec unit = Vec::broadcast(scale), most = Vec::broadcast(127.0f);  // passed where the scale is subnormal, so inexact
    for (int64_t i = 0; i < n; i += W) {
        const int count = lanes(n - i);
        const Vec value = Vec::load(x + i, count) / unit;
        Vec::max(Vec::zero() - most, Vec::min(most, value)).store_int8(line + i, count);
    }
}
