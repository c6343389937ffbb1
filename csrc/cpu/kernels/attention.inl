// Attention of a task's queries over their paged context.
//
// Online softmax (Milakov and Gimelshein 2018; tiled as in FlashAttention, Dao et al. 2022) over kKeyTile keys at a time. Rows of
// a task are its (query, head of the group) pairs. A row's result depends on its own keys only: a masked key adds an exact zero,
// so neither the tiling of queries nor the chunking matters.

// scores [MR][kKeyTile] = queries [head_size][MR] . keys
template <int MR>
void score_tile(const float* queries, const float* keys, int64_t head_size, Fetcher& coming, float* scores) {
    for (int column = 0; column < kKeyTile; column += kScoreVecs * W) {
        Vec acc[MR][kScoreVecs];
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) {
            ONELOOP_UNROLL
            for (int j = 0; j < kScoreVecs; j++) acc[i][j] = Vec::zero();
        }
        const float* q = queries;
        const float* key = keys + column;
        for (int64_t d = 0; d < head_size; d++, q += MR, key += kKeyTile) {
            coming.fetch(2);
            Vec row[kScoreVecs];
            ONELOOP_UNROLL
            for (int j = 0; j < kScoreVecs; j++) row[j] = Vec::load(key + j * W);
            ONELOOP_UNROLL
            for (int i = 0; i < MR; i++) {
                Vec x = Vec::broadcast(q[i]);
                x.pin();
                ONELOOP_UNROLL
                for (int j = 0; j < kScoreVecs; j++) acc[i][j] = Vec::fma(x, row[j], acc[i][j]);
            }
        }
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) {
            ONELOOP_UNROLL
            for (int j = 0; j < kScoreVecs; j++) acc[i][j].store(scores + i * kKeyTile + column + j * W);
        }
    }
}

// values [MR][NV registers] = values * decay + weights [MR][kKeyTile] . rows, in the order of the keys
template <int MR, int NV>
void value_columns(const float* weights, const float* decay, const float* const* rows, int64_t column, int64_t count,
                   Fetcher& coming, float* values, int64_t padded) {
    Vec acc[MR][NV];
    ONELOOP_UNROLL
    for (int i = 0; i < MR; i++) {
        const Vec shrink = Vec::broadcast(decay[i]);
        ONELOOP_UNROLL
        for (int j = 0; j < NV; j++) acc[i][j] = Vec::load(values + i * padded + column + j * W) * shrink;
    }
    for (int64_t key = 0; key < count; key++) {
        coming.fetch(2);
        const float* from = rows[key] + column;
        Vec row[NV];
        ONELOOP_UNROLL
        for (int j = 0; j < NV; j++) row[j] = Vec::load(from + j * W);
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) {
            Vec x = Vec::broadcast(weights[i * kKeyTile + key]);
            if (NV > 1) x.pin();
            ONELOOP_UNROLL
            for (int j = 0; j < NV; j++) acc[i][j] = Vec::fma(x, row[j], acc[i][j]);
        }
    }
    ONELOOP_UNROLL
    for (int i = 0; i < MR; i++) {
        ONELOOP_UNROLL
        for (int j = 0; j < NV; j++) acc[i][j].store(values + i * padded + column + j * W);
    }
}

// tanh within 3 ulp: Cephes' odd polynomial for small x, by e^-2|x| for others.
inline Vec tanh(Vec x) {
    const Vec square = x * x, away = Vec::max(x, Vec::zero() - x);
    Vec p = Vec::broadcast(-5.70498872745e-3f);
    p = Vec::fma(p, square, Vec::broadcast(2.06390887954e-2f));
    p = Vec::fma(p, square, Vec::broadcast(-5.37397155531e-2f));
    p = Vec::fma(p, square, Vec::broadcast(1.33314422036e-1f));
    p = Vec::fma(p, square, Vec::broadcast(-3.33332819422e-1f));
    const Vec one = Vec::broadcast(1.0f), e = exp_upto_89(away * Vec::broadcast(-2.0f));
    const Vec large = (one - e) / (one + e);
    return Vec::select_le(away, Vec::broadcast(0.625f), Vec::fma(p * square, x, x),
                          Vec::select_le(x, Vec::zero(), Vec::zero() - large, large));
}

template <int MR>
void value_tile(const float* weights, const float* decay, const float* const* rows, int64_t count, Fetcher& coming, float* values,
                int64_t padded) {
    const int64_t used = padded / W * W;
    int64_t column = 0;
    for (; column + kScoreVecs * W <= used; column += kScoreVecs * W)
        value_columns<MR, kScoreVecs>(weights, decay, rows, column, count, coming, values, padded);
    for (; column < used; column += W) value_columns<MR, 1>(weights, decay, rows, column, count, coming, values, padded);
}

// Turns one row of scores into weights in place, relative to the larger of its old maximum and this tile's. Keys [hidden,
// visible) of the tile count.
inline void softmax_row(float* scores, int64_t hidden, int64_t visible, float* max, float* decay, float* sums) {
    Vec s[kKeyVecs];
    Vec top = Vec::broadcast(kLowest);
    if (hidden > 0 || visible < kKeyTile) {
        const Vec limit = Vec::broadcast(static_cast<float>(visible) - 1.0f), nothing = Vec::broadcast(-__builtin_inff());
        const Vec before = Vec::broadcast(static_cast<float>(hidden) - 1.0f);
        ONELOOP_UNROLL
        for (int j = 0; j < kKeyVecs; j++) {
            const Vec index = Vec::lane_index() + Vec::broadcast(static_cast<float>(j * W));
            s[j] = Vec::select_le(index, limit, Vec::load(scores + j * W), nothing);
            s[j] = Vec::select_le(index, before, nothing, s[j]);
            top = Vec::max(top, s[j]);
        }
    } else {
        ONELOOP_UNROLL
        for (int j = 0; j < kKeyVecs; j++) {
            s[j] = Vec::load(scores + j * W);
            top = Vec::max(top, s[j]);
        }
    }
    const float tile_max = top.largest(), earlier = *max;
    const float now = tile_max > earlier ? tile_max : earlier;
    *max = now;
    // Rarely taken after the first tiles. Multiplying by exactly 1 would give the same bits, so this only saves time.
    Vec total = Vec::load(sums);
    *decay = 1.0f;
    if (now != earlier) {
        const Vec shrink = exp_upto_89(Vec::broadcast(earlier - now));
        shrink.store(decay, 1);
        total = total * shrink;
    }
    const Vec base = Vec::broadcast(now);
    ONELOOP_UNROLL
    for (int j = 0; j < kKeyVecs; j++) {
        const Vec weight = exp_upto_89(s[j] - base);
        weight.store(scores + j * W);
        total = total + weight;
    }
    total.store(sums);
}

// Rows are in position order, so the last row of the tile attends to the latest keys and the first row to the earliest. Keys
// masked for all rows are skipped: they would add exact zeros, or uninitialised memory.
template <int MR>
void attend_rows(const AttentionArgs& args, const AttentionTask& task, int64_t tile, const Places& places, Fetcher& coming,
                 const Scratch& s, AttentionState state, int64_t padded) {
    const int64_t before = task.position + 1 - places.first;  // keys up to itself = before + query, where that is positive
    const int64_t most = smaller(before + (tile + MR - 1) / args.group + args.ahead, places.count);
    const int64_t first = larger(before + tile / args.group - args.window, 0);
    if (most <= first) return;
    score_tile<MR>(s.queries + tile * args.head_size, s.keys, args.head_size, coming, s.scores);
    if (args.softcap > 0) {
        const Vec cap = Vec::broadcast(args.softcap);
        for (int i = 0; i < MR * kKeyTile; i += W) (tanh(Vec::load(s.scores + i) / cap) * cap).store(s.scores + i);
    }
    for (int i = 0; i < MR; i++) {
        const int64_t row = tile + i, upto = before + row / args.group;
        softmax_row(s.scores + i * kKeyTile, larger(upto - args.window, 0), larger(smaller(upto + args.ahead, places.count), 0),
                    state.max + row, s.decay + i, s.sums + row * W);
    }
    value_tile<MR>(s.scores + first, s.decay, s.value_rows + first, most - first, coming, state.values + tile * padded, padded);
}

using AttendRows = void (*)(const AttentionArgs&, const AttentionTask&, int64_t, const Places&, Fetcher&, const Scratch&,
                            AttentionState, int64_t);
template <int MR>
struct AttendTable {
    static void fill(AttendRows* table) {
        table[MR] = attend_rows<MR>;
        AttendTable<MR - 1>::fill(table);
    }
};
template <>
struct AttendTable<0> {
    static void fill(AttendRows*) {}
};
struct AttendTiles {
    AttendRows table[kScoreRows + 1];
    AttendTiles() { AttendTable<kScoreRows>::fill(table); }
};

// Keys [begin, end) of one segment, into a fresh state. `after`, if any, is the tile needed next.
void attend_segment(const AttentionArgs& args, const AttentionTask& task, int64_t begin, int64_t end, const Places& after,
                    const Scratch& s, AttentionState state) {
    static const AttendTiles tiles;
    const int64_t rows = task.num_queries * args.group, padded = round_up(args.head_size, W);
    for (int64_t i = 0; i < rows * padded; i++) state.values[i] = 0.0f;
    for (int64_t i = 0; i < rows * W; i++) s.sums[i] = 0.0f;
    for (int64_t i = 0; i < rows; i++) state.max[i] = kLowest;
    Places places[2];
    Fetcher coming;
    locate(args, task, larger(begin, oneloop::hidden_before(task.position, args.window) / kKeyTile * kKeyTile), end, places[0]);
    for (int turn = 0; places[turn].count > 0; turn ^= 1) {
        locate(args, task, places[turn].first + kKeyTile, end, places[turn ^ 1]);
        coming.aim(args, places[turn ^ 1].count > 0 ? places[turn ^ 1] : after);
        switch (args.type) {
            case CacheType::kFloat32: gather<Float32>(args, places[turn], coming, s); break;
            case CacheType::kBFloat16: gather<BFloat16>(args, places[turn], coming, s); break;
            case CacheType::kInt8: gather<Int8>(args, places[turn], coming, s); break;
        }
        for (int64_t tile = 0; tile < rows; tile += kScoreRows)
            tiles.table[smaller(kScoreRows, rows - tile)](args, task, tile, places[turn], coming, s, state, padded);
    }
    for (int64_t i = 0; i < rows; i++) state.sum[i] = Vec::load(s.sums + i * W).sum();
}

void merge(AttentionState into, AttentionState part, int64_t rows, int64_t padded) {
    for (int64_t row = 0; row < rows; row++) {
        const float a = into.max[row], b = part.max[row], now = a > b ? a : b;
        const Vec keep = exp(Vec::broadcast(a - now)), add = exp(Vec::broadcast(b - now));
        for (int64_t d = 0; d < padded; d += W) {
            const Vec old = Vec::load(into.values + row * padded + d) * keep;
            Vec::fma(Vec::load(part.values + row * padded + d), add, old).store(into.values + row * padded + d);
        }
        Vec::fma(Vec::broadcast(part.sum[row]), add, Vec::broadcast(into.sum[row]) * keep).store(into.sum + row, 1);
        into.max[row] = now;
    }
}

void attention(const AttentionArgs& args, const AttentionTask& task, const AttentionTask* next, AttentionState state,
               float* scratch) {
    const int64_t rows = task.num_queries * args.group, padded = round_up(args.head_size, W);
    const Scratch s = carve(scratch, rows, args.head_size);
    gather_queries(args, task, rows, s.queries);
    const int64_t whole_rows = round_up(rows, 16);
    float* more = reinterpret_cast<float*>(s.value_rows + kKeyTile);
    const AttentionState part = {more + 2 * whole_rows, more, more + whole_rows};
    Places after;
    for (int64_t begin = task.key_begin; begin < task.key_end; begin += kSegment) {
        const int64_t end = smaller(begin + kSegment, task.key_end);
        after.count = 0;
        if (end < task.key_end)
            locate(args, task, end, task.key_end, after);
        else if (next)
            locate(args, *next, next->key_begin, next->key_end, after);
        attend_segment(args, task, begin, end, after, s, begin == task.key_begin ? state : part);
        if (begin > task.key_begin) merge(state, part, rows, padded);
    }
}

void finish(AttentionState state, const AttentionArgs& args, const AttentionTask& task, float* out, int64_t stride_t,
            int64_t stride_h) {
    const int64_t padded = round_up(args.head_size, W);
    for (int64_t row = 0; row < task.num_queries * args.group; row++) {
        const int64_t query = task.query + row / args.group, head = task.kv_head * args.group + row % args.group;
        Vec sum = Vec::broadcast(state.sum[row]);
        // A sink far above every score makes this infinite, and the weights of all keys zero, as intended.
        if (args.sinks) sum = sum + exp(Vec::broadcast(args.sinks[head] - state.max[row]));
        const Vec share = Vec::broadcast(1.0f) / sum;
        float* to = out + query * stride_t + head * stride_h;
        for (int64_t d = 0; d < args.head_size; d += W)
            (Vec::load(state.values + row * padded + d) * share).store(to + d, lanes(args.head_size - d));
    }
}
