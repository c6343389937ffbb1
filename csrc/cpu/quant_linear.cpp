// Quantised weights, and which rows and panels a thread multiplies when.
#include <algorithm>

#include "../isa.h"
#include "../thread_pool.h"
#include "drivers.h"
#include "quant_pack.h"

namespace oneloop {
namespace {

constexpr int64_t kRowBytes = 768 << 10;  // rounded rows worked on at once: they stay in a core's second-level cache
constexpr int64_t kSerialWork = 1 << 16;  // multiply-adds that are not worth waking another thread for
constexpr int64_t kTaskBytes = 24 << 10;  // of weights, where rows are few: less is not worth a thread's turn

uint8_t* scratch_bytes(Slot slot, int64_t bytes) { return reinterpret_cast<uint8_t*>(scratch_floats(slot, (bytes + 3) / 4)); }

}  // namespace

QuantLinear::QuantLinear(QuantType type, const uint8_t* rows, int64_t row_bytes, int64_t n, int64_t k, const float* bias)
    : type_(type), n_(n), k_(k), blocks_((k + kBlock - 1) / kBlock), panels_((n + kPanel - 1) / kPanel) {
    const int64_t panel_bytes = layout_of(type).panel_bytes(blocks_);
    nbytes_ = panels_ * panel_bytes;
    weight_ = allocate_floats((nbytes_ + 3) / 4);
    parallel_for(panels_, [&](int64_t panel) {
        pack_panel(type, rows + panel * kPanel * row_bytes, row_bytes, std::min<int64_t>(kPanel, n - panel * kPanel), blocks_,
                   panels() + panel * panel_bytes);
    });
    if (bias) {
        bias_ = allocate_floats(panels_ * kPanel);
        std::copy(bias, bias + n, bias_.get());
        nbytes_ += panels_ * kPanel * static_cast<int64_t>(sizeof(float));
    }
}

void QuantLinear::matmul(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out) const {
    const int64_t tile = quant_kernels().max_tile_rows;
    const int64_t largest = tile * std::max<int64_t>(1, kRowBytes / (blocks_ * kRowBlockBytes) / tile);
    const int64_t pieces = std::max<int64_t>(1, (m + largest - 1) / largest);
    for (int64_t p = 0; p < pieces; p++) {
        const int64_t begin = m * p / pieces, end = m * (p + 1) / pieces;
        matmul_rows(x + begin * stride_x, end - begin, stride_x, out + begin * stride_out, stride_out);
    }
}

void QuantLinear::matmul_rows(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out) const {
    if (m == 0) return;
    const QuantKernels& set = quant_kernels();
    const int64_t most = set.max_tile_rows, num_tiles = (m + most - 1) / most;
    thread_local std::vector<int64_t> starts_cache;
    std::vector<int64_t>& starts = starts_cache;  // lambdas run on other threads, where starts_cache is another vector
    starts.resize(num_tiles + 1);
    for (int64_t t = 0; t <= num_tiles; t++) starts[t] = m * t / num_tiles;
    uint8_t* rows = scratch_bytes(Slot::kRows, m * blocks_ * kRowBlockBytes);
    auto round_tile = [&](int64_t t) {
        const int64_t begin = starts[t], count = starts[t + 1] - begin;
        for (int64_t i = 0; i < count; i++)
            set.round_row(x + (begin + i) * stride_x, k_, type_, count, i, rows + begin * blocks_ * kRowBlockBytes);
    };
    if (m * k_ < kSerialWork) {
        for (int64_t t = 0; t < num_tiles; t++) round_tile(t);
    } else {
        parallel_for(num_tiles, round_tile);
    }
    const int64_t panel_bytes = layout_of(type_).panel_bytes(blocks_);
    auto multiply = [&](int64_t panel_begin, int64_t panel_end) {
        set.linear({{rows, starts.data(), num_tiles}, type_, panels(), bias_.get(), out, stride_out, n_, blocks_, panel_begin,
                    panel_end, scratch_bytes(Slot::kPanel, blocks_ * kUnpackedBytes)});
    };
    if (m * n_ * k_ < kSerialWork) return multiply(0, panels_);
    // Tasks of equal size, several for each thread.
    const int64_t fit = std::clamp<int64_t>(kTaskBytes / (panel_bytes * std::min<int64_t>(m, 8)), 1, std::max<int64_t>(1, panels_ / (4 * num_threads())));
    const int64_t tasks = (panels_ + fit - 1) / fit;
    parallel_for(tasks, [&](int64_t i) { multiply(panels_ * i / tasks, panels_ * (i + 1) / tasks); });
}

void QuantLinear::rows(const int64_t* ids, int64_t count, float* out) const {
    const int64_t panel_bytes = layout_of(type_).panel_bytes(blocks_);
    auto copy = [&](int64_t i) {
        unpack_column(type_, panels() + ids[i] / kPanel * panel_bytes, blocks_, ids[i] % kPanel, k_, out + i * k_);
    };
    if (count < 16) {
        for (int64_t i = 0; i < count; i++) copy(i);
    } else {
        parallel_for(count, copy);
    }
}

}  // namespace oneloop
