// Quantised weights, and the division of rows and panels among threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "../isa.h"
#include "../thread_pool.h"
#include "drivers.h"
#include "elements.h"
#include "quant_pack.h"
#include "rounded_rows.h"

namespace oneloop {
namespace {

constexpr int64_t kRowBytes = 768 << 10;  // rounded rows worked on at once: they stay in a core's second-level cache
constexpr int64_t kSerialWork = 1 << 16;  // multiply-adds that are not worth waking another thread for
constexpr int64_t kTaskBytes = 24 << 10;  // of weights, with few rows: smaller tasks are not worth waking a thread

// Rounds a row to blocks of Q8_0, padded with zeros. False if a number cannot be represented.
bool round_weights(const void* weight, Element element, int64_t first, int64_t stride, int64_t k, int64_t blocks, uint8_t* to) {
    for (int64_t block = 0; block < blocks; block++, to += stored_block(QuantType::kQ8_0).bytes) {
        float value[kBlock] = {}, largest = 0.0f;
        bool fits = true;
        for (int64_t i = 0; i < kBlock && block * kBlock + i < k; i++) {
            value[i] = float_at(weight, element, first + (block * kBlock + i) * stride);
            largest = std::max(largest, std::abs(value[i]));
            fits &= std::abs(value[i]) <= 127.0f * 65504.0f;
        }
        if (!fits) return false;
        uint16_t half = half_of(largest / 127.0f);
        if (float_of(half) * 127.0f < largest) half++;  // up, so that the largest has a place
        const float scale = float_of(half);
        std::memcpy(to, &half, sizeof half);
        for (int i = 0; i < kBlock; i++) {
            const float whole = scale > 0.0f ? std::nearbyint(value[i] / scale) : 0.0f;
            to[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::clamp(whole, -127.0f, 127.0f)));
        }
    }
    return true;
}

}  // namespace

QuantLinear::QuantLinear(QuantType type, int64_t n, int64_t k, const float* bias)
    : PanelLinear(n, k, layout_of(type).panel_bytes((k + kBlock - 1) / kBlock), bias),
      type_(type),
      blocks_((k + kBlock - 1) / kBlock),
      panel_bytes_(layout_of(type).panel_bytes(blocks_)) {}

QuantLinear::QuantLinear(QuantType type, const uint8_t* rows, int64_t row_bytes, int64_t n, int64_t k, const float* bias)
    : QuantLinear(type, n, k, bias) {
    std::atomic<bool> fits = true;
    parallel_for(panels_, [&](int64_t i) {
        const int64_t first = i * kPanel, count = std::min<int64_t>(kPanel, n - first);
        if (!pack_panel(type, rows + first * row_bytes, row_bytes, count, blocks_, panel(i))) fits = false;
    });
    if (!fits) throw std::invalid_argument("MXFP4 with a scale of 2^16 or more");
}

QuantLinear::QuantLinear(const void* weight, Element element, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k,
                         const float* bias)
    : QuantLinear(QuantType::kQ8_0, n, k, bias) {
    const int64_t row_bytes = blocks_ * stored_block(type_).bytes;
    std::atomic<bool> fits = true;
    parallel_for(panels_, [&](int64_t i) {
        const int64_t first = i * kPanel, count = std::min<int64_t>(kPanel, n - first);
        uint8_t* rows = scratch<uint8_t>(Slot::kPanel, kPanel * row_bytes);
        for (int64_t j = 0; j < count; j++)
            if (!round_weights(weight, element, (first + j) * stride_n, stride_k, k, blocks_, rows + j * row_bytes)) fits = false;
        pack_panel(type_, rows, row_bytes, count, blocks_, panel(i));
    });
    if (!fits) throw std::invalid_argument("weight has numbers that cannot be rounded to eight bits: NaN, infinite or over 8e6");
}

void QuantLinear::matmul(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out, const Upcoming* then) const {
    const int64_t tile = quant_kernels().max_tile_rows;
    const int64_t largest = tile * std::max<int64_t>(1, kRowBytes / (blocks_ * kRowBlockBytes) / tile);
    const int64_t pieces = std::max<int64_t>(1, (m + largest - 1) / largest);
    for (int64_t p = 0; p < pieces; p++) {
        const int64_t begin = m * p / pieces, end = m * (p + 1) / pieces;
        matmul_rows(x + begin * stride_x, end - begin, stride_x, out + begin * stride_out, stride_out, p == 0 ? then : nullptr);
    }
}

void QuantLinear::matmul_rows(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out,
                              const Upcoming* then) const {
    if (m == 0) return;
    const QuantKernels& set = quant_kernels();
    const QuantRows rows = round_rows(m, set.max_tile_rows, blocks_ * kRowBlockBytes, m * k_ < kSerialWork,
                                      [&](int64_t row, int64_t count, int64_t i, uint8_t* tile) {
                                          set.round_row(x + row * stride_x, k_, type_, count, i, tile);
                                      });
    auto multiply = [&](int64_t panel_begin, int64_t panel_end) {
        set.linear({rows, type_, panel(0), bias_.as<float>(), out, stride_out, n_, blocks_, panel_begin, panel_end,
                    scratch<uint8_t>(Slot::kPanel, blocks_ * kUnpackedBytes)});
    };
    if (m * n_ * k_ < kSerialWork) return multiply(0, panels_);
    // Tasks of equal size, several for each thread.
    const int64_t fit = std::clamp<int64_t>(kTaskBytes / (panel_bytes_ * std::min<int64_t>(m, 8)), 1,
                                            std::max<int64_t>(1, panels_ / (4 * num_threads())));
    const int64_t tasks = (panels_ + fit - 1) / fit;
    parallel_for(tasks, [&](int64_t i) {
        if (then) then->fetch(i, tasks);
        multiply(panels_ * i / tasks, panels_ * (i + 1) / tasks);
    });
}

void QuantLinear::rows(const int64_t* ids, int64_t count, float* out) const {
    auto copy = [&](int64_t i) { unpack_column(type_, panel(ids[i] / kPanel), blocks_, ids[i] % kPanel, k_, out + i * k_); };
    if (count < 16) {
        for (int64_t i = 0; i < count; i++) copy(i);
    } else {
        parallel_for(count, copy);
    }
}

StackedLinear::StackedLinear(std::vector<std::shared_ptr<Linear>> parts) : parts_(std::move(parts)), starts_{0} {
    if (parts_.empty()) throw std::invalid_argument("no parts to stack");
    for (const auto& part : parts_) {
        if (part->k() != k())
            throw std::invalid_argument("parts of " + std::to_string(k()) + " and " + std::to_string(part->k()) + " inputs");
        starts_.push_back(starts_.back() + part->n());
    }
}

void StackedLinear::matmul(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out,
                           const Upcoming* then) const {
    for (size_t i = 0; i < parts_.size(); i++)
        parts_[i]->matmul(x, m, stride_x, out + starts_[i], stride_out, i == 0 ? then : nullptr);
}

void StackedLinear::rows(const int64_t* ids, int64_t count, float* out) const {
    for (int64_t i = 0; i < count; i++) {
        const size_t part = std::upper_bound(starts_.begin(), starts_.end(), ids[i]) - starts_.begin() - 1;
        const int64_t inside = ids[i] - starts_[part];
        parts_[part]->rows(&inside, 1, out + i * k());
    }
}

int64_t StackedLinear::nbytes() const {
    int64_t sum = 0;
    for (const auto& part : parts_) sum += part->nbytes();
    return sum;
}

}  // namespace oneloop
