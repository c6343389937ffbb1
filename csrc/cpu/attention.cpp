// Division of a step's attention into tasks: (row, tile of queries, kv head), and for few queries over a long context also
// segments of keys. Segments are merged in position order in any case, so the division does not change the result.
#include <algorithm>
#include <vector>

#include "../isa.h"
#include "../thread_pool.h"
#include "drivers.h"

namespace oneloop {
namespace {

constexpr int64_t kTileRows = 96;      // (query, head) pairs sharing the gathered keys: their scores fit the first cache
constexpr int64_t kSerialWork = 1 << 13;  // key-query pairs times head size under which one thread is quicker

struct Part {
    AttentionTask task;
    int64_t first_state;  // in floats, into the shared states; -1 when the task finishes its rows itself
    int64_t segments;     // parts of the same rows from this one on; 0 for all but the first
};

int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

AttentionState state_at(float* floats, int64_t rows) {
    const int64_t whole = round_up(rows, 16);
    return {floats + 2 * whole, floats, floats + whole};
}

int64_t state_floats(int64_t rows, int64_t head_size) { return round_up(rows, 16) * (2 + round_up(head_size, 16)); }

// Tasks of one row of the step, longest first; returns the floats of state that they need.
int64_t cut_row(AttentionTask whole, int64_t kv_heads, const AttentionArgs& args, int64_t states, std::vector<Part>& parts) {
    const int64_t per_tile = std::max<int64_t>(1, kTileRows / args.group), first = whole.query, count = whole.num_queries;
    const int64_t first_position = whole.position, length = whole.key_end;
    for (int64_t end = count; end > 0; end = (end - 1) / per_tile * per_tile) {
        const int64_t begin = (end - 1) / per_tile * per_tile;
        whole.query = first + begin, whole.num_queries = end - begin, whole.position = first_position + begin;
        const int64_t keys = std::min(length, first_position + end + args.ahead);
        const int64_t low = hidden_before(whole.position, args.window) / kSegment * kSegment;
        const int64_t segments = (keys - low + kSegment - 1) / kSegment;
        const bool split = count <= per_tile && segments > 1;
        for (whole.kv_head = 0; whole.kv_head < kv_heads; whole.kv_head++) {
            for (int64_t s = 0; s < (split ? segments : 1); s++) {
                whole.key_begin = split ? low + s * kSegment : low;
                whole.key_end = split ? std::min(keys, low + (s + 1) * kSegment) : keys;
                parts.push_back({whole, split ? states : -1, split && s == 0 ? segments : 0});
                if (split) states += state_floats(whole.num_queries * args.group, args.head_size);
            }
        }
    }
    return states;
}

}  // namespace

int64_t attention_scratch_floats(int64_t rows, int64_t head_size) {
    const int64_t whole = round_up(rows, 16), padded = round_up(head_size, 16);
    const int64_t pointers = kKeyTile * 2;  // eight bytes each
    return whole * padded + 2 * padded * kKeyTile + 16 * (kKeyTile + 1) + whole * 16 + pointers + state_floats(rows, head_size);
}

void paged_attention(const AttentionArgs& args, int64_t rows, int64_t kv_heads, const int32_t* starts, const int32_t* lens,
                     const int32_t* tables, int64_t stride_table, float* out, int64_t stride_t, int64_t stride_h) {
    const Kernels& set = kernels();
    thread_local std::vector<Part> cache;
    std::vector<Part>& parts = cache;  // the lambdas run on other threads, where `cache` is another vector
    parts.clear();
    int64_t states = 0, work = 0;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t queries = starts[r + 1] - starts[r];
        if (queries == 0) continue;
        AttentionTask whole{tables + r * stride_table, starts[r], queries, lens[r] - queries, 0, 0, lens[r]};
        states = cut_row(whole, kv_heads, args, states, parts);
        work += queries * std::min<int64_t>(lens[r], args.window + queries) * args.head_size * args.group * kv_heads;
    }
    float* shared = states ? scratch<float>(Slot::kStates, states) : nullptr;
    auto attend = [&](int64_t i, const AttentionTask* next) {
        const Part& part = parts[i];
        const int64_t n = part.task.num_queries * args.group;
        const int64_t own = attention_scratch_floats(n, args.head_size);
        float* mine = scratch<float>(Slot::kAttention, own + state_floats(n, args.head_size));
        const AttentionState state = state_at(part.first_state < 0 ? mine + own : shared + part.first_state, n);
        set.attention(args, part.task, next, state, mine);
        if (part.first_state < 0) set.finish(state, args, part.task, out, stride_t, stride_h);
    };
    const int64_t count = static_cast<int64_t>(parts.size());
    if (work < kSerialWork) {
        for (int64_t i = 0; i < count; i++) attend(i, i + 1 < count ? &parts[i + 1].task : nullptr);
    } else {
        // With plenty of tasks, neighbours go to one thread, which prefetches the next task's keys during the current one.
        const int64_t step = std::clamp<int64_t>(count / (num_threads() * 8), 1, 8);
        parallel_for((count + step - 1) / step, [&](int64_t i) {
            const int64_t end = std::min(count, (i + 1) * step);
            for (int64_t p = i * step; p < end; p++) attend(p, p + 1 < end ? &parts[p + 1].task : nullptr);
        });
    }
    for (int64_t i = 0; i < count; i++) {
        const Part& part = parts[i];
        if (part.segments == 0) continue;
        const int64_t n = part.task.num_queries * args.group, padded = round_up(args.head_size, set.vector_width);
        const AttentionState total = state_at(shared + part.first_state, n);
        for (int64_t s = 1; s < part.segments; s++) set.merge(total, state_at(shared + parts[i + s].first_state, n), n, padded);
        set.finish(total, args, part.task, out, stride_t, stride_h);
    }
}

void packed_attention(Heads q, Heads k, Heads v, int64_t rows, const int32_t* starts, const PackedScores& scores, int64_t d,
                      float* out, int64_t stride_t, int64_t stride_h) {
    // For the kernel each row's keys are one block of a cache, which begins at the row's first token.
    constexpr int64_t kWholeRow = int64_t{1} << 40;
    thread_local std::vector<int32_t> lens;
    lens.resize(rows);
    for (int64_t r = 0; r < rows; r++) lens[r] = starts[r + 1] - starts[r];
    const int64_t ahead = scores.window == kNoWindow ? kNoWindow : scores.window - 1;
    const AttentionArgs args{q.data,       q.stride_t, q.stride_h,        k.data,       v.data,        k.stride_t,
                             k.stride_h,   k.stride_t, v.stride_t,        v.stride_h,   v.stride_t,    CacheType::kFloat32,
                             kWholeRow,    d,          q.heads / k.heads, scores.scale, scores.window, scores.softcap,
                             scores.sinks, ahead};
    paged_attention(args, rows, k.heads, starts, lens.data(), starts, 1, out, stride_t, stride_h);
}

}  // namespace oneloop
