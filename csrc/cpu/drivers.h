// Ops as the bindings call them: on whole, checked tensors, spread over the thread pool.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../memory.h"
#include "kernels.h"
#include "quants.h"

namespace oneloop {

// Memory that will be read soon, as consecutive pieces. Prefetching it during a multiplication costs almost nothing.
struct Upcoming {
    struct Piece {
        const char* at;
        int64_t bytes;
    };
    std::vector<Piece> pieces;

    // Prefetches share `i` of `count` equal ones. On any thread.
    void fetch(int64_t i, int64_t count) const;
};

// Linear layer with a weight [N, K] in any format.
class Linear {
public:
    virtual ~Linear() = default;

    // out [m, n] = x [m, k] @ weight.T + bias; row strides given, columns contiguous. `then`, or null: memory that is read
    // afterwards. A compute-bound kernel prefetches it.
    virtual void matmul(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out,
                        const Upcoming* then = nullptr) const = 0;
    // out [count, k] contiguous = rows `ids` of the weight; ids in [0, n).
    virtual void rows(const int64_t* ids, int64_t count, float* out) const = 0;

    virtual int64_t n() const = 0;
    virtual int64_t k() const = 0;
    virtual int64_t nbytes() const = 0;
};

// Weight [N, K] in panels of kPanel neighbouring output columns, padded with zeros; bias likewise. The only copy of it.
class PanelLinear : public Linear {
public:
    int64_t n() const final { return n_; }
    int64_t k() const final { return k_; }
    int64_t nbytes() const final { return nbytes_; }
    int64_t panels() const { return panels_; }

protected:
    // Allocates panels of `panel_bytes`, and copies bias [n], contiguous or null.
    PanelLinear(int64_t n, int64_t k, int64_t panel_bytes, const float* bias);

    int64_t n_, k_, panels_, nbytes_;
    Memory weight_, bias_;
};

// Panels [K][kPanel] of any element type; sums are float32, and int8 has no scales.
class PackedLinear final : public PanelLinear {
public:
    // weight [n, k] of `element` with strides; bias [n] contiguous or null.
    PackedLinear(const void* weight, Element element, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k, const float* bias);

    void matmul(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out,
                const Upcoming* then = nullptr) const override;
    void rows(const int64_t* ids, int64_t count, float* out) const override;

    // The whole weight, for callers of the kernel itself: rows packed already, out [rows, n].
    LinearArgs args(PackedRows rows, float* out, int64_t stride_out) const;

private:
    void matmul_rows(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out) const;

    Element element_;
};

// A quantised weight [N, K] in panels as quants.h describes them.
class QuantLinear final : public PanelLinear {
public:
    // rows: n rows of the file's blocks, `row_bytes` apart; bias [n] contiguous or null.
    QuantLinear(QuantType type, const uint8_t* rows, int64_t row_bytes, int64_t n, int64_t k, const float* bias);
    // weight [n, k] of `element` with strides, rounded to Q8_0. Throws std::invalid_argument for NaNs, infinities and numbers
    // over 127 * 65504.
    QuantLinear(const void* weight, Element element, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k, const float* bias);

    void matmul(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out,
                const Upcoming* then = nullptr) const override;
    void rows(const int64_t* ids, int64_t count, float* out) const override;

private:
    QuantLinear(QuantType type, int64_t n, int64_t k, const float* bias);
    void matmul_rows(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out, const Upcoming* then) const;
    uint8_t* panel(int64_t index) const { return weight_.as<uint8_t>() + index * panel_bytes_; }

    QuantType type_;
    int64_t blocks_, panel_bytes_;
};

// A weight [N, K] of sixteen bits in panels as shorts.h describes them.
class ShortLinear final : public PanelLinear {
public:
    // weight [n, k] of `element` with strides, to be rounded; bias [n] contiguous or null. Throws std::invalid_argument for NaNs and
    // infinities.
    ShortLinear(const void* weight, Element element, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k, const float* bias);

    void matmul(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out,
                const Upcoming* then = nullptr) const override;
    void rows(const int64_t* ids, int64_t count, float* out) const override;

private:
    void matmul_rows(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out) const;
    uint8_t* block_at(int64_t panel, int64_t block) const;

    int64_t blocks_;
};

// Layers with the same inputs, with adjacent outputs.
class StackedLinear final : public Linear {
public:
    // Throws std::invalid_argument if there are none, or their inputs differ.
    explicit StackedLinear(std::vector<std::shared_ptr<Linear>> parts);

    void matmul(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out,
                const Upcoming* then = nullptr) const override;
    void rows(const int64_t* ids, int64_t count, float* out) const override;

    int64_t n() const override { return starts_.back(); }
    int64_t k() const override { return parts_.front()->k(); }
    int64_t nbytes() const override;

private:
    std::vector<std::shared_ptr<Linear>> parts_;
    std::vector<int64_t> starts_;  // of each part's outputs, and the end of the last
};

// Rows [outer, inner, h] with strides for the first two; y contiguous.
void rms_norm(const float* x, int64_t outer, int64_t inner, int64_t stride_outer, int64_t stride_inner, int64_t h,
              const float* weight, float eps, float* y);
void add_rms_norm(const float* x, int64_t stride_x, float* residual, int64_t stride_residual, int64_t rows, int64_t h,
                  const float* weight, float eps, float* y);
// Layer norm: the same after subtracting the mean; weight and bias may be null.
void layer_norm(const float* x, int64_t outer, int64_t inner, int64_t stride_outer, int64_t stride_inner, int64_t h,
                const float* weight, const float* bias, float eps, float* y);
void add_layer_norm(const float* x, int64_t stride_x, float* residual, int64_t stride_residual, int64_t rows, int64_t h,
                    const float* weight, const float* bias, float eps, float* y);

struct Heads {
    float* data;
    int64_t heads, stride_t, stride_h;
};
void rope(Heads q, Heads k, int64_t tokens, const int64_t* positions, const float* cos_sin, int64_t stride_cos_sin, int64_t half,
          bool interleaved);

struct Cache {
    void* data;
    int64_t stride_b, stride_h, stride_s;
};
struct PagedCache {
    Cache k, v;
    CacheType type;
    int64_t block_size;
};
// k and v [tokens, heads, d] into the caches' element type; slot -1 writes nothing.
void store_kv(Heads k, Heads v, const PagedCache& cache, int64_t d, const int64_t* slots, int64_t tokens);

struct HeadNorms {
    const float *q, *k;  // [d] each, or null
    float eps;
};
struct Turns {
    const float* cos_sin;  // rows of `half` cosines, then as many sines; `half` 0: no rotation
    int64_t stride, half;
};
// For each token: RMS norms of q's and k's heads and their rotation, in place, then k and v into the cache.
void norm_rope_store(Heads q, Heads k, Heads v, int64_t d, const HeadNorms& norms, const Turns& turns, const int64_t* positions,
                     const PagedCache& cache, const int64_t* slots, int64_t tokens);

// y [rows, n] = activation(x); y [rows, half] = activation(first half of gate_up) * second half.
void activate(Activation kind, const float* x, int64_t stride, int64_t rows, int64_t n, float* y);
void gated(Activation kind, const float* gate_up, int64_t stride, int64_t rows, int64_t half, float* y);

// x [n] times `factor`; x += y.
void scale(float* x, int64_t n, float factor);
void add(float* x, const float* y, int64_t n);

// ids[i] = Kernels::largest of row i of x [rows, n], unless skip[i].
void largest(const float* x, int64_t stride, int64_t rows, int64_t n, const uint8_t* skip, int64_t* ids);

// starts [rows + 1], lens [rows], tables [rows] with the given row stride: consistent with each other and with q.
void paged_attention(const AttentionArgs& args, int64_t rows, int64_t kv_heads, const int32_t* starts, const int32_t* lens,
                     const int32_t* tables, int64_t stride_table, float* out, int64_t stride_t, int64_t stride_h);

// Changes of scores q . k; `window`: number of keys before and including the query, and from the query on; kNoWindow: no limit.
struct PackedScores {
    float scale;
    int64_t window;
    float softcap;       // 0 for none
    const float* sinks;  // [Hq], or null
};
// Attention of q [T, Hq, d] to all k and v [T, Hkv, d] of its own row [starts[r], starts[r + 1]), into out [T, Hq, d].
void packed_attention(Heads q, Heads k, Heads v, int64_t rows, const int32_t* starts, const PackedScores& scores, int64_t d,
                      float* out, int64_t stride_t, int64_t stride_h);
// RMS norms of q's and k's heads and their rotation, in place, for each token.
void norm_rope(Heads q, Heads k, int64_t d, const HeadNorms& norms, const Turns& turns, const int64_t* positions, int64_t tokens);

}  // namespace oneloop
