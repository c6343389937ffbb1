// Packed weights, and the division of rows and panels among threads.
#include <algorithm>

#include "../isa.h"
#include "../thread_pool.h"
#include "drivers.h"
#include "elements.h"

namespace oneloop {
namespace {

constexpr int64_t kRowBytes = 768 << 10;       // packed rows worked on at once: they stay in a core's second-level cache
constexpr int64_t kSerialWork = 1 << 15;       // multiply-adds that are not worth waking another thread for

constexpr int64_t kMaxTiles = 512;

struct Tiles {
    int64_t starts[kMaxTiles + 1];
    int64_t count;
};

// Fewest tiles of at most `most` rows, with sizes that differ by at most one.
void cut(int64_t m, int64_t most, Tiles& tiles) {
    tiles.count = (m + most - 1) / most;
    for (int64_t t = 0; t <= tiles.count; t++) tiles.starts[t] = m * t / tiles.count;
}

template <typename T>
void pack(const T* weight, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k, T* panels) {
    parallel_for((n + kPanel - 1) / kPanel, [&](int64_t panel) {
        T* to = panels + panel * k * kPanel;
        const int64_t columns = std::min<int64_t>(kPanel, n - panel * kPanel);
        for (int64_t j = 0; j < columns; j++) {
            const T* from = weight + (panel * kPanel + j) * stride_n;
            for (int64_t c = 0; c < k; c++) to[c * kPanel + j] = from[c * stride_k];
        }
    });
}

}  // namespace

PanelLinear::PanelLinear(int64_t n, int64_t k, int64_t panel_bytes, const float* bias)
    : n_(n), k_(k), panels_((n + kPanel - 1) / kPanel), nbytes_(panels_ * panel_bytes), weight_(allocate_weight(nbytes_)) {
    if (!bias) return;
    bias_ = allocate_weight(panels_ * kPanel * sizeof(float));
    std::copy(bias, bias + n, bias_.as<float>());
    nbytes_ += panels_ * kPanel * static_cast<int64_t>(sizeof(float));
}

PackedLinear::PackedLinear(const void* weight, Element element, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k,
                           const float* bias)
    : PanelLinear(n, k, k * kPanel * element_bytes(element), bias), element_(element) {
    if (element == Element::kFloat32)
        pack(static_cast<const float*>(weight), n, k, stride_n, stride_k, weight_.as<float>());
    else if (element == Element::kInt8)
        pack(static_cast<const int8_t*>(weight), n, k, stride_n, stride_k, weight_.as<int8_t>());
    else
        pack(static_cast<const uint16_t*>(weight), n, k, stride_n, stride_k, weight_.as<uint16_t>());
}

void Upcoming::fetch(int64_t i, int64_t count) const {
    int64_t lines = 0;
    for (const Piece& piece : pieces) lines += (piece.bytes + 63) / 64;
    int64_t first = lines * i / count, left = lines * (i + 1) / count - first;
    for (const Piece& piece : pieces) {
        const int64_t here = (piece.bytes + 63) / 64;
        for (int64_t line = first; line < here && left > 0; line++, left--) __builtin_prefetch(piece.at + line * 64, 0, 2);
        first = std::max<int64_t>(0, first - here);
    }
}

void PackedLinear::matmul(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out, const Upcoming*) const {
    // Blocks of equal size, rounded up to whole tiles so that no extra narrow tile is left in each.
    const int64_t tile = kernels().max_tile_rows;
    const int64_t fit = kRowBytes / static_cast<int64_t>(sizeof(float)) / std::max<int64_t>(k_, 1) / tile;
    const int64_t largest = tile * std::clamp<int64_t>(fit, 1, kMaxTiles);
    const int64_t blocks = std::max<int64_t>(1, (m + largest - 1) / largest);
    const int64_t block = ((m + blocks - 1) / blocks + tile - 1) / tile * tile;
    for (int64_t row = 0; row < m; row += block)
        matmul_rows(x + row * stride_x, std::min(block, m - row), stride_x, out + row * stride_out, stride_out);
}

LinearArgs PackedLinear::args(PackedRows rows, float* out, int64_t stride_out) const {
    return {rows, weight_.as<void>(), element_, bias_.as<float>(), out, stride_out, n_, k_, 0, panels_};
}

void PackedLinear::matmul_rows(const float* x, int64_t m, int64_t stride_x, float* out, int64_t stride_out) const {
    const Kernels& set = kernels();
    Tiles tiles;
    cut(m, set.max_tile_rows, tiles);
    const float* rows = x;
    if (m > 1) {  // one row is its own packed form
        float* packed = scratch<float>(Slot::kRows, m * k_);
        auto pack = [&](int64_t t) {
            const int64_t start = tiles.starts[t];
            set.pack_tile(x + start * stride_x, stride_x, tiles.starts[t + 1] - start, k_, packed + start * k_);
        };
        if (m * k_ < kSerialWork) {
            for (int64_t t = 0; t < tiles.count; t++) pack(t);
        } else {
            parallel_for(tiles.count, pack);
        }
        rows = packed;
    }
    const LinearArgs args = this->args({rows, tiles.starts, tiles.count}, out, stride_out);
    if (m * n_ * k_ < kSerialWork) return set.linear(args);
    // Few panels are assigned in pairs, so that no thread waits for a long last task; many in fours, the fastest for kernels of
    // few rows.
    const int64_t step = panels_ >= 32 * num_threads() ? 4 : 2;
    parallel_for((panels_ + step - 1) / step, [&](int64_t i) {
        LinearArgs mine = args;
        mine.panel_begin = i * step;
        mine.panel_end = std::min(panels_, (i + 1) * step);
        set.linear(mine);
    });
}

void PackedLinear::rows(const int64_t* ids, int64_t count, float* out) const {
    auto copy = [&](int64_t i) {
        const int64_t first = ids[i] / kPanel * k_ * kPanel + ids[i] % kPanel;
        for (int64_t c = 0; c < k_; c++) out[i * k_ + c] = float_at(weight_.as<void>(), element_, first + c * kPanel);
    };
    if (count < 16) {
        for (int64_t i = 0; i < count; i++) copy(i);
    } else {
        parallel_for(count, copy);
    }
}

}  // namespace oneloop
