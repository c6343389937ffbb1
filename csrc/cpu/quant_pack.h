// Conversion of GGUF's blocks to panels, once at load, and of single rows back.
#pragma once

#include <cstdint>

#include "quants.h"

namespace oneloop {

// Weights in one block of the file, and its size in bytes.
struct StoredBlock {
    int64_t weights, bytes;
};
StoredBlock stored_block(QuantType type);

// Columns [first, first + count), count <= kPanel, of one panel, from `count` rows of the file, `row_bytes` apart. The panel must
// be zeros. Returns false for a scale of 2^16 or more, which only MXFP4 has.
bool pack_panel(QuantType type, const uint8_t* rows, int64_t row_bytes, int64_t count, int64_t blocks, uint8_t* panel);

// out [k] = one column of a panel as float32, rounded as the file's format defines.
void unpack_column(QuantType type, const uint8_t* panel, int64_t blocks, int64_t column, int64_t k, float* out);

}  // namespace oneloop
