#include "program.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>

namespace oneloop {
namespace {

constexpr int64_t kLine = 16;  // floats

int64_t whole_lines(int64_t floats) { return (floats + kLine - 1) / kLine * kLine; }

// Floats of registers `widths` for this many tokens, each aligned to a cache line.
int64_t floats_of(const std::vector<int64_t>& widths, int64_t tokens) {
    constexpr int64_t kMost = INT64_MAX / sizeof(float) - kLine;
    int64_t total = 0;
    for (int64_t width : widths) {
        int64_t floats;
        if (__builtin_mul_overflow(width, tokens, &floats) || floats > kMost ||
            __builtin_add_overflow(total, whole_lines(floats), &total) || total > kMost)
            throw std::invalid_argument("the registers are too wide for so many tokens");
    }
    return total;
}

}  // namespace

int Program::add_register(int64_t width) {
    widths_.push_back(width);
    return static_cast<int>(widths_.size()) - 1;
}

void Program::add(Op op, std::vector<int> used) {
    if (finished_) throw std::invalid_argument("the program is finished");
    ops_.push_back({std::move(op), std::move(used)});
}

void Program::truncate(int64_t size) {
    if (size < 0 || size > this->size() || finished_) throw std::invalid_argument("nothing to cut off");
    ops_.resize(size);
}

void Program::finish(std::vector<int> external) {
    if (finished_) throw std::invalid_argument("the program is finished");
    std::vector<size_t> last(widths_.size(), 0);
    for (size_t i = 0; i < ops_.size(); i++)
        for (int reg : ops_[i].used) last.at(reg) = i;
    std::vector<bool> outside(widths_.size(), false);
    for (int reg : external) {
        if (outside.at(reg)) throw std::invalid_argument("a register is external twice");
        outside[reg] = true;
    }
    external_ = std::move(external);
    slot_of_.assign(widths_.size(), -1);
    std::vector<int> idle;
    for (size_t i = 0; i < ops_.size(); i++) {
        for (int reg : ops_[i].used) {
            if (outside[reg] || slot_of_[reg] >= 0) continue;
            // The narrowest free place that is wide enough; otherwise the widest grows.
            auto fit = std::min_element(idle.begin(), idle.end(), [&](int a, int b) {
                const bool small_a = slots_[a] < widths_[reg], small_b = slots_[b] < widths_[reg];
                if (small_a != small_b) return small_b;
                return small_a ? slots_[a] > slots_[b] : slots_[a] < slots_[b];
            });
            if (fit == idle.end()) {
                slot_of_[reg] = static_cast<int>(slots_.size());
                slots_.push_back(widths_[reg]);
                continue;
            }
            slot_of_[reg] = *fit;
            slots_[*fit] = std::max(slots_[*fit], widths_[reg]);
            idle.erase(fit);
        }
        for (int reg : ops_[i].used)
            if (!outside[reg] && last[reg] == i && std::find(idle.begin(), idle.end(), slot_of_[reg]) == idle.end())
                idle.push_back(slot_of_[reg]);
    }
    places_.assign(widths_.size(), nullptr);
    finished_ = true;
}

void Program::run(const StepInputs& inputs, const std::vector<float*>& external) {
    std::lock_guard alone(running_);
    if (!finished_) throw std::invalid_argument("the program is not finished");
    const int64_t wanted = floats_of(slots_, inputs.tokens);
    if (wanted > room_) {
        memory_ = Memory();
        memory_ = allocate(wanted * sizeof(float));
        room_ = wanted;
    }
    std::vector<float*> starts(slots_.size());
    float* free = memory_.as<float>();
    for (size_t i = 0; i < slots_.size(); free += whole_lines(slots_[i] * inputs.tokens), i++) starts[i] = free;
    for (size_t reg = 0; reg < places_.size(); reg++) places_[reg] = slot_of_[reg] < 0 ? nullptr : starts[slot_of_[reg]];
    for (size_t i = 0; i < external_.size(); i++) places_[external_[i]] = external[i];
    const Frame frame(inputs, places_);
    for (const Recorded& each : ops_) each.op(frame);
}

}  // namespace oneloop
