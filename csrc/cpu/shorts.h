// 16-bit weights and activations in the kernels' layout: integers of 14 bits, whose products are summed exactly.
//
// A weight [N, K] is cut into panels of kPanel output columns and these into blocks of kBlock inputs, each column of which has a
// float32 scale; activations are rounded in the same blocks. kShortMost is the largest number for which 32 products of two
// always fit 32 bits, so rounding costs a number 2^-14 of the largest in its block at most. An output is one chain of fused
// multiply-adds over the blocks in order, as in quants.h.
//
// A block of a panel in memory is [kBlock / 2][kPanel][2] numbers, adjacent inputs of a column next to each other, and then
// its kPanel scales.
#pragma once

#include <cstdint>

#include "quants.h"

namespace oneloop {

constexpr int kShortMost = 8191;
constexpr int64_t kShortBlockBytes =
    kPanel * (kBlock * static_cast<int64_t>(sizeof(int16_t)) + static_cast<int64_t>(sizeof(float)));
// Of a rounded row. A tile of rows is [blocks][numbers of each row, then the scale of each row].
constexpr int64_t kShortRowBytes = kBlock * static_cast<int64_t>(sizeof(int16_t)) + static_cast<int64_t>(sizeof(float));

// Rows of x cut into tiles as in QuantRows; tile t begins at data + row_start[t] * blocks * kShortRowBytes.
struct ShortArgs {
    QuantRows rows;
    const uint8_t* w;   // panels
    const float* bias;  // [panels * kPanel] or null
    float* out;
    int64_t ld_out, n, blocks, panel_begin, panel_end;
};

}  // namespace oneloop
