// Index of a row's largest logit.

// By stretches, so that only one of them is searched again.
int64_t largest(const float* x, int64_t n) {
    constexpr int64_t kStretch = 1024;
    const Vec one = Vec::broadcast(1.0f), nothing = Vec::broadcast(-__builtin_inff());
    Vec strange = Vec::zero();
    bool usable = true;
    float best = -__builtin_inff();
    int64_t where = 0;
    for (int64_t begin = 0; begin < n; begin += kStretch) {
        const int64_t end = smaller(begin + kStretch, n), whole = begin + (end - begin) / W * W;
        Vec top = nothing;
        for (int64_t i = begin; i < whole; i += W) {
            const Vec value = Vec::load(x + i);
            strange = strange + Vec::select_le(value, value, Vec::zero(), one);
            top = Vec::max(value, top);
        }
        float most = top.largest();
        for (int64_t i = whole; i < end; i++) {
            usable &= x[i] == x[i];
            if (x[i] > most) most = x[i];
        }
        if (most > best) best = most, where = begin;
    }
    if (!usable || strange.sum() > 0.0f || best == __builtin_inff() || best == -__builtin_inff()) return -1;
    while (x[where] != best) where++;
    return where;
}
