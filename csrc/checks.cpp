#include "checks.h"

#include <stdexcept>

namespace nb = nanobind;

namespace oneloop {

const float* check_vector(const Tensor& vector, int64_t h) {
    return vector.typed(Type::kFloat32).shaped({h}).contiguous().data<float>();
}

const float* check_optional(nb::handle vector, const char* name, int64_t h) {
    return vector.is_none() ? nullptr : check_vector(Tensor(vector, name), h);
}

Cache check_cache(const Tensor& cache, Type type, int64_t blocks, int64_t kv_heads, int64_t block_size, int64_t head_size) {
    cache.typed(type).shaped({blocks, kv_heads, block_size, head_size}).row_contiguous();
    return {cache.data<void>(), cache.stride(0), cache.stride(1), cache.stride(2)};
}

Type cache_type(const Tensor& cache) {
    if (cache.type() != Type::kFloat32) cache.typed(Type::kBFloat16);
    return cache.type();
}

void check_rows(const Tensor& starts, const Tensor& lens, const Tensor& tables, int64_t tokens, int64_t num_blocks,
                int64_t block_size) {
    const int64_t rows = lens.size(0);
    const int32_t *start = starts.data<int32_t>(), *len = lens.data<int32_t>();
    if (start[0] != 0 || start[rows] != tokens) starts.fail("does not run from 0 to the " + std::to_string(tokens) + " tokens of q");
    for (int64_t r = 0; r < rows; r++) {
        const std::string row = "at row " + std::to_string(r) + " ";
        if (start[r + 1] < start[r]) starts.fail(row + "falls");
        if (len[r] < start[r + 1] - start[r]) lens.fail(row + "is shorter than the row's queries");
        const int64_t blocks = (static_cast<int64_t>(len[r]) + block_size - 1) / block_size;
        if (blocks > tables.size(1)) lens.fail(row + "needs " + std::to_string(blocks) + " blocks, block_tables has " + std::to_string(tables.size(1)));
        const int32_t* block = tables.data<int32_t>() + r * tables.stride(0);
        for (int64_t b = 0; b < blocks; b++)
            if (block[b] < 0 || block[b] >= num_blocks)
                tables.fail(row + "names block " + std::to_string(block[b]) + " of " + std::to_string(num_blocks));
    }
}

Activation activation_called(const std::string& name) {
    if (name == "silu") return Activation::kSilu;
    if (name == "gelu") return Activation::kGelu;
    if (name == "gelu_tanh") return Activation::kGeluTanh;
    if (name == "relu") return Activation::kRelu;
    if (name == "relu2") return Activation::kRelu2;
    throw nb::value_error(("no activation is called " + name).c_str());
}

}  // namespace oneloop
