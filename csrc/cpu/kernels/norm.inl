// RMS norm and layer norm of one token, with the residual added before or not.

void rms_norm(const float* x, float* residual, const float* weight, float eps, float* y, int64_t h) {
    Vec squares[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    for (int64_t i = 0, lane = 0; i < h; i += W, lane = (lane + 1) % 4) {
        const int n = lanes(h - i);
        Vec value = Vec::load(x + i, n);
        if (residual) {
            value = Vec::load(residual + i, n) + value;
            value.store(residual + i, n);
        }
        squares[lane] = Vec::fma(value, value, squares[lane]);
    }
    const float mean = ((squares[0] + squares[1]) + (squares[2] + squares[3])).sum() / static_cast<float>(h);
    const Vec scale = Vec::broadcast(1.0f / __builtin_sqrtf(mean + eps));
    const float* from = residual ? residual : x;
    for (int64_t i = 0; i < h; i += W) {
        const int n = lanes(h - i);
        (Vec::load(from + i, n) * scale * Vec::load(weight + i, n)).store(y + i, n);
    }
}

// Two passes: a variance from a difference of squares would lose precision if the mean is large.
void layer_norm(const float* x, float* residual, const float* weight, const float* bias, float eps, float* y, int64_t h) {
    Vec sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    for (int64_t i = 0, lane = 0; i < h; i += W, lane = (lane + 1) % 4) {
        const int n = lanes(h - i);
        Vec value = Vec::load(x + i, n);
        if (residual) {
            value = Vec::load(residual + i, n) + value;
            value.store(residual + i, n);
        }
        sums[lane] = sums[lane] + value;
    }
    const float* from = residual ? residual : x;
    const Vec mean = Vec::broadcast(((sums[0] + sums[1]) + (sums[2] + sums[3])).sum() / static_cast<float>(h));
    Vec squares[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    for (int64_t i = 0, lane = 0; i < h; i += W, lane = (lane + 1) % 4) {
        const int n = lanes(h - i);
        const Vec last = Vec::broadcast(static_cast<float>(n - 1));
        const Vec apart = Vec::select_le(Vec::lane_index(), last, Vec::load(from + i, n) - mean, Vec::zero());
        squares[lane] = Vec::fma(apart, apart, squares[lane]);
    }
    const float variance = ((squares[0] + squares[1]) + (squares[2] + squares[3])).sum() / static_cast<float>(h);
    const Vec scale = Vec::broadcast(1.0f / __builtin_sqrtf(variance + eps));
    for (int64_t i = 0; i < h; i += W) {
        const int n = lanes(h - i);
        Vec value = (Vec::load(from + i, n) - mean) * scale;
        if (weight) value = value * Vec::load(weight + i, n);
        if (bias) value = value + Vec::load(bias + i, n);
        value.store(y + i, n);
    }
}
