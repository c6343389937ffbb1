// 16-bit weights, and the division of rows and panels among threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "../isa.h"
#include "../thread_pool.h"
#include "drivers.h"
#include "elements.h"
#include "rounded_rows.h"
#include "shorts.h"

namespace oneloop {
namespace {

constexpr int64_t kRowBytes = 768 << 10;  // rounded rows worked on at once: they stay in a core's second-level cache
constexpr int64_t kSerialWork = 1 << 15;  // multiply-adds that are not worth waking another thread for
constexpr int64_t kStep = 2;              // panels per task: the number that a kernel processes at once

// Writes block `block` of column `column` into a panel; false if it contains a NaN or an infinity.
bool round_block(const float (&value)[kBlock], int64_t column, uint8_t* to) {
    float largest = 0.0f;
    for (float x : value) {
        if (!std::isfinite(x)) return false;
        largest = std::max(largest, std::abs(x));
    }
    const float scale = largest / kShortMost;
    auto* numbers = reinterpret_cast<int16_t*>(to);
    for (int i = 0; i < kBlock; i++) {
        const float whole = scale > 0.0f ? std::nearbyint(value[i] / scale) : 0.0f;
        const float most = kShortMost;
        numbers[(i / 2 * kPanel + column) * 2 + i % 2] = static_cast<int16_t>(std::clamp(whole, -most, most));
    }
    std::memcpy(to + kPanel * kBlock * sizeof(int16_t) + column * sizeof(float), &scale, sizeof scale);
    return true;
}

}  // namespace

uint8_t* ShortLinear::block_at(int64_t panel, int64_t block) const {
    return weight_.as<uint8_t>() + (panel * blocks_ + block) * kShortBlockBytes;
}

ShortLinear::ShortLinear(const void* weight, Element element, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k,
                         const float* bias)
    : PanelLinear(n, k, (k + kBlock - 1) / kBlock * kShortBlockBytes, bias), blocks_((k + kBlock - 1) / kBlock) {
    std::atomic<bool> fits = true;
    parallel_for(panels_, [&](int64_t panel) {
        for (int64_t j = 0; j < std::min<int64_t>(kPanel, n - panel * kPanel); j++)
            for (int64_t block = 0; block < blocks_; block++) {
                float value[kBlock] = {};
                for (int64_t i = 0; i < std::min<int64_t>(kBlock, k - block * kBlock); i++)
                    value[i] = float_at(weight, element, (panel * kPanel + j) * stride_n + (block * kBlock + i) * stride_k);
                if (!round_block(value, j, block_at(panel, block))) fits = false;
            }
    });
    if (!fits) throw std::invalid_argument("weight has numbers that cannot be rounded to sixteen bits: NaN or infinite");
}

void ShortLinear::matmul(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out, const Upcoming*) const {
    const int64_t tile = quant_kernels().short_tile_rows;
    const int64_t largest = tile * std::max<int64_t>(1, kRowBytes / (blocks_ * kShortRowBytes) / tile);
    const int64_t pieces = std::max<int64_t>(1, (m + largest - 1) / largest);
    const int64_t piece = ((m + pieces - 1) / pieces + tile - 1) / tile * tile;
    for (int64_t row = 0; row < m; row += piece)
        matmul_rows(x + row * stride_x, std::min(piece, m - row), stride_x, out + row * stride_out, stride_out);
}

void ShortLinear::matmul_rows(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out) const {
    const QuantKernels& set = quant_kernels();
    const QuantRows rows = round_rows(
        m, set.short_tile_rows, blocks_ * kShortRowBytes, m * k_ < kSerialWork,
        [&](int64_t row, int64_t count, int64_t i, uint8_t* tile) { set.round_short_row(x + row * stride_x, k_, count, i, tile); });
    auto multiply = [&](int64_t begin, int64_t end) {
        set.short_linear({rows, block_at(0, 0), bias_.as<float>(), out, stride_out, n_, blocks_, begin, end});
    };
    if (m * n_ * k_ < kSerialWork) return multiply(0, panels_);
    parallel_for((panels_ + kStep - 1) / kStep, [&](int64_t i) { multiply(i * kStep, std::min(panels_, (i + 1) * kStep)); });
}

void ShortLinear::rows(const int64_t* ids, int64_t count, float* out) const {
    for (int64_t r = 0; r < count; r++)
        for (int64_t c = 0; c < k_; c++) {
            const uint8_t* block = block_at(ids[r] / kPanel, c / kBlock);
            const int64_t column = ids[r] % kPanel, input = c % kBlock;
            const auto* scales = reinterpret_cast<const float*>(block + kPanel * kBlock * sizeof(int16_t));
            const auto* numbers = reinterpret_cast<const int16_t*>(block);
            out[r * k_ + c] = scales[column] * numbers[(input / 2 * kPanel + column) * 2 + input % 2];
        }
}

}  // namespace oneloop
