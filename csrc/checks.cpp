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

PagedCache check_caches(const Tensor& k, const Tensor& v, int64_t kv_heads, int64_t head_size) {
    CacheType type = CacheType::kFloat32;
    if (k.type() == Type::kBFloat16)
        type = CacheType::kBFloat16;
    else if (k.type() == Type::kInt8)
        type = CacheType::kInt8;
    else
        k.typed(Type::kFloat32);
    const int64_t line = line_elements(type, head_size);
    k.shaped({-1, kv_heads, -1, line}).row_contiguous();
    v.typed(k.type()).shaped({k.size(0), k.size(1), k.size(2), line}).row_contiguous();
    const auto cache = [](const Tensor& x) { return Cache{x.data<void>(), x.stride(0), x.stride(1), x.stride(2)}; };
    return {cache(k), cache(v), type, k.size(2)};
}

void check_rows(const Tensor& starts, const Tensor& lens, const Tensor& tables, int64_t tokens, int64_t num_blocks,
                int64_t block_size) {
    const int64_t rows = lens.size(0);
    const int32_t *start = starts.data<int32_t>(), *len = lens.data<int32_t>();
    if (start[0] != 0 || start[rows] != tokens)
        starts.fail("does not run from 0 to the " + std::to_string(tokens) + " tokens of q");
    for (int64_t r = 0; r < rows; r++) {
        const std::string row = "at row " + std::to_string(r) + " ";
        if (start[r + 1] < start[r]) starts.fail(row + "falls");
        if (len[r] < start[r + 1] - start[r]) lens.fail(row + "is shorter than the row's queries");
        const int64_t blocks = (static_cast<int64_t>(len[r]) + block_size - 1) / block_size;
        if (blocks > tables.size(1))
            lens.fail(row + "needs " + std::to_string(blocks) + " blocks, block_tables has " + std::to_string(tables.size(1)));
        const int32_t* block = tables.data<int32_t>() + r * tables.stride(0);
        for (int64_t b = 0; b < blocks; b++)
            if (block[b] < 0 || block[b] >= num_blocks)
                tables.fail(row + "names block " + std::to_string(block[b]) + " of " + std::to_string(num_blocks));
    }
}

int64_t check_packed_rows(const Tensor& starts, int64_t tokens) {
    starts.typed(Type::kInt32).shaped({-1}).contiguous();
    const int64_t rows = starts.size(0) - 1;
    const int32_t* start = starts.data<int32_t>();
    if (rows < 0 || start[0] != 0 || start[rows] != tokens)
        starts.fail("does not run from 0 to the " + std::to_string(tokens) + " tokens of q");
    for (int64_t r = 0; r < rows; r++)
        if (start[r + 1] < start[r]) starts.fail("at row " + std::to_string(r) + " falls");
    return rows;
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
