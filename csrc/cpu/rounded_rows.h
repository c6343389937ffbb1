// Rounding of x's rows into tiles for kernels over quantised weights.
#pragma once

#include <cstdint>
#include <vector>

#include "../memory.h"
#include "../thread_pool.h"
#include "quants.h"

namespace oneloop {

// m > 0 rows as even tiles of up to tile_rows, row_bytes each; valid until this thread's next call. Row i of the `count` of a tile,
// row `row` of all rows, is written to the tile by round(row, count, i, tile). `serial`: too little work to wake another thread.
template <typename Round>
QuantRows round_rows(int64_t m, int64_t tile_rows, int64_t row_bytes, bool serial, const Round& round) {
    const int64_t num_tiles = (m + tile_rows - 1) / tile_rows;
    thread_local std::vector<int64_t> starts_cache;
    std::vector<int64_t>& starts = starts_cache;  // lambdas run on other threads, where starts_cache is another vector
    starts.resize(num_tiles + 1);
    for (int64_t t = 0; t <= num_tiles; t++) starts[t] = m * t / num_tiles;
    uint8_t* rows = scratch<uint8_t>(Slot::kRows, m * row_bytes);
    auto round_tile = [&](int64_t t) {
        const int64_t begin = starts[t], count = starts[t + 1] - begin;
        for (int64_t i = 0; i < count; i++) round(begin + i, count, i, rows + begin * row_bytes);
    };
    if (serial) {
        for (int64_t t = 0; t < num_tiles; t++) round_tile(t);
    } else {
        parallel_for(num_tiles, round_tile);
    }
    return {rows, starts.data(), num_tiles};
}

}  // namespace oneloop
