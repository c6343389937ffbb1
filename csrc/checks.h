// Checks shared by bindings: arguments that pass cannot lead a kernel outside its tensors.
#pragma once

#include <string>

#include "cpu/drivers.h"
#include "tensor.h"

namespace oneloop {

// ids[i] in [lowest, bound)
template <typename Int>
void check_range(const Tensor& ids, int64_t lowest, int64_t bound) {
    const Int* id = ids.data<Int>();
    for (int64_t i = 0; i < ids.size(0); i++)
        if (id[i] < lowest || id[i] >= bound)
            ids.fail("holds " + std::to_string(id[i]) + ", outside [" + std::to_string(lowest) + ", " + std::to_string(bound) +
                     ")");
}

// [h] float32; an optional one may be None, and becomes null.
const float* check_vector(const Tensor& vector, int64_t h);
const float* check_optional(nanobind::handle vector, const char* name, int64_t h);

// Both [blocks, kv_heads, block_size, line], of equal shape and type: float32, bfloat16 or int8; -1 for any number of heads.
PagedCache check_caches(const Tensor& k, const Tensor& v, int64_t kv_heads, int64_t head_size);

// query_starts is ascending, up to `tokens`; every row's queries fit its context, and its context the blocks of its table.
void check_rows(const Tensor& starts, const Tensor& lens, const Tensor& tables, int64_t tokens, int64_t num_blocks,
                int64_t block_size);
// Returns the number of rows of a step, given by the first token of each and the end.
int64_t check_packed_rows(const Tensor& starts, int64_t tokens);

Activation activation_called(const std::string& name);

}  // namespace oneloop
