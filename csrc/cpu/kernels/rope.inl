// Rotary position embedding of one head.

void rope(float* head, const float* cos_sin, int64_t half, bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < half; i++) {
            const float a = head[2 * i], b = head[2 * i + 1], c = cos_sin[i], s = cos_sin[half + i];
            head[2 * i] = a * c - b * s;
            head[2 * i + 1] = b * c + a * s;
        }
        return;
    }
    for (int64_t i = 0; i < half; i += W) {
        const int n = lanes(half - i);
        const Vec a = Vec::load(head + i, n), b = Vec::load(head + half + i, n);
        const Vec c = Vec::load(cos_sin + i, n), s = Vec::load(cos_sin + half + i, n);
        (a * c - b * s).store(head + i, n);
        (b * c + a * s).store(head + half + i, n);
    }
}
