// Low-rank adapters of a linear layer: each token's two small products by its own adapter, added to the layer's output.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "drivers.h"

namespace oneloop {

// Change of one adapter to one layer of `n` outputs and `k` inputs: h = x @ shrink.T, and for each part out[start ...] += scale *
// h[offset ...] @ expand.T.
class LoraShare {
public:
    struct Part {
        std::shared_ptr<PackedLinear> expand;
        int64_t start, offset;
        float scale;
    };

    // rank_scales: factor of each rank in addition to its part's scale; empty for ones. Throws std::invalid_argument if the parts
    // do not fit the layer or shrink, or the scales do not fit the ranks.
    LoraShare(std::shared_ptr<PackedLinear> shrink, std::vector<Part> parts, int64_t n, std::vector<float> rank_scales = {});

    const PackedLinear& shrink() const { return *shrink_; }
    const std::vector<Part>& parts() const { return parts_; }
    int64_t n() const { return n_; }
    // Floats of a shrunk row, the first of which are the ranks.
    int64_t width() const { return shrink_->panels() * kPanel; }
    // Multiplies each rank of h [rows, width] by its scale, in place.
    void scale(float* h, int64_t rows) const;

private:
    std::shared_ptr<PackedLinear> shrink_;
    std::vector<Part> parts_;
    int64_t n_;
    std::vector<float> scales_;
};

// Adapter shares of one layer, by slot.
class LoraSlots {
public:
    LoraSlots(int64_t n, int64_t k, int64_t num_slots);

    // Must not run during a step. Null removes the share. Throws std::invalid_argument for another shape, or an unknown slot.
    void put(int64_t slot, std::shared_ptr<LoraShare> share);
    // out [m, n] += the product of row i of x [m, k] by the share in slots[i]; nothing if that is -1 or the slot is empty.
    void add(const float* x, int64_t m, int64_t stride_x, const int32_t* slots, float* out, int64_t stride_out) const;

    // Memory that `add` will read for this many rows; empty for many rows, or if the shares exceed a cache.
    Upcoming upcoming(int64_t m, const int32_t* slots) const;

    int64_t n() const { return n_; }
    int64_t k() const { return k_; }
    int64_t num_slots() const { return static_cast<int64_t>(shares_.size()); }

private:
    int64_t n_, k_;
    std::vector<std::shared_ptr<LoraShare>> shares_;
};

}  // namespace oneloop
