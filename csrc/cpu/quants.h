// Layout of quantised weights for the kernels, and the table of those kernels.
//
// A weight [N, K] is cut into panels of kPanel output columns and these into blocks of kBlock inputs. A weight is
// d * q + m or d * (q - offset): q a whole number of a few bits, d (and m) shared by one column of a block. Activations
// are rounded to eight bits in the same blocks of kBlock, so a block's products are summed exactly, as integers, and
// only the sum meets a float: an output is one chain of fused multiply-adds over the blocks in order, whatever the
// number of rows, the tile or the thread.
//
// A panel in memory is [scales of each block][scales of each super-block][quants of each block]; the second part
// exists for the "K" types, whose scales are integers times a float of eight blocks. Quants of a block: for four
// bits 4 x 64 bytes, vector j with inputs 4j to 4j + 3 of 16 columns in its low halves and those of 16 + 4j in its high
// halves; a fifth bit is one more vector, bit g of a byte belonging to inputs 4g to 4g + 3; two more bits are two vectors;
// eight bits are 8 x 64 bytes.
#pragma once

#include <cstdint>

#include "block_types.h"
#include "kernels.h"

namespace oneloop {

constexpr int kBlock = 32;       // inputs that share a scale
constexpr int kSuperBlock = 8;   // blocks that share the scale of their scales
constexpr int kGroup = 4;        // adjacent inputs whose products one lane sums

#define ONELOOP_TYPE_ID(name, id, ...) k##name = id,
enum class QuantType { ONELOOP_BLOCK_TYPES(ONELOOP_TYPE_ID) };

// Internal linkage: a shared symbol could be taken from a file compiled for wider processors.
namespace {

struct QuantLayout {
    int bits;
    bool minimum;  // d * q + m; else d * (q - offset)
    bool super;
    int halves;  // 2: each half of a block has its own scale

    constexpr int offset() const { return minimum ? 0 : 1 << (bits - 1); }
    constexpr int64_t block_quant_bytes() const { return kPanel * kBlock / 8 * bits; }
    constexpr int64_t block_scale_bytes() const { return super ? 2 * kPanel : (minimum ? 4 : 2) * kPanel; }
    constexpr int64_t super_scale_bytes() const { return (minimum ? 4 : 2) * kPanel; }
    constexpr int64_t scale_bytes(int64_t blocks) const {
        const int64_t all = blocks * block_scale_bytes() + (super ? blocks / kSuperBlock * super_scale_bytes() : 0);
        return (all + 63) / 64 * 64;
    }
    constexpr int64_t panel_bytes(int64_t blocks) const { return scale_bytes(blocks) + blocks * block_quant_bytes(); }
};

#define ONELOOP_LAYOUT(name, id, columns, bytes, ...) \
    case QuantType::k##name: return {__VA_ARGS__};
constexpr QuantLayout layout_of(QuantType type) {
    switch (type) { ONELOOP_BLOCK_TYPES(ONELOOP_LAYOUT) }
    return {};
}

}  // namespace

// Scale data of a row's block, stored with its kBlock signed bytes.
struct RowBlock {
    float scale;       // an activation is scale * byte
    float sum;         // sum of the block's rounded activations
    int32_t start[2];  // minus the weights' offset times the bytes' sum: of the block, or of each half of it
};
constexpr int64_t kRowBlockBytes = sizeof(RowBlock) + kBlock;

// Rounded rows of x, cut into tiles as in PackedRows. A tile is [blocks][RowBlock of each row, then bytes of each row].
struct QuantRows {
    const uint8_t* data;  // tile t begins at data + row_start[t] * blocks * kRowBlockBytes
    const int64_t* row_start;
    int64_t num_tiles;
};

struct QuantArgs {
    QuantRows rows;
    QuantType type;
    const uint8_t* w;   // panels
    const float* bias;  // [panels * kPanel] or null
    float* out;
    int64_t ld_out, n, blocks, panel_begin, panel_end;
    uint8_t* scratch;  // blocks * kUnpackedBytes bytes, 64-byte aligned
};

constexpr int64_t kUnpackedBytes = kPanel * (kBlock + 2 * static_cast<int64_t>(sizeof(float)));  // of a block

struct ShortArgs;  // shorts.h

struct QuantKernels {
    int max_tile_rows;
    void (*linear)(const QuantArgs&);
    // Rounds row x [k] into row `row` of a tile of `tile_rows` rows.
    void (*round_row)(const float* x, int64_t k, QuantType type, int64_t tile_rows, int64_t row, uint8_t* tile);
    // The same for numbers of sixteen bits.
    int short_tile_rows;
    void (*short_linear)(const ShortArgs&);
    void (*round_short_row)(const float* x, int64_t k, int64_t tile_rows, int64_t row, uint8_t* tile);
};

extern const QuantKernels quants_portable;
#if defined(ONELOOP_X86)
extern const QuantKernels quants_avx2;
extern const QuantKernels quants_avxvnni;
extern const QuantKernels quants_avx512;
extern const QuantKernels quants_avx512vnni;
#elif defined(ONELOOP_ARM)
extern const QuantKernels quants_neon;
extern const QuantKernels quants_neondot;
extern const QuantKernels quants_neoni8mm;
#endif

}  // namespace oneloop
