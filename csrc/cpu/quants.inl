// Kernels for quantised weights, written once over Vec (vec_*.h), Bytes and Ints (ints_*.h), and compiled once per instruction
// set. The rules of kernels.inl on symbols and tables apply.

#include "quants.h"
#include "shorts.h"

namespace {

using oneloop::kBlock;
using oneloop::kGroup;
using oneloop::kPanel;
using oneloop::kRowBlockBytes;
using oneloop::kShortBlockBytes;
using oneloop::kShortRowBytes;
using oneloop::kSuperBlock;
using oneloop::layout_of;
using oneloop::QuantArgs;
using oneloop::QuantLayout;
using oneloop::QuantType;
using oneloop::RowBlock;
using oneloop::ShortArgs;

constexpr int W = Vec::kWidth;
constexpr int kVecsPerPanel = kPanel / W;
constexpr int kGroups = kBlock / kGroup;
constexpr int kGroupBytes = kPanel * kGroup;

#define ONELOOP_UNROLL _Pragma("GCC unroll 32")

// ---- sums of products -----------------------------------------------------------------------------------------------

// Exact products of one row with W columns. `add` multiplies four inputs of each column; after each group `settle` moves sums that
// might overflow.
#if defined(ONELOOP_DOT)
template <int kBits>
struct Sums {
    Ints sum;

    static Sums zero() { return {Ints::zero()}; }
    void add(Bytes weights, const uint8_t* four) { sum = dot<kBits>(sum, weights, four); }
    template <int kSince>
    void settle() {}
    Ints total() const { return sum; }
};
#else
// 16 bits hold 8 products of neighbours with four bits, 4 with five, 2 with six.
template <int kBits>
struct Sums {
    Shorts part;
    Ints sum;

    static Sums zero() { return {Shorts::zero(), Ints::zero()}; }
    void add(Bytes weights, const uint8_t* four) { part = Shorts::dot(part, weights, four); }
    template <int kGroupsDone>
    void settle() {
        if constexpr (kGroupsDone % (1 << (7 - kBits)) == 0) {
            sum = sum + part.pairs();
            part = Shorts::zero();
        }
    }
    Ints total() const { return sum; }
};
// Eight bits are computed as two times four.
template <>
struct Sums<8> {
    Sums<4> low, high;

    static Sums zero() { return {Sums<4>::zero(), Sums<4>::zero()}; }
    void add(Bytes weights, const uint8_t* four) {
        const Bytes mask = Bytes::broadcast(15);
        low.add(weights & mask, four);
        high.add(weights.shifted<-4>() & mask, four);
    }
    template <int kGroupsDone>
    void settle() {
        low.settle<kGroupsDone>();
        high.settle<kGroupsDone>();
    }
    Ints total() const { return low.total() + high.total().shifted_left<4>(); }
};
#endif

// ---- weights as they are stored, and unpacked -------------------------------------------------------------------------

struct Scales {
    Vec d[2];  // of each half, if there are two
    Vec m;
};

// Panel in memory. Its blocks are read W columns at a time, beginning at column `from`.
template <QuantLayout kOfType>
struct Stored {
    static constexpr QuantLayout kLayout = kOfType;
    const uint8_t *scales_, *supers_, *quants_;

    Stored(const uint8_t* panel, int64_t blocks)
        : scales_(panel), supers_(panel + blocks * kLayout.block_scale_bytes()), quants_(panel + kLayout.scale_bytes(blocks)) {}

    void fetch(int64_t block) const {
        constexpr int64_t kAhead = 2048 / kLayout.block_quant_bytes() + 1;
        const uint8_t* p = quants_ + (block + kAhead) * kLayout.block_quant_bytes();
        for (int i = 0; i < kLayout.block_quant_bytes(); i += 64) prefetch(p + i);
        prefetch(scales_ + (block + kAhead) * kLayout.block_scale_bytes());
    }

    template <int kNumber>
    Bytes group(int64_t block, int from) const {
        const uint8_t* p = quants_ + block * kLayout.block_quant_bytes() + from * kGroup;
        if constexpr (kLayout.bits == 8) return Bytes::load(p + kNumber * kGroupBytes) ^ Bytes::broadcast(0x80);
        const Bytes pair = Bytes::load(p + kNumber % 4 * kGroupBytes), mask = Bytes::broadcast(15);
        const Bytes low = (kNumber < 4 ? pair : pair.shifted<-4>()) & mask;
        if constexpr (kLayout.bits == 5)
            return low | (Bytes::load(p + 4 * kGroupBytes).template shifted<4 - kNumber>() & Bytes::broadcast(16));
        if constexpr (kLayout.bits == 6)
            return low | (Bytes::load(p + (4 + kNumber / 4) * kGroupBytes).template shifted<4 - kNumber % 4 * 2>() &
                          Bytes::broadcast(48));
        return low;
    }

    Scales scales(int64_t block, int from) const {
        Scales s;
        if constexpr (!kLayout.super) {
            const auto* p = reinterpret_cast<const uint16_t*>(scales_ + block * kLayout.block_scale_bytes()) + from;
            s.d[0] = Vec::load_float16(p);
            s.m = kLayout.minimum ? Vec::load_float16(p + kPanel) : Vec::zero();
        } else {
            const uint8_t* p = scales_ + block * kLayout.block_scale_bytes() + from;
            const auto* super =
                reinterpret_cast<const uint16_t*>(supers_ + block / kSuperBlock * kLayout.super_scale_bytes()) + from;
            const Vec d = Vec::load_float16(super);
            if constexpr (kLayout.minimum) {
                s.d[0] = d * load_uint8(p);
                s.m = Vec::load_float16(super + kPanel) * load_uint8(p + kPanel);
            } else {
                s.d[0] = d * load_int8(p);
                s.d[1] = d * load_int8(p + kPanel);
            }
        }
        return s;
    }
};

// Unpacked panel, reused by many tiles of rows: bytes [blocks][groups][kPanel][kGroup], then floats [blocks][2][kPanel].
template <int kBits, bool kMinimum, int kHalves>
struct Unpacked {
    static constexpr QuantLayout kLayout = {kBits, kMinimum, false, kHalves};
    const uint8_t* quants_;
    const float* scales_;

    Unpacked(const uint8_t* panel, int64_t blocks)
        : quants_(panel), scales_(reinterpret_cast<const float*>(panel + blocks * kGroups * kGroupBytes)) {}

    void fetch(int64_t) const {}
    template <int kNumber>
    Bytes group(int64_t block, int from) const {
        return Bytes::load(quants_ + (block * kGroups + kNumber) * kGroupBytes + from * kGroup);
    }
    Scales scales(int64_t block, int from) const {
        const float* p = scales_ + block * 2 * kPanel + from;
        const Vec second = kMinimum || kHalves == 2 ? Vec::load(p + kPanel) : Vec::zero();
        return {{Vec::load(p), second}, second};
    }
};

template <QuantLayout kLayout>
using UnpackedOf = Unpacked<kLayout.bits, kLayout.minimum, kLayout.halves>;

template <QuantLayout kLayout>
void unpack(const uint8_t* panel, int64_t blocks, uint8_t* to) {
    const Stored<kLayout> stored(panel, blocks);
    float* scales = reinterpret_cast<float*>(to + blocks * kGroups * kGroupBytes);
    for (int64_t block = 0; block < blocks; block++, to += kGroups * kGroupBytes, scales += 2 * kPanel) {
        stored.fetch(block);
        ONELOOP_UNROLL
        for (int from = 0; from < kPanel; from += W) {
            uint8_t* p = to + from * kGroup;
            stored.template group<0>(block, from).store(p);
            stored.template group<1>(block, from).store(p + kGroupBytes);
            stored.template group<2>(block, from).store(p + 2 * kGroupBytes);
            stored.template group<3>(block, from).store(p + 3 * kGroupBytes);
            stored.template group<4>(block, from).store(p + 4 * kGroupBytes);
            stored.template group<5>(block, from).store(p + 5 * kGroupBytes);
            stored.template group<6>(block, from).store(p + 6 * kGroupBytes);
            stored.template group<7>(block, from).store(p + 7 * kGroupBytes);
            const Scales s = stored.scales(block, from);
            s.d[0].store(scales + from);
            if (kLayout.minimum || kLayout.halves == 2) (kLayout.minimum ? s.m : s.d[1]).store(scales + kPanel + from);
        }
    }
}

// ---- linear -----------------------------------------------------------------------------------------------------------

// One group of a block's inputs, all rows of the tile.
template <int kNumber, int MR, class Weights, class Sum>
inline void add_group(const Weights& weights, int64_t block, int from, const uint8_t* bytes, Sum (&sums)[MR]) {
    const Bytes group = weights.template group<kNumber>(block, from);
    ONELOOP_UNROLL
    for (int i = 0; i < MR; i++) sums[i].add(group, bytes + i * kBlock + kNumber * kGroup);
    ONELOOP_UNROLL
    for (int i = 0; i < MR; i++) sums[i].template settle<kNumber + 1>();
}

// Groups [kFirst, kFirst + kCount) of a block: acc += d * scale * sum, for the half that begins there.
template <int kFirst, int kCount, int MR, class Weights>
inline void add_span(const Weights& weights, int64_t block, int from, const uint8_t* tile, Vec d, Vec (&acc)[MR]) {
    using Sum = Sums<Weights::kLayout.bits>;
    constexpr int kHalf = kFirst / 4;
    const auto* heads = reinterpret_cast<const RowBlock*>(tile);
    const uint8_t* bytes = tile + MR * sizeof(RowBlock);
    Sum sums[MR];
    ONELOOP_UNROLL
    for (int i = 0; i < MR; i++) sums[i] = Sum::zero();
    add_group<kFirst>(weights, block, from, bytes, sums);
    add_group<kFirst + 1>(weights, block, from, bytes, sums);
    add_group<kFirst + 2>(weights, block, from, bytes, sums);
    add_group<kFirst + 3>(weights, block, from, bytes, sums);
    if constexpr (kCount == 8) {
        add_group<4>(weights, block, from, bytes, sums);
        add_group<5>(weights, block, from, bytes, sums);
        add_group<6>(weights, block, from, bytes, sums);
        add_group<7>(weights, block, from, bytes, sums);
    }
    ONELOOP_UNROLL
    for (int i = 0; i < MR; i++) {
        Ints total = sums[i].total();
        if constexpr (!Weights::kLayout.minimum) total = total + Ints::broadcast(heads[i].start[kHalf]);
        acc[i] = Vec::fma(total.floats() * Vec::broadcast(heads[i].scale), d, acc[i]);
    }
}

// c [MR, kPanel] = the tile's rows times a panel.
template <class Weights, int MR>
void quant_tile(const uint8_t* panel, int64_t blocks, const uint8_t* tile, const float* bias, float* c, int64_t ldc) {
    const Weights weights(panel, blocks);
    for (int from = 0; from < kPanel; from += W) {
        Vec acc[MR];
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) acc[i] = Vec::zero();
        const uint8_t* rows = tile;
        for (int64_t block = 0; block < blocks; block++, rows += MR * kRowBlockBytes) {
            weights.fetch(block);
            const Scales s = weights.scales(block, from);
            if constexpr (Weights::kLayout.halves == 2) {
                add_span<0, 4>(weights, block, from, rows, s.d[0], acc);
                add_span<4, 4>(weights, block, from, rows, s.d[1], acc);
            } else {
                add_span<0, 8>(weights, block, from, rows, s.d[0], acc);
            }
            if constexpr (Weights::kLayout.minimum) {
                const auto* heads = reinterpret_cast<const RowBlock*>(rows);
                ONELOOP_UNROLL
                for (int i = 0; i < MR; i++) acc[i] = Vec::fma(Vec::broadcast(heads[i].sum), s.m, acc[i]);
            }
        }
        const Vec shift = bias ? Vec::load(bias + from) : Vec::zero();
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) (bias ? acc[i] + shift : acc[i]).store(c + i * ldc + from);
    }
}

using QuantTile = void (*)(const uint8_t*, int64_t, const uint8_t*, const float*, float*, int64_t);

// Rows of a tile: sums and results share the registers. Up to kDirectRows rows read the weights packed; more rows unpack them
// first: then there are several tiles, each at least half full (rounded_rows.h).
constexpr int kQuantRows = W == kPanel ? 12 : W == 8 ? 5 : Vec::kRegisters == 32 ? 8 : 4;
constexpr int kDirectRows = kQuantRows, kLeastUnpacked = (kQuantRows + 1) / 2;

using QuantTiles = QuantTile[kQuantRows + 1];

template <class Weights, int MR, int kLeast>
void fill(QuantTiles& table) {
    table[MR] = quant_tile<Weights, MR>;
    if constexpr (MR > kLeast) fill<Weights, MR - 1, kLeast>(table);
}

template <QuantLayout kLayout>
struct TilesOf {
    QuantTiles direct, unpacked;
    TilesOf() {
        fill<Stored<kLayout>, kDirectRows, 1>(direct);
        fill<UnpackedOf<kLayout>, kQuantRows, kLeastUnpacked>(unpacked);
    }
};

template <QuantLayout kLayout>
void quant_linear_of(const QuantArgs& args) {
    static const TilesOf<kLayout> tiles;
    const int64_t panel_bytes = kLayout.panel_bytes(args.blocks);
    const int64_t num_rows = args.rows.row_start[args.rows.num_tiles];
    // 8-bit weights are almost unpacked already: unpacking costs more than a few tiles gain.
    constexpr int64_t kDirectTiles = kLayout.bits == 8 ? 4 : 1;
    const bool direct = num_rows <= kDirectTiles * kDirectRows && args.rows.num_tiles <= kDirectTiles;
    float ragged[kQuantRows * kPanel];
    for (int64_t panel = args.panel_begin; panel < args.panel_end; panel++) {
        const uint8_t* weights = args.w + panel * panel_bytes;
        if (!direct) {
            unpack<kLayout>(weights, args.blocks, args.scratch);
            weights = args.scratch;
        }
        const float* bias = args.bias ? args.bias + panel * kPanel : nullptr;
        const int64_t columns = args.n - panel * kPanel;
        for (int64_t t = 0; t < args.rows.num_tiles; t++) {
            const int64_t row = args.rows.row_start[t], rows = args.rows.row_start[t + 1] - row;
            const uint8_t* tile = args.rows.data + row * args.blocks * kRowBlockBytes;
            const QuantTile run = direct ? tiles.direct[rows] : tiles.unpacked[rows];
            float* c = args.out + row * args.ld_out + panel * kPanel;
            if (columns >= kPanel) {
                run(weights, args.blocks, tile, bias, c, args.ld_out);
                continue;
            }
            run(weights, args.blocks, tile, bias, ragged, kPanel);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < columns; j++) c[i * args.ld_out + j] = ragged[i * kPanel + j];
        }
    }
}

#define ONELOOP_LINEAR_OF(name, ...) \
    case QuantType::k##name: return quant_linear_of<layout_of(QuantType::k##name)>(args);
void quant_linear(const QuantArgs& args) {
    switch (args.type) { ONELOOP_BLOCK_TYPES(ONELOOP_LINEAR_OF) }
}

// ---- rounding of rows -------------------------------------------------------------------------------------------------

// The largest of a block becomes 127; what is under 1e-30 becomes zero, since its inverse may be infinite. A block with a NaN or an infinity has a NaN as scale, and so has its row's result.
void round_row(const float* x, int64_t k, QuantType type, int64_t tile_rows, int64_t row, uint8_t* tile) {
    const QuantLayout layout = layout_of(type);
    const Vec zero = Vec::zero();
    for (int64_t at = 0; at < k; at += kBlock, tile += tile_rows * kRowBlockBytes) {
        Vec value[kBlock / W], most = Vec::zero(), poison = Vec::zero();
        ONELOOP_UNROLL
        for (int j = 0; j < kBlock / W; j++) {
            const int64_t left = k - at - j * W;
            value[j] = left >= W  ? Vec::load(x + at + j * W)
                       : left > 0 ? Vec::load(x + at + j * W, static_cast<int>(left))
                                  : Vec::zero();
            most = Vec::max(most, Vec::max(value[j], zero - value[j]));
            poison = Vec::fma(value[j], zero, poison);
        }
        const float largest = most.largest();
        const Vec inverse = Vec::broadcast(largest > 1e-30f ? 127.0f / largest : 0.0f);
        uint8_t* bytes = tile + tile_rows * sizeof(RowBlock) + row * kBlock;
        Vec half[2] = {Vec::zero(), Vec::zero()};
        ONELOOP_UNROLL
        for (int j = 0; j < kBlock / W; j++) {
            const Vec whole = Vec::round(value[j] * inverse);
            store_int8(whole, bytes + j * W);
            half[j * W / 16] = half[j * W / 16] + whole;
        }
        RowBlock head;
        const float sums[2] = {half[0].sum(), half[1].sum()};
        head.scale = largest / 127.0f + poison.sum();
        head.sum = head.scale * (sums[0] + sums[1]);
        const bool whole = head.scale == head.scale;
        const auto offset = static_cast<float>(layout.offset());
        head.start[0] = whole ? static_cast<int32_t>(-offset * (layout.halves == 2 ? sums[0] : sums[0] + sums[1])) : 0;
        head.start[1] = whole ? static_cast<int32_t>(-offset * sums[1]) : 0;
        __builtin_memcpy(tile + row * sizeof(RowBlock), &head, sizeof head);
    }
}

#include "shorts.inl"

constexpr oneloop::QuantKernels make_quant_kernels() {
    return {kQuantRows, quant_linear, round_row, kShortRows, short_linear, round_short_row};
}

}  // namespace
