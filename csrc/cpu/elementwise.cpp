// Row-wise ops, and the sizes from which threads share them.
#include <cstring>

#include "../isa.h"
#include "../thread_pool.h"
#include "drivers.h"

namespace oneloop {
namespace {

constexpr int64_t kTaskElements = 1 << 13;  // some three microseconds of one core: less is not worth sharing

// Calls row(i) for every row, in tasks of about kTaskElements.
template <typename Row>
void for_rows(int64_t rows, int64_t elements_per_row, Row&& row) {
    const int64_t step = elements_per_row > 0 ? (kTaskElements + elements_per_row - 1) / elements_per_row : rows + 1;
    if (rows < 2 * step) {
        for (int64_t i = 0; i < rows; i++) row(i);
        return;
    }
    parallel_for((rows + step - 1) / step, [&](int64_t task) {
        const int64_t end = (task + 1) * step < rows ? (task + 1) * step : rows;
        for (int64_t i = task * step; i < end; i++) row(i);
    });
}

}  // namespace

void rms_norm(const float* x, int64_t outer, int64_t inner, int64_t stride_outer, int64_t stride_inner, int64_t h,
              const float* weight, float eps, float* y) {
    const auto run = kernels().rms_norm;
    for_rows(outer, inner * h, [&](int64_t i) {
        for (int64_t j = 0; j < inner; j++)
            run(x + i * stride_outer + j * stride_inner, nullptr, weight, eps, y + (i * inner + j) * h, h);
    });
}

void add_rms_norm(const float* x, int64_t stride_x, float* residual, int64_t stride_residual, int64_t rows, int64_t h,
                  const float* weight, float eps, float* y) {
    const auto run = kernels().rms_norm;
    for_rows(rows, h, [&](int64_t i) { run(x + i * stride_x, residual + i * stride_residual, weight, eps, y + i * h, h); });
}

void layer_norm(const float* x, int64_t outer, int64_t inner, int64_t stride_outer, int64_t stride_inner, int64_t h,
                const float* weight, const float* bias, float eps, float* y) {
    const auto run = kernels().layer_norm;
    for_rows(outer, inner * h, [&](int64_t i) {
        for (int64_t j = 0; j < inner; j++)
            run(x + i * stride_outer + j * stride_inner, nullptr, weight, bias, eps, y + (i * inner + j) * h, h);
    });
}

void add_layer_norm(const float* x, int64_t stride_x, float* residual, int64_t stride_residual, int64_t rows, int64_t h,
                    const float* weight, const float* bias, float eps, float* y) {
    const auto run = kernels().layer_norm;
    for_rows(rows, h, [&](int64_t i) { run(x + i * stride_x, residual + i * stride_residual, weight, bias, eps, y + i * h, h); });
}

void rope(Heads q, Heads k, int64_t tokens, const int64_t* positions, const float* cos_sin, int64_t stride_cos_sin, int64_t half,
          bool interleaved) {
    const auto run = kernels().rope;
    for_rows(tokens, (q.heads + k.heads) * half * 2, [&](int64_t t) {
        const float* turn = cos_sin + positions[t] * stride_cos_sin;
        for (const Heads& x : {q, k})
            for (int64_t h = 0; h < x.heads; h++) run(x.data + t * x.stride_t + h * x.stride_h, turn, half, interleaved);
    });
}

namespace {

void store_head(const float* head, const Cache& to, int64_t place, CacheType type, int64_t d) {
    switch (type) {
        case CacheType::kFloat32: std::memcpy(static_cast<float*>(to.data) + place, head, d * sizeof(float)); break;
        case CacheType::kBFloat16: kernels().to_bfloat16(head, static_cast<uint16_t*>(to.data) + place, d); break;
        case CacheType::kInt8: kernels().to_int8(head, static_cast<int8_t*>(to.data) + place, d); break;
    }
}

void store_token(const Heads& k, const Heads& v, const PagedCache& cache, int64_t d, int64_t slot, int64_t t) {
    if (slot < 0) return;
    const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
    for (int which = 0; which < 2; which++) {
        const Heads& from = which ? v : k;
        const Cache& to = which ? cache.v : cache.k;
        for (int64_t h = 0; h < from.heads; h++)
            store_head(from.data + t * from.stride_t + h * from.stride_h, to,
                       block * to.stride_b + h * to.stride_h + offset * to.stride_s, cache.type, d);
    }
}

}  // namespace

void store_kv(Heads k, Heads v, const PagedCache& cache, int64_t d, const int64_t* slots, int64_t tokens) {
    for_rows(tokens, k.heads * d * 2, [&](int64_t t) { store_token(k, v, cache, d, slots[t], t); });
}

namespace {

void norm_rope_token(const Kernels& set, const Heads& q, const Heads& k, int64_t d, const HeadNorms& norms, const Turns& turns,
                     const int64_t* positions, int64_t t) {
    for (const Heads& x : {q, k}) {
        const float* norm = x.data == q.data ? norms.q : norms.k;
        for (int64_t h = 0; h < x.heads; h++) {
            float* head = x.data + t * x.stride_t + h * x.stride_h;
            if (norm) set.rms_norm(head, nullptr, norm, norms.eps, head, d);
            if (turns.half) set.rope(head, turns.cos_sin + positions[t] * turns.stride, turns.half, false);
        }
    }
}

}  // namespace

void norm_rope(Heads q, Heads k, int64_t d, const HeadNorms& norms, const Turns& turns, const int64_t* positions, int64_t tokens) {
    if (!norms.q && !norms.k && !turns.half) return;
    const Kernels& set = kernels();
    for_rows(tokens, (q.heads + k.heads) * d, [&](int64_t t) { norm_rope_token(set, q, k, d, norms, turns, positions, t); });
}

void norm_rope_store(Heads q, Heads k, Heads v, int64_t d, const HeadNorms& norms, const Turns& turns, const int64_t* positions,
                     const PagedCache& cache, const int64_t* slots, int64_t tokens) {
    const Kernels& set = kernels();
    for_rows(tokens, (q.heads + 2 * k.heads) * d, [&](int64_t t) {
        norm_rope_token(set, q, k, d, norms, turns, positions, t);
        store_token(k, v, cache, d, slots[t], t);
    });
}

void activate(Activation kind, const float* x, int64_t stride, int64_t rows, int64_t n, float* y) {
    const auto run = kernels().activate;
    for_rows(rows, n, [&](int64_t i) { run(kind, x + i * stride, nullptr, y + i * n, n); });
}

void gated(Activation kind, const float* gate_up, int64_t stride, int64_t rows, int64_t half, float* y) {
    const auto run = kernels().activate;
    for_rows(rows, half * 2, [&](int64_t i) { run(kind, gate_up + i * stride, gate_up + i * stride + half, y + i * half, half); });
}

void largest(const float* x, int64_t stride, int64_t rows, int64_t n, const uint8_t* skip, int64_t* ids) {
    const auto run = kernels().largest;
    for_rows(rows, n, [&](int64_t i) {
        if (!skip[i]) ids[i] = run(x + i * stride, n);
    });
}

void scale(float* x, int64_t n, float factor) {
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

void add(float* x, const float* y, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] += y[i];
}

}  // namespace oneloop
