// Kernels of one instruction set, as a table of plain functions on raw pointers.
//
// Every function is serial and computes a range of its output, so that a driver (linear.cpp, attention.cpp, elementwise.cpp) can
// spread it over threads. An output element is one fixed chain of operations, whatever the range, the tile or the thread. Shapes
// were checked by the bindings.
#pragma once

#include <cstdint>

namespace oneloop {

constexpr int kPanel = 16;     // output columns stored side by side in a packed weight
constexpr int kKeyTile = 64;   // keys scored at once; tiles lie at multiples of this in the context
constexpr int kSegment = 512;  // keys of one softmax state; states are merged in position order

enum class Element { kFloat32, kBFloat16, kFloat16, kInt8 };  // scales of int8 are stored elsewhere

// Element type of a paged cache. A line is one head's key or value of one token: head_size numbers. An int8 line is kScaleBytes
// longer: its float32 scale (one per token and head) follows.
enum class CacheType { kFloat32, kBFloat16, kInt8 };

constexpr int64_t kScaleBytes = 4;

static inline int64_t element_bytes(CacheType type) {
    return type == CacheType::kFloat32 ? 4 : type == CacheType::kBFloat16 ? 2 : 1;
}
static inline int64_t line_elements(CacheType type, int64_t head_size) {
    return type == CacheType::kInt8 ? head_size + kScaleBytes : head_size;
}

enum class Activation { kSilu, kGelu, kGeluTanh, kRelu, kRelu2 };

// Rows of x for one call, cut into tiles of at most max_tile_rows rows. Tile t holds rows [row_start[t], row_start[t+1]);
// its data, [K][rows of the tile], begins at data + row_start[t] * K.
struct PackedRows {
    const float* data;
    const int64_t* row_start;
    int64_t num_tiles;
};

// out [rows, N] (row stride ld_out) = x [rows, K] @ w.T + bias for the columns of panels [panel_begin, panel_end). w is
// [panels][K][kPanel] of `element`, padded with zeros; bias is padded likewise, or null. Narrower elements are converted to
// float32 in registers, so sums equal those of a float32 weight.
struct LinearArgs {
    PackedRows rows;
    const void* w;
    Element element;
    const float* bias;
    float* out;
    int64_t ld_out, n, k, panel_begin, panel_end;
};

// One row against one panel of a packed weight: out [kPanel] = x [k] times the panel.
struct OneRow {
    const float* x;
    const void* panel;
    float* out;
};

// One row of a step: its queries and its paged context. Strides count elements.
struct AttentionArgs {
    const float* q;                    // [T, Hq, D]
    int64_t q_stride_t, q_stride_h;
    const void* k_cache;               // [num_blocks, Hkv, block_size, line]
    const void* v_cache;
    int64_t k_stride_b, k_stride_h, k_stride_s;
    int64_t v_stride_b, v_stride_h, v_stride_s;
    CacheType type;
    int64_t block_size, head_size, group;  // group = query heads of one kv head
    float scale;
    int64_t window;  // number of keys up to itself that a query attends to; kNoWindow for all
    float softcap;   // scores become softcap * tanh(score / softcap); 0 for none
    const float* sinks;  // [Hq]: extra score per head that takes part in the softmax and has no value; or null
    int64_t ahead = 0;   // number of later keys that a query also attends to
};

constexpr int64_t kNoWindow = int64_t{1} << 40;

// Queries [query, query + num_queries) of the step, with all heads of kv_head's group; the first is at `position`. They read keys
// [key_begin, key_end); key_begin is a multiple of kSegment.
struct AttentionTask {
    const int32_t* block_table;
    int64_t query, num_queries, position, kv_head, key_begin, key_end;
};

// Number of first keys that no query of a task beginning at `position` attends to.
static inline int64_t hidden_before(int64_t position, int64_t window) { return position < window ? 0 : position + 1 - window; }

// Softmax state of `rows` = num_queries * group rows, query-major: values [rows, padded head size] not yet divided by `sum`
// [rows]; `max` [rows] was subtracted in the exponents.
struct AttentionState {
    float* values;
    float* max;
    float* sum;
};

struct Kernels {
    const char* name;
    int vector_width;       // floats in a register; head sizes are padded to it
    int max_tile_rows;      // rows of x that one pass over a weight panel serves

    void (*linear)(const LinearArgs&);
    // Single rows, with the same bits as `linear`. Several are interleaved, since one chain alone waits for its own latency.
    void (*one_rows)(const OneRow* rows, int64_t count, Element element, int64_t k);
    // out [n] += x [k] times the panels; the products have the same bits as those of `linear` for one row.
    void (*add_one_row)(const float* x, const void* panels, Element element, int64_t k, float* out, int64_t n);
    // to [k][rows] = x [rows, k] with `stride`: a tile of PackedRows.
    void (*pack_tile)(const float* x, int64_t stride, int64_t rows, int64_t k, float* to);
    // y [h] = x / sqrt(mean(x^2) + eps) * weight; with `residual`, residual += x first and x is the sum.
    void (*rms_norm)(const float* x, float* residual, const float* weight, float eps, float* y, int64_t h);
    // y [h] = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, `residual` as above; weight and bias may be null.
    void (*layer_norm)(const float* x, float* residual, const float* weight, const float* bias, float eps, float* y, int64_t h);
    // Rotates one head in place by cos [half] and sin [half].
    void (*rope)(float* head, const float* cos_sin, int64_t half, bool interleaved);
    // y [n] = activation(x), times `up` unless it is null.
    void (*activate)(Activation activation, const float* x, const float* up, float* y, int64_t n);
    void (*to_bfloat16)(const float* x, uint16_t* y, int64_t n);
    // line = x / scale rounded to nearest even, then scale = max |x| / 127: an int8 cache's line. For a scale of zero the numbers
    // are zero. If x has a NaN or an infinity, scale is NaN, which propagates to readers.
    void (*to_int8)(const float* x, int8_t* line, int64_t n);
    // Fills `state` for the task; `scratch` has attention_scratch_floats() floats, 64-byte aligned. `next`, or null, is this
    // thread's next task, whose first keys are prefetched.
    void (*attention)(const AttentionArgs&, const AttentionTask&, const AttentionTask* next, AttentionState state, float* scratch);
    // into = into + part, both states of `rows` rows.
    void (*merge)(AttentionState into, AttentionState part, int64_t rows, int64_t padded_head);
    // out [rows of the task] = values / sum, written as [T, Hq, D] with the given strides.
    void (*finish)(AttentionState state, const AttentionArgs&, const AttentionTask&, float* out, int64_t stride_t,
                   int64_t stride_h);
    // Index of the first maximum of x [n]; -1 if it is infinite, or x has a NaN.
    int64_t (*largest)(const float* x, int64_t n);
};

int64_t attention_scratch_floats(int64_t rows, int64_t head_size);

extern const Kernels kernels_portable;
#if defined(ONELOOP_X86)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#elif defined(ONELOOP_ARM)
extern const Kernels kernels_neon;
#endif

}  // namespace oneloop
