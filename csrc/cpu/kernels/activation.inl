// Activations, plain or times another vector.

// x / (1 + e^-z): x times the logistic function of z.
inline Vec times_sigmoid(Vec x, Vec z) { return x / (Vec::broadcast(1.0f) + exp(Vec::zero() - z)); }

// 1 - erf(x) for x >= 0, within 4e-7: e^-x^2 times a polynomial in t = 1 / (1 + 0.3 x), fitted to the relative error.
inline Vec erfc_of_positive(Vec x) {
    const Vec t = Vec::broadcast(1.0f) / Vec::fma(x, Vec::broadcast(0.3f), Vec::broadcast(1.0f));
    Vec p = Vec::broadcast(-0.12786619365215302f);
    p = Vec::fma(p, t, Vec::broadcast(0.47773340344429016f));
    p = Vec::fma(p, t, Vec::broadcast(-0.4965445399284363f));
    p = Vec::fma(p, t, Vec::broadcast(0.5302015542984009f));
    p = Vec::fma(p, t, Vec::broadcast(-0.082855723798275f));
    p = Vec::fma(p, t, Vec::broadcast(0.21001958847045898f));
    p = Vec::fma(p, t, Vec::broadcast(0.14956806600093842f));
    p = Vec::fma(p, t, Vec::broadcast(0.17054608464241028f));
    p = Vec::fma(p, t, Vec::broadcast(0.16919778287410736f));
    return p * t * exp_upto_89(Vec::zero() - x * x);
}

template <Activation kind>
inline Vec activation(Vec x) {
    if constexpr (kind == Activation::kSilu) return times_sigmoid(x, x);
    if constexpr (kind == Activation::kGelu) {  // x times the normal distribution's integral up to x
        const Vec tail =
            Vec::broadcast(0.5f) * erfc_of_positive(Vec::max(x, Vec::zero() - x) * Vec::broadcast(0.70710678118654752f));
        return x * Vec::select_le(x, Vec::zero(), tail, Vec::broadcast(1.0f) - tail);
    }
    if constexpr (kind == Activation::kGeluTanh) {  // (1 + tanh(z)) / 2 is the logistic function of 2 z
        const Vec cubed = Vec::fma(x * x * x, Vec::broadcast(0.044715f), x);
        return times_sigmoid(x, cubed * Vec::broadcast(1.59576912160573071f));
    }
    const Vec positive = Vec::max(Vec::zero(), x);
    return kind == Activation::kRelu2 ? positive * positive : positive;
}

template <Activation kind>
void activate_by(const float* x, const float* up, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i += W) {
        const int count = lanes(n - i);
        Vec value = activation<kind>(Vec::load(x + i, count));
        if (up) value = value * Vec::load(up + i, count);
        value.store(y + i, count);
    }
}

void activate(Activation kind, const float* x, const float* up, float* y, int64_t n) {
    switch (kind) {
        case Activation::kSilu: return activate_by<Activation::kSilu>(x, up, y, n);
        case Activation::kGelu: return activate_by<Activation::kGelu>(x, up, y, n);
        case Activation::kGeluTanh: return activate_by<Activation::kGeluTanh>(x, up, y, n);
        case Activation::kRelu: return activate_by<Activation::kRelu>(x, up, y, n);
        case Activation::kRelu2: return activate_by<Activation::kRelu2>(x, up, y, n);
    }
}
