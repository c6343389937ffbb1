// Part of a forward pass as a list of ops, recorded once and run by one call: between ops nothing locks, allocates or sleeps, and
// the thread pool's helpers stay awake.
//
// Ops read and write registers, each [tokens, width] floats; unused registers give their memory to later ones. Data that differs
// from step to step is passed to the call. Independent of Python; shapes were checked during recording.
#pragma once

#include <functional>
#include <mutex>
#include <vector>

#include "drivers.h"

namespace oneloop {

// Tokens of a step for one block table: where they are stored, and the context of each row of queries.
struct StepTable {
    const int64_t* slots;
    const int32_t *starts, *lens, *tables;
    int64_t lines, stride_table;
};

struct StepInputs {
    int64_t tokens;
    const int64_t* positions;
    const int32_t* adapters;  // the slot of each token's adapter, -1 for none; null where no token has one
    std::vector<StepTable> tables;
    const int32_t* starts = nullptr;  // first token of each row, and the end; null if no op needs them
    int64_t rows = 0;
};

class Program {
public:
    // Data of the current call for its ops.
    class Frame {
    public:
        const StepInputs& inputs;
        float* operator[](int reg) const { return places_[reg]; }

    private:
        friend Program;
        Frame(const StepInputs& in, const std::vector<float*>& places) : inputs(in), places_(places) {}
        const std::vector<float*>& places_;
    };
    using Op = std::function<void(const Frame&)>;

    int add_register(int64_t width);
    int64_t width(int reg) const { return widths_.at(reg); }  // throws std::out_of_range
    // `used`: every register that the op reads or writes; outputs must differ from inputs, unless it works in place.
    void add(Op op, std::vector<int> used);
    int64_t size() const { return static_cast<int64_t>(ops_.size()); }
    void truncate(int64_t size);
    // Ends the recording. `external`: registers for which every call passes memory, in order. If it throws, nothing changes.
    void finish(std::vector<int> external);
    bool finished() const { return finished_; }
    const std::vector<int>& external() const { return external_; }

    // One call at a time; a second one waits. Throws std::invalid_argument unless finished, or if the registers for this many
    // tokens overflow the counter.
    void run(const StepInputs& inputs, const std::vector<float*>& external);

private:
    struct Recorded {
        Op op;
        std::vector<int> used;
    };
    std::vector<int64_t> widths_;
    std::vector<Recorded> ops_;
    std::vector<int> external_;
    std::vector<int> slot_of_;       // by register; -1: external, or unused
    std::vector<int64_t> slots_;     // widths
    std::vector<float*> places_;
    bool finished_ = false;
    Memory memory_;
    int64_t room_ = 0;  // floats in memory_
    std::mutex running_;
};

}  // namespace oneloop
