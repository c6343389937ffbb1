// Neighbouring tokens of one adapter are multiplied together, in tiles; threads share tiles and output columns.
#include "lora.h"

#include <algorithm>
#include <stdexcept>

#include "../isa.h"
#include "../thread_pool.h"
#include "elements.h"

namespace oneloop {
namespace {

constexpr int64_t kChunkPanels = 32;      // expanded panels per task: its sums stay in the L1 cache
constexpr int64_t kTogether = 8;          // shrinking chains per task
constexpr int kElements = 4;
constexpr int64_t kFewRows = 32, kCacheBytes = 512 << 10;  // limits of prefetching
constexpr int64_t kSerialWork = 1 << 15;  // multiply-adds that are not worth waking another thread for

// Rows [row, row + rows) of a step, all of one adapter; their shrunk rows begin at `h`.
struct Tile {
    const LoraShare* share;
    int64_t row, rows;
    float* h;
};

// Columns of one part for one tile.
struct Chunk {
    const Tile* tile;
    const LoraShare::Part* part;
    int64_t panel_begin, panel_end;
};

// x [rows, k] in the kernel's form of one tile: a single row is its own packed form.
const float* packed(const float* x, int64_t stride_x, int64_t rows, int64_t k) {
    if (rows == 1) return x;
    float* to = scratch<float>(Slot::kLoraRows, rows * k);
    kernels().pack_tile(x, stride_x, rows, k, to);
    return to;
}

void shrink(const Tile& tile, const float* x, int64_t stride_x) {
    const PackedLinear& matrix = tile.share->shrink();
    const int64_t starts[2] = {0, tile.rows};
    const float* rows = packed(x + tile.row * stride_x, stride_x, tile.rows, matrix.k());
    kernels().linear(matrix.args({rows, starts, 1}, tile.h, tile.share->width()));
}

// Interleaved chains of single-row tiles, of any adapters, up to kTogether at a time.
void shrink(const std::vector<OneRow>& chains, Element element, int64_t k, bool serial) {
    const int64_t count = static_cast<int64_t>(chains.size());
    const int64_t together = serial ? count : std::clamp<int64_t>((count + num_threads() - 1) / num_threads(), 1, kTogether);
    auto some = [&](int64_t i) {
        const int64_t first = i * together;
        kernels().one_rows(chains.data() + first, std::min(together, count - first), element, k);
    };
    if (serial) return some(0);
    parallel_for((count + together - 1) / together, some);
}

void expand(const Chunk& chunk, float* out, int64_t stride_out) {
    const Tile& tile = *chunk.tile;
    const PackedLinear& matrix = *chunk.part->expand;
    const int64_t starts[2] = {0, tile.rows}, first = chunk.panel_begin * kPanel;
    const int64_t columns = std::min(matrix.n(), chunk.panel_end * kPanel) - first;
    if (tile.rows == 1) {
        const LinearArgs args = matrix.args({}, nullptr, 0);
        const char* panels = static_cast<const char*>(args.w) + first * args.k * element_bytes(args.element);
        float* to = out + tile.row * stride_out + chunk.part->start + first;
        return kernels().add_one_row(tile.h + chunk.part->offset, panels, args.element, args.k, to, columns);
    }
    float* sums = scratch<float>(Slot::kLoraSums, tile.rows * kChunkPanels * kPanel);
    const float* rows = packed(tile.h + chunk.part->offset, tile.share->width(), tile.rows, matrix.k());
    LinearArgs args = matrix.args({rows, starts, 1}, sums - first, kChunkPanels * kPanel);
    args.panel_begin = chunk.panel_begin, args.panel_end = chunk.panel_end;
    kernels().linear(args);
    for (int64_t i = 0; i < tile.rows; i++) {
        float* to = out + (tile.row + i) * stride_out + chunk.part->start + first;
        const float* from = sums + i * kChunkPanels * kPanel;
        for (int64_t c = 0; c < columns; c++) to[c] += from[c];
    }
}

template <typename Items, typename Do>
void each(const Items& items, int64_t work, Do run) {
    if (work < kSerialWork) {
        for (const auto& item : items) run(item);
    } else {
        parallel_for(static_cast<int64_t>(items.size()), [&](int64_t i) { run(items[i]); });
    }
}

}  // namespace

LoraShare::LoraShare(std::shared_ptr<PackedLinear> shrink, std::vector<Part> parts, int64_t n, std::vector<float> rank_scales)
    : shrink_(std::move(shrink)), parts_(std::move(parts)), n_(n), scales_(std::move(rank_scales)) {
    if (!shrink_) throw std::invalid_argument("an adapter's share needs what shrinks");
    if (scales_.empty()) scales_.assign(shrink_->n(), 1.0f);
    if (static_cast<int64_t>(scales_.size()) != shrink_->n()) throw std::invalid_argument("every rank has a scale");
    for (const Part& part : parts_) {
        if (!part.expand) throw std::invalid_argument("a part needs what expands");
        if (part.start < 0 || part.start > n - part.expand->n()) throw std::invalid_argument("a part is not within the outputs");
        if (part.offset < 0 || part.offset > shrink_->n() - part.expand->k())
            throw std::invalid_argument("a part reads more than is shrunk to");
        for (int64_t j = 0; j < part.expand->k(); j++) scales_[part.offset + j] *= part.scale;
    }
}

void LoraShare::scale(float* h, int64_t rows) const {
    for (int64_t i = 0; i < rows; i++)
        for (size_t j = 0; j < scales_.size(); j++) h[i * width() + j] *= scales_[j];
}

LoraSlots::LoraSlots(int64_t n, int64_t k, int64_t num_slots) : n_(n), k_(k) {
    if (n < 1 || k < 1 || num_slots < 1) throw std::invalid_argument("a layer with adapters has inputs, outputs and slots");
    shares_.resize(num_slots);
}

void LoraSlots::put(int64_t slot, std::shared_ptr<LoraShare> share) {
    if (slot < 0 || slot >= num_slots()) throw std::invalid_argument("there is no such slot");
    if (share && (share->n() != n_ || share->shrink().k() != k_)) throw std::invalid_argument("the share is of another layer");
    shares_[slot] = std::move(share);
}

Upcoming LoraSlots::upcoming(int64_t m, const int32_t* slots) const {
    Upcoming found;
    if (m > kFewRows) return found;
    int64_t bytes = 0;
    auto take = [&](const PackedLinear& matrix) {
        found.pieces.push_back({static_cast<const char*>(matrix.args({}, nullptr, 0).w), matrix.nbytes()});
        bytes += matrix.nbytes();
    };
    for (int64_t row = 0; row < m; row++) {
        const LoraShare* share = slots[row] < 0 ? nullptr : shares_[slots[row]].get();
        if (!share || std::find(slots, slots + row, slots[row]) != slots + row) continue;
        take(share->shrink());
        for (const LoraShare::Part& part : share->parts()) take(*part.expand);
        if (bytes > kCacheBytes) return {};
    }
    return found;
}

void LoraSlots::add(const float* x, int64_t m, int64_t stride_x, const int32_t* slots, float* out, int64_t stride_out) const {
    const int64_t most = kernels().max_tile_rows;
    std::vector<Tile> tiles;
    std::vector<OneRow> chains[kElements];
    int64_t floats = 0, shrinks = 0, expands = 0;
    for (int64_t row = 0; row < m;) {
        const int32_t slot = slots[row];
        int64_t end = row + 1;
        while (end < m && slots[end] == slot && end - row < most) end++;
        const LoraShare* share = slot < 0 ? nullptr : shares_[slot].get();
        if (share) {
            tiles.push_back({share, row, end - row, nullptr});
            floats += (end - row) * share->width();
            shrinks += (end - row) * share->shrink().n() * k_;
        }
        row = end;
    }
    if (tiles.empty()) return;
    float* h = scratch<float>(Slot::kLoraShrunk, floats);
    std::vector<Chunk> chunks;
    std::vector<Tile> wide;
    for (Tile& tile : tiles) {
        tile.h = h;
        h += tile.rows * tile.share->width();
        if (tile.rows == 1) {
            const LinearArgs args = tile.share->shrink().args({}, tile.h, 0);
            const int64_t panel_bytes = k_ * kPanel * element_bytes(args.element);
            for (int64_t p = 0; p < tile.share->shrink().panels(); p++)
                chains[static_cast<int>(args.element)].push_back(
                    {x + tile.row * stride_x, static_cast<const char*>(args.w) + p * panel_bytes, tile.h + p * kPanel});
        } else {
            wide.push_back(tile);
        }
        for (const LoraShare::Part& part : tile.share->parts()) {
            const int64_t panels = (part.expand->n() + kPanel - 1) / kPanel;
            for (int64_t panel = 0; panel < panels; panel += kChunkPanels)
                chunks.push_back({&tile, &part, panel, std::min(panels, panel + kChunkPanels)});
            expands += tile.rows * part.expand->n() * part.expand->k();
        }
    }
    each(wide, shrinks, [&](const Tile& tile) { shrink(tile, x, stride_x); });
    for (int e = 0; e < kElements; e++)
        if (!chains[e].empty()) shrink(chains[e], static_cast<Element>(e), k_, shrinks < kSerialWork);
    for (const Tile& tile : tiles) tile.share->scale(tile.h, tile.rows);
    each(chunks, expands, [&](const Chunk& chunk) { expand(chunk, out, stride_out); });
}

}  // namespace oneloop
