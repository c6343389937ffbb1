// Low-rank adapters beside a linear layer: for each token the two small products of its own adapter, added to what the layer gave.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "drivers.h"

namespace oneloop {

// What one adapter does to one layer of `n` outputs and `k` inputs: h = x @ shrink.T, and for each part
// out[start ...] += scale * h[offset ...] @ expand.T.
class LoraShare {
public:
    struct Part {
        std::shared_ptr<PackedLinear> expand;
        int64_t start, offset;
        float scale;
    };

    // rank_scales: what each rank is times beside its part's scale, for numbers that have theirs apart; empty for ones.
    // Throws std::invalid_argument where the parts do not fit the layer or what shrinks, or scales the ranks.
    LoraShare(std::shared_ptr<PackedLinear> shrink, std::vector<Part> parts, int64_t n, std::vector<float> rank_scales = {});

    const PackedLinear& shrink() const { return *shrink_; }
    const std::vector<Part>& parts() const { return parts_; }
    int64_t n() const { return n_; }
    // What a row shrinks to takes so many floats, of which the first are the ranks.
    int64_t width() const { return shrink_->panels() * kPanel; }
    // In place: each rank of h [rows, width] times its scales.
    void scale(float* h, int64_t rows) const;

private:
    std::shared_ptr<PackedLinear> shrink_;
    std::vector<Part> parts_;
    int64_t n_;
    std::vector<float> scales_;
};

// The shares of one layer that steps may ask for, by slot.
class LoraSlots {
public:
    LoraSlots(int64_t n, int64_t k, int64_t num_slots);

    // Not while a step is computed. Null: there is none. Throws std::invalid_argument for another shape, or no such slot.
    void put(int64_t slot, std::shared_ptr<LoraShare> share);
    // out [m, n] += what the share in slots[i] adds for row i of x [m, k]; nothing where that is -1 or the slot has none.
    void add(const float* x, int64_t m, int64_t stride_x, const int32_t* slots, float* out, int64_t stride_out) const;

    // What `add` will read for so many rows; nothing where they are many, or the shares more than a cache holds.
    Upcoming upcoming(int64_t m, const int32_t* slots) const;

    int64_t n() const { return n_; }
    int64_t k() const { return k_; }
    int64_t num_slots() const { return static_cast<int64_t>(shares_.size()); }

private:
    int64_t n_, k_;
    std::vector<std::shared_ptr<LoraShare>> shares_;
};

}  // namespace oneloop
