// The kernels, written once over Vec (vec_*.h) and compiled once per instruction set.
//
// Include after a vec_*.h, inside a file with that instruction set's flags. Everything is in an unnamed namespace, and no
// template of the standard library is used: a shared symbol compiled with wider instructions could otherwise be the
// one the linker keeps for everybody. Tables are static inside functions: a global initialiser would run these
// instructions at load, on any machine.

#include "kernels.h"

namespace {

using oneloop::Activation;
using oneloop::AttentionArgs;
using oneloop::AttentionState;
using oneloop::AttentionTask;
using oneloop::CacheType;
using oneloop::Element;
using oneloop::kKeyTile;
using oneloop::kPanel;
using oneloop::kSegment;
using oneloop::LinearArgs;

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
struct Int8 {  // in lines, each with its scale
    using Element = int8_t;
};

// ---- linear -------------------------------------------------------------------------------------------------------

// c [MR, NP panels] (+)= a [kc][MR] . b, one fused chain per element in the order of k. Without `resume` the chain
// starts at zero, with it at c: cutting K into pieces does not change the sum. Bias, if any, is added after the chain.
template <class Type, int MR, int NP>
void linear_tile(const float* a, const void* weights, int64_t panel_stride, int64_t kc, float* c, int64_t ldc, bool resume,
                 const float* bias) {
    using Stored = typename Type::Element;
    constexpr int NV = NP * kVecsPerPanel;
    const auto* b = static_cast<const Stored*>(weights);
    // Far enough ahead that a line has come from memory before its turn, also across a page border, where the hardware
    // prefetcher stops.
    constexpr int kAhead = 2048 / sizeof(Stored);
    Vec acc[MR][NV];
    ONELOOP_UNROLL
    for (int i = 0; i < MR; i++) {
        ONELOOP_UNROLL
        for (int j = 0; j < NV; j++)
            acc[i][j] = resume ? Vec::load(c + i * ldc + j * W) : Vec::zero();
    }
    for (int64_t k = 0; k < kc; k++) {
        Vec row[NV];
        ONELOOP_UNROLL
        for (int p = 0; p < NP; p++) prefetch(b + p * panel_stride + kAhead);
        ONELOOP_UNROLL
        for (int j = 0; j < NV; j++) row[j] = Type::load(b + (j / kVecsPerPanel) * panel_stride + (j % kVecsPerPanel) * W);
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) {
            Vec x = Vec::broadcast(a[i]);
            if (NV > 1) x.pin();
            ONELOOP_UNROLL
            for (int j = 0; j < NV; j++) acc[i][j] = Vec::fma(x, row[j], acc[i][j]);
        }
        a += MR;
        b += kPanel;
    }
    ONELOOP_UNROLL
    for (int j = 0; j < NV; j++) {
        Vec shift = bias ? Vec::load(bias + j * W) : Vec::zero();
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) (bias ? acc[i][j] + shift : acc[i][j]).store(c + i * ldc + j * W);
    }
}

using LinearTile = void (*)(const float*, const void*, int64_t, int64_t, float*, int64_t, bool, const float*);

template <class Type, int NP, int MR>
struct TileTable {
    static void fill(LinearTile* table) {
        table[MR] = linear_tile<Type, MR, NP>;
        TileTable<Type, NP, MR - 1>::fill(table);
    }
};
template <class Type, int NP>
struct TileTable<Type, NP, 0> {
    static void fill(LinearTile*) {}
};

// The registers hold MR * NV sums, NV pieces of the weight and one of x. Rows beside each other share what is loaded of the
// weight; panels beside each other keep more of it on its way from memory. So many rows take two panels (or one, where
// registers are few), and few rows four.
constexpr int kTileRows = W == kPanel ? 14 : W == 8 ? 6 : Vec::kRegisters == 32 ? 6 : 2;
constexpr int kFourPanelRows = W == kPanel ? 7 : W == 8 ? 1 : 0;
constexpr int kTwoPanelRows = W == kPanel ? 14 : W == 8 ? 2 : 0;

template <class Type>
struct LinearTiles {
    LinearTile one[kTileRows + 1], two[kTileRows + 1], four[kTileRows + 1];
    LinearTiles() {
        TileTable<Type, 1, kTileRows>::fill(one);
        TileTable<Type, 2, kTwoPanelRows>::fill(two);
        TileTable<Type, 4, kFourPanelRows>::fill(four);
    }
};

// K at once when a panel meets several tiles of rows. Few tiles: the pieces are small, so that fetching the next piece of
// the weight overlaps with multiplying this one. Many tiles: large, since memory is not what they wait for.
constexpr int64_t kFewTiles = 8, kFewTilesDepth = 64, kManyTilesDepth = 384;

// All tiles of rows against `num` panels from `panel` on, writing to c (column 0 = the first column of `panel`).
template <class Type>
void linear_panels(const LinearArgs& args, int64_t panel, int num, float* c, int64_t ldc) {
    static const LinearTiles<Type> tiles;
    const LinearTile* table = num == 1 ? tiles.one : num == 2 ? tiles.two : tiles.four;
    const auto* w = static_cast<const typename Type::Element*>(args.w) + panel * args.k * kPanel;
    const float* bias = args.bias ? args.bias + panel * kPanel : nullptr;
    const int64_t most = args.rows.num_tiles <= kFewTiles ? kFewTilesDepth : kManyTilesDepth;
    const int64_t pieces = args.rows.num_tiles == 1 ? 1 : (args.k + most - 1) / most;
    const int64_t depth = (args.k + pieces - 1) / pieces;
    for (int64_t k = 0; k < args.k; k += depth) {
        const int64_t kc = smaller(depth, args.k - k);
        for (int64_t t = 0; t < args.rows.num_tiles; t++) {
            const int64_t row = args.rows.row_start[t], rows = args.rows.row_start[t + 1] - row;
            table[rows](args.rows.data + row * args.k + k * rows, w + k * kPanel, args.k * kPanel, kc, c + row * ldc, ldc,
                        k > 0, k + kc == args.k ? bias : nullptr);
        }
    }
}

// A last panel with fewer than kPanel columns: computed whole, tile by tile, then its real columns copied.
template <class Type>
void linear_ragged_panel(const LinearArgs& args, int64_t panel) {
    float whole[kTileRows * kPanel];
    const int64_t columns = args.n - panel * kPanel;
    for (int64_t t = 0; t < args.rows.num_tiles; t++) {
        LinearArgs tile = args;
        const int64_t row = args.rows.row_start[t], rows = args.rows.row_start[t + 1] - row;
        const int64_t starts[2] = {0, rows};
        tile.rows = {args.rows.data + row * args.k, starts, 1};
        linear_panels<Type>(tile, panel, 1, whole, kPanel);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++) args.out[(row + i) * args.ld_out + panel * kPanel + j] = whole[i * kPanel + j];
    }
}

template <class Type>
void linear_of(const LinearArgs& args) {
    int64_t rows = 0;
    for (int64_t t = 0; t < args.rows.num_tiles; t++) {
        const int64_t here = args.rows.row_start[t + 1] - args.rows.row_start[t];
        rows = here > rows ? here : rows;
    }
    const int widest = rows <= kFourPanelRows ? 4 : rows <= kTwoPanelRows ? 2 : 1;
    const int64_t whole_end = smaller(args.panel_end, args.n / kPanel);
    int64_t panel = args.panel_begin;
    for (int num = widest; num > 0; num /= 2)
        for (; panel + num <= whole_end; panel += num) linear_panels<Type>(args, panel, num, args.out + panel * kPanel, args.ld_out);
    for (; panel < args.panel_end; panel++) linear_ragged_panel<Type>(args, panel);
}

void linear(const LinearArgs& args) {
    switch (args.element) {
        case Element::kFloat32: return linear_of<Float32>(args);
        case Element::kBFloat16: return linear_of<BFloat16>(args);
        case Element::kFloat16: return linear_of<Float16>(args);
    }
}

// ---- row by row ---------------------------------------------------------------------------------------------------

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

// In two passes: a variance from a difference of squares would lose what the mean has in common with every element.
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
        const Vec tail = Vec::broadcast(0.5f) * erfc_of_positive(Vec::max(x, Vec::zero() - x) * Vec::broadcast(0.70710678118654752f));
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

// ---- attention ----------------------------------------------------------------------------------------------------
//
// Online softmax (Milakov and Gimelshein 2018; tiled as in FlashAttention, Dao et al. 2022) over kKeyTile keys at a
// time. Rows of a task are its (query, head of the group) pairs; what a row does depends on its own keys only: a masked
// key adds an exact zero, so it does not matter which queries share a tile or where a chunk began.

constexpr int kKeyVecs = kKeyTile / W;
constexpr int kScoreVecs = W == kPanel ? 4 : W == 8 ? 2 : 2;   // columns of a score or value tile, in registers
constexpr int kScoreRows = W == kPanel ? 6 : W == 8 ? 6 : Vec::kRegisters == 32 ? 8 : 4;
constexpr float kLowest = -3.402823466e38f;

struct Scratch {
    float* queries;  // [rows / kScoreRows][head_size][kScoreRows], scaled
    float* keys;     // [head_size][kKeyTile]: transposed, so that a row of it is one dim of every key
    float* values;   // [kKeyTile][padded head]
    float* scores;   // [kScoreRows][kKeyTile]
    float* decay;    // [kScoreRows]: by how much earlier values shrink
    float* sums;     // [rows][W]
    const float** value_rows;
};

Scratch carve(float* scratch, int64_t rows, int64_t head_size) {
    const int64_t padded = round_up(head_size, 16), whole_rows = round_up(rows, 16);
    Scratch s;
    s.queries = scratch;
    s.keys = s.queries + whole_rows * padded;
    s.values = s.keys + padded * kKeyTile;
    s.scores = s.values + padded * kKeyTile;
    s.decay = s.scores + 16 * kKeyTile;
    s.sums = s.decay + 16;
    s.value_rows = reinterpret_cast<const float**>(s.sums + whole_rows * 16);
    return s;
}

void gather_queries(const AttentionArgs& args, const AttentionTask& task, int64_t rows, float* to) {
    for (int64_t row = 0; row < rows; row++) {
        const int64_t tile = row / kScoreRows * kScoreRows, width = smaller(kScoreRows, rows - tile);
        const int64_t query = task.query + row / args.group, head = task.kv_head * args.group + row % args.group;
        const float* from = args.q + query * args.q_stride_t + head * args.q_stride_h;
        float* column = to + tile * args.head_size + (row - tile);
        for (int64_t d = 0; d < args.head_size; d++) column[d * width] = from[d] * args.scale;
    }
}

// Where each key of a tile and its value begin, in elements from the start of their cache.
struct Places {
    int64_t first, count;
    int64_t key[kKeyTile], value[kKeyTile];
};

// The tile from position `first` on, cut at `end`. Counts along instead of dividing for each key.
void locate(const AttentionArgs& args, const AttentionTask& task, int64_t first, int64_t end, Places& places) {
    places.first = first;
    places.count = first < end ? smaller(kKeyTile, end - first) : 0;
    int64_t block = first / args.block_size, inside = first % args.block_size;
    for (int64_t i = 0; i < places.count; block++, inside = 0) {
        const int64_t id = task.block_table[block];
        const int64_t key = id * args.k_stride_b + task.kv_head * args.k_stride_h;
        const int64_t value = id * args.v_stride_b + task.kv_head * args.v_stride_h;
        for (; inside < args.block_size && i < places.count; inside++, i++) {
            places.key[i] = key + inside * args.k_stride_s;
            places.value[i] = value + inside * args.v_stride_s;
        }
    }
    // The last tile is filled up with its last key; a mask takes the copies out again.
    for (int64_t i = places.count; places.count > 0 && i < kKeyTile; i++) places.key[i] = places.key[places.count - 1];
}

// The lines of a coming tile, asked for a few at a time between the multiplications of the present one: asked for all at
// once they would only queue up, and everything else behind them.
struct Fetcher {
    const char* rows[2 * kKeyTile];
    int64_t row = 0, num_rows = 0, byte = 0, row_bytes = 0;

    void aim(const AttentionArgs& args, const Places& places) {
        const int64_t size = oneloop::element_bytes(args.type);
        for (int64_t i = 0; i < places.count; i++) {
            rows[i] = static_cast<const char*>(args.k_cache) + places.key[i] * size;
            rows[places.count + i] = static_cast<const char*>(args.v_cache) + places.value[i] * size;
        }
        row = byte = 0;
        num_rows = 2 * places.count;
        row_bytes = oneloop::line_elements(args.type, args.head_size) * size;
    }

    void fetch(int lines) {
        for (; lines > 0 && row < num_rows; lines--) {
            prefetch_far(rows[row] + byte);
            byte += 64;
            if (byte >= row_bytes) byte = 0, row++;
        }
    }
};

// A line of the cache, as float32.
template <typename Type>
struct Line {
    const typename Type::Element* numbers;
    Line(const typename Type::Element* line, int64_t) : numbers(line) {}
    Vec load(int64_t d) const { return Type::load(numbers + d); }
    Vec load(int64_t d, int n) const { return Type::load(numbers + d, n); }
};
template <>
struct Line<Int8> {
    const int8_t* numbers;
    float scale;
    Line(const int8_t* line, int64_t head_size) : numbers(line) { __builtin_memcpy(&scale, line + head_size, sizeof scale); }
    Vec load(int64_t d) const { return Vec::load_int8(numbers + d) * Vec::broadcast(scale); }
    Vec load(int64_t d, int n) const { return Vec::load_int8(numbers + d, n) * Vec::broadcast(scale); }
};

// The keys of a tile, transposed.
template <typename Type>
void gather_keys(const AttentionArgs& args, const Places& places, Fetcher& coming, float* to) {
    const auto* cache = static_cast<const typename Type::Element*>(args.k_cache);
    for (int64_t group = 0; group < kKeyTile && group < places.count; group += W) {
        const int64_t* place = places.key + group;
        Vec square[W];
        int64_t d = 0;
        for (; d + W <= args.head_size; d += W) {
            ONELOOP_UNROLL
            for (int i = 0; i < W; i++) square[i] = Line<Type>(cache + place[i], args.head_size).load(d);
            transpose_square(square, to + d * kKeyTile + group, kKeyTile, W);
            coming.fetch(8);
        }
        if (d == args.head_size) continue;
        const int n = lanes(args.head_size - d);
        for (int i = 0; i < W; i++) square[i] = Line<Type>(cache + place[i], args.head_size).load(d, n);
        transpose_square(square, to + d * kKeyTile + group, kKeyTile, n);
    }
}

// Where the value of each key lies as float32: in the cache itself where it can be read as it is, else in a copy.
template <typename Type>
void gather_values(const AttentionArgs& args, const Places& places, const Scratch& s) {
    const auto* cache = static_cast<const typename Type::Element*>(args.v_cache);
    if (args.type == CacheType::kFloat32 && args.head_size % W == 0) {
        for (int64_t i = 0; i < places.count; i++) s.value_rows[i] = static_cast<const float*>(args.v_cache) + places.value[i];
        return;
    }
    const int64_t padded = round_up(args.head_size, W);
    for (int64_t i = 0; i < places.count; i++) {
        const Line<Type> from(cache + places.value[i], args.head_size);
        float* to = s.values + i * padded;
        int64_t d = 0;
        for (; d + W <= args.head_size; d += W) from.load(d).store(to + d);
        if (d < args.head_size) from.load(d, lanes(args.head_size - d)).store(to + d);
        s.value_rows[i] = to;
    }
}

template <typename Type>
void gather(const AttentionArgs& args, const Places& places, Fetcher& coming, const Scratch& s) {
    gather_keys<Type>(args, places, coming, s.keys);
    gather_values<Type>(args, places, s);
}

// scores [MR][kKeyTile] = queries [head_size][MR] . keys
template <int MR>
void score_tile(const float* queries, const float* keys, int64_t head_size, Fetcher& coming, float* scores) {
    for (int column = 0; column < kKeyTile; column += kScoreVecs * W) {
        Vec acc[MR][kScoreVecs];
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) {
            ONELOOP_UNROLL
            for (int j = 0; j < kScoreVecs; j++) acc[i][j] = Vec::zero();
        }
        const float* q = queries;
        const float* key = keys + column;
        for (int64_t d = 0; d < head_size; d++, q += MR, key += kKeyTile) {
            coming.fetch(2);
            Vec row[kScoreVecs];
            ONELOOP_UNROLL
            for (int j = 0; j < kScoreVecs; j++) row[j] = Vec::load(key + j * W);
            ONELOOP_UNROLL
            for (int i = 0; i < MR; i++) {
                Vec x = Vec::broadcast(q[i]);
                x.pin();
                ONELOOP_UNROLL
                for (int j = 0; j < kScoreVecs; j++) acc[i][j] = Vec::fma(x, row[j], acc[i][j]);
            }
        }
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) {
            ONELOOP_UNROLL
            for (int j = 0; j < kScoreVecs; j++) acc[i][j].store(scores + i * kKeyTile + column + j * W);
        }
    }
}

// values [MR][NV registers] = values * decay + weights [MR][kKeyTile] . rows, in the order of the keys
template <int MR, int NV>
void value_columns(const float* weights, const float* decay, const float* const* rows, int64_t column, int64_t count,
                   Fetcher& coming, float* values, int64_t padded) {
    Vec acc[MR][NV];
    ONELOOP_UNROLL
    for (int i = 0; i < MR; i++) {
        const Vec shrink = Vec::broadcast(decay[i]);
        ONELOOP_UNROLL
        for (int j = 0; j < NV; j++) acc[i][j] = Vec::load(values + i * padded + column + j * W) * shrink;
    }
    for (int64_t key = 0; key < count; key++) {
        coming.fetch(2);
        const float* from = rows[key] + column;
        Vec row[NV];
        ONELOOP_UNROLL
        for (int j = 0; j < NV; j++) row[j] = Vec::load(from + j * W);
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) {
            Vec x = Vec::broadcast(weights[i * kKeyTile + key]);
            if (NV > 1) x.pin();
            ONELOOP_UNROLL
            for (int j = 0; j < NV; j++) acc[i][j] = Vec::fma(x, row[j], acc[i][j]);
        }
    }
    ONELOOP_UNROLL
    for (int i = 0; i < MR; i++) {
        ONELOOP_UNROLL
        for (int j = 0; j < NV; j++) acc[i][j].store(values + i * padded + column + j * W);
    }
}

// tanh within 3 ulp: Cephes' odd polynomial for small x, by e^-2|x| for others.
inline Vec tanh(Vec x) {
    const Vec square = x * x, away = Vec::max(x, Vec::zero() - x);
    Vec p = Vec::broadcast(-5.70498872745e-3f);
    p = Vec::fma(p, square, Vec::broadcast(2.06390887954e-2f));
    p = Vec::fma(p, square, Vec::broadcast(-5.37397155531e-2f));
    p = Vec::fma(p, square, Vec::broadcast(1.33314422036e-1f));
    p = Vec::fma(p, square, Vec::broadcast(-3.33332819422e-1f));
    const Vec one = Vec::broadcast(1.0f), e = exp_upto_89(away * Vec::broadcast(-2.0f));
    const Vec large = (one - e) / (one + e);
    return Vec::select_le(away, Vec::broadcast(0.625f), Vec::fma(p * square, x, x),
                          Vec::select_le(x, Vec::zero(), Vec::zero() - large, large));
}

template <int MR>
void value_tile(const float* weights, const float* decay, const float* const* rows, int64_t count, Fetcher& coming,
                float* values, int64_t padded) {
    const int64_t used = padded / W * W;
    int64_t column = 0;
    for (; column + kScoreVecs * W <= used; column += kScoreVecs * W)
        value_columns<MR, kScoreVecs>(weights, decay, rows, column, count, coming, values, padded);
    for (; column < used; column += W) value_columns<MR, 1>(weights, decay, rows, column, count, coming, values, padded);
}

// One row of scores becomes weights in place, against the larger of its old maximum and this tile's. Keys [hidden, visible)
// of the tile count.
inline void softmax_row(float* scores, int64_t hidden, int64_t visible, float* max, float* decay, float* sums) {
    Vec s[kKeyVecs];
    Vec top = Vec::broadcast(kLowest);
    if (hidden > 0 || visible < kKeyTile) {
        const Vec limit = Vec::broadcast(static_cast<float>(visible) - 1.0f), nothing = Vec::broadcast(-__builtin_inff());
        const Vec before = Vec::broadcast(static_cast<float>(hidden) - 1.0f);
        ONELOOP_UNROLL
        for (int j = 0; j < kKeyVecs; j++) {
            const Vec index = Vec::lane_index() + Vec::broadcast(static_cast<float>(j * W));
            s[j] = Vec::select_le(index, limit, Vec::load(scores + j * W), nothing);
            s[j] = Vec::select_le(index, before, nothing, s[j]);
            top = Vec::max(top, s[j]);
        }
    } else {
        ONELOOP_UNROLL
        for (int j = 0; j < kKeyVecs; j++) {
            s[j] = Vec::load(scores + j * W);
            top = Vec::max(top, s[j]);
        }
    }
    const float tile_max = top.largest(), earlier = *max;
    const float now = tile_max > earlier ? tile_max : earlier;
    *max = now;
    // Seldom taken after the first tiles. Multiplying by exactly 1 would give the same bits, so this only saves time.
    Vec total = Vec::load(sums);
    *decay = 1.0f;
    if (now != earlier) {
        const Vec shrink = exp_upto_89(Vec::broadcast(earlier - now));
        shrink.store(decay, 1);
        total = total * shrink;
    }
    const Vec base = Vec::broadcast(now);
    ONELOOP_UNROLL
    for (int j = 0; j < kKeyVecs; j++) {
        const Vec weight = exp_upto_89(s[j] - base);
        weight.store(scores + j * W);
        total = total + weight;
    }
    total.store(sums);
}

// Rows are in the order of their positions, so the last row of the tile sees the latest keys and the first one the
// earliest; what none of them sees is left out. It would add exact zeros, or whatever stands in memory nobody wrote.
template <int MR>
void attend_rows(const AttentionArgs& args, const AttentionTask& task, int64_t tile, const Places& places,
                 Fetcher& coming, const Scratch& s, AttentionState state, int64_t padded) {
    const int64_t before = task.position + 1 - places.first;  // visible = before + query, where that is positive
    const int64_t most = smaller(before + (tile + MR - 1) / args.group, places.count);
    const int64_t first = larger(before + tile / args.group - args.window, 0);
    if (most <= first) return;
    score_tile<MR>(s.queries + tile * args.head_size, s.keys, args.head_size, coming, s.scores);
    if (args.softcap > 0) {
        const Vec cap = Vec::broadcast(args.softcap);
        for (int i = 0; i < MR * kKeyTile; i += W) (tanh(Vec::load(s.scores + i) / cap) * cap).store(s.scores + i);
    }
    for (int i = 0; i < MR; i++) {
        const int64_t row = tile + i, visible = before + row / args.group;
        softmax_row(s.scores + i * kKeyTile, larger(visible - args.window, 0), larger(smaller(visible, places.count), 0),
                    state.max + row, s.decay + i, s.sums + row * W);
    }
    value_tile<MR>(s.scores + first, s.decay, s.value_rows + first, most - first, coming, state.values + tile * padded, padded);
}

using AttendRows = void (*)(const AttentionArgs&, const AttentionTask&, int64_t, const Places&, Fetcher&,
                            const Scratch&, AttentionState, int64_t);
template <int MR>
struct AttendTable {
    static void fill(AttendRows* table) {
        table[MR] = attend_rows<MR>;
        AttendTable<MR - 1>::fill(table);
    }
};
template <>
struct AttendTable<0> {
    static void fill(AttendRows*) {}
};
struct AttendTiles {
    AttendRows table[kScoreRows + 1];
    AttendTiles() { AttendTable<kScoreRows>::fill(table); }
};

// Keys [begin, end) of one segment, into a fresh state. `after`, if any, is the tile that will be wanted next.
void attend_segment(const AttentionArgs& args, const AttentionTask& task, int64_t begin, int64_t end, const Places& after,
                    const Scratch& s, AttentionState state) {
    static const AttendTiles tiles;
    const int64_t rows = task.num_queries * args.group, padded = round_up(args.head_size, W);
    for (int64_t i = 0; i < rows * padded; i++) state.values[i] = 0.0f;
    for (int64_t i = 0; i < rows * W; i++) s.sums[i] = 0.0f;
    for (int64_t i = 0; i < rows; i++) state.max[i] = kLowest;
    Places places[2];
    Fetcher coming;
    locate(args, task, larger(begin, oneloop::hidden_before(task.position, args.window) / kKeyTile * kKeyTile), end, places[0]);
    for (int turn = 0; places[turn].count > 0; turn ^= 1) {
        locate(args, task, places[turn].first + kKeyTile, end, places[turn ^ 1]);
        coming.aim(args, places[turn ^ 1].count > 0 ? places[turn ^ 1] : after);
        switch (args.type) {
            case CacheType::kFloat32: gather<Float32>(args, places[turn], coming, s); break;
            case CacheType::kBFloat16: gather<BFloat16>(args, places[turn], coming, s); break;
            case CacheType::kInt8: gather<Int8>(args, places[turn], coming, s); break;
        }
        for (int64_t tile = 0; tile < rows; tile += kScoreRows)
            tiles.table[smaller(kScoreRows, rows - tile)](args, task, tile, places[turn], coming, s, state, padded);
    }
    for (int64_t i = 0; i < rows; i++) state.sum[i] = Vec::load(s.sums + i * W).sum();
}

void merge(AttentionState into, AttentionState part, int64_t rows, int64_t padded) {
    for (int64_t row = 0; row < rows; row++) {
        const float a = into.max[row], b = part.max[row], now = a > b ? a : b;
        const Vec keep = exp(Vec::broadcast(a - now)), add = exp(Vec::broadcast(b - now));
        for (int64_t d = 0; d < padded; d += W) {
            const Vec old = Vec::load(into.values + row * padded + d) * keep;
            Vec::fma(Vec::load(part.values + row * padded + d), add, old).store(into.values + row * padded + d);
        }
        Vec::fma(Vec::broadcast(part.sum[row]), add, Vec::broadcast(into.sum[row]) * keep).store(into.sum + row, 1);
        into.max[row] = now;
    }
}

void attention(const AttentionArgs& args, const AttentionTask& task, const AttentionTask* next, AttentionState state,
               float* scratch) {
    const int64_t rows = task.num_queries * args.group, padded = round_up(args.head_size, W);
    const Scratch s = carve(scratch, rows, args.head_size);
    gather_queries(args, task, rows, s.queries);
    const int64_t whole_rows = round_up(rows, 16);
    float* more = reinterpret_cast<float*>(s.value_rows + kKeyTile);
    const AttentionState part = {more + 2 * whole_rows, more, more + whole_rows};
    Places after;
    for (int64_t begin = task.key_begin; begin < task.key_end; begin += kSegment) {
        const int64_t end = smaller(begin + kSegment, task.key_end);
        after.count = 0;
        if (end < task.key_end)
            locate(args, task, end, task.key_end, after);
        else if (next)
            locate(args, *next, next->key_begin, next->key_end, after);
        attend_segment(args, task, begin, end, after, s, begin == task.key_begin ? state : part);
        if (begin > task.key_begin) merge(state, part, rows, padded);
    }
}

void finish(AttentionState state, const AttentionArgs& args, const AttentionTask& task, float* out, int64_t stride_t,
            int64_t stride_h) {
    const int64_t padded = round_up(args.head_size, W);
    for (int64_t row = 0; row < task.num_queries * args.group; row++) {
        const int64_t query = task.query + row / args.group, head = task.kv_head * args.group + row % args.group;
        Vec sum = Vec::broadcast(state.sum[row]);
        // A sink far above every score makes this infinite, and the shares of all keys zero: what it should.
        if (args.sinks) sum = sum + exp(Vec::broadcast(args.sinks[head] - state.max[row]));
        const Vec share = Vec::broadcast(1.0f) / sum;
        float* to = out + query * stride_t + head * stride_h;
        for (int64_t d = 0; d < args.head_size; d += W)
            (Vec::load(state.values + row * padded + d) * share).store(to + d, lanes(args.head_size - d));
    }
}

// A stretch at a time, so that only one is searched again.
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

constexpr oneloop::Kernels make_kernels(const char* name) {
    return {name, W, kTileRows, linear, rms_norm, layer_norm, rope, activate, to_bfloat16, to_int8, attention, merge, finish, largest};
}

}  // namespace
