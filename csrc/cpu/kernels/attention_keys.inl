// Keys and values of attention: their place in the paged cache, and their conversion to float32 rows.

constexpr int kKeyVecs = kKeyTile / W;
constexpr int kScoreVecs = W == kPanel ? 4 : W == 8 ? 2 : 2;   // columns of a score or value tile, in registers
constexpr int kScoreRows = W == kPanel ? 6 : W == 8 ? 6 : Vec::kRegisters == 32 ? 8 : 4;
constexpr float kLowest = -3.402823466e38f;

struct Scratch {
    float* queries;  // [rows / kScoreRows][head_size][kScoreRows], scaled
    float* keys;     // [head_size][kKeyTile]: transposed, so that a row of it is one dim of every key
    float* values;   // [kKeyTile][padded head]
    float* scores;   // [kScoreRows][kKeyTile]
    float* decay;    // [kScoreRows]: by how much earlier values shrink
    float* sums;     // [rows][W]
    const float** value_rows;
};

Scratch carve(float* scratch, int64_t rows, int64_t head_size) {
    const int64_t padded = round_up(head_size, 16), whole_rows = round_up(rows, 16);
    Scratch s;
    s.queries = scratch;
    s.keys = s.queries + whole_rows * padded;
    s.values = s.keys + padded * kKeyTile;
    s.scores = s.values + padded * kKeyTile;
    s.decay = s.scores + 16 * kKeyTile;
    s.sums = s.decay + 16;
    s.value_rows = reinterpret_cast<const float**>(s.sums + whole_rows * 16);
    return s;
}

void gather_queries(const AttentionArgs& args, const AttentionTask& task, int64_t rows, float* to) {
    for (int64_t row = 0; row < rows; row++) {
        const int64_t tile = row / kScoreRows * kScoreRows, width = smaller(kScoreRows, rows - tile);
        const int64_t query = task.query + row / args.group, head = task.kv_head * args.group + row % args.group;
        const float* from = args.q + query * args.q_stride_t + head * args.q_stride_h;
        float* column = to + tile * args.head_size + (row - tile);
        for (int64_t d = 0; d < args.head_size; d++) column[d * width] = from[d] * args.scale;
    }
}

// Offset of each key of a tile and of its value, in elements from the start of their cache.
struct Places {
    int64_t first, count;
    int64_t key[kKeyTile], value[kKeyTile];
};

// The tile from position `first` on, cut at `end`. Counts positions instead of dividing for each key.
void locate(const AttentionArgs& args, const AttentionTask& task, int64_t first, int64_t end, Places& places) {
    places.first = first;
    places.count = first < end ? smaller(kKeyTile, end - first) : 0;
    int64_t block = first / args.block_size, inside = first % args.block_size;
    for (int64_t i = 0; i < places.count; block++, inside = 0) {
        const int64_t id = task.block_table[block];
        const int64_t key = id * args.k_stride_b + task.kv_head * args.k_stride_h;
        const int64_t value = id * args.v_stride_b + task.kv_head * args.v_stride_h;
        for (; inside < args.block_size && i < places.count; inside++, i++) {
            places.key[i] = key + inside * args.k_stride_s;
            places.value[i] = value + inside * args.v_stride_s;
        }
    }
    // The last tile is padded with its last key; a mask removes the copies.
    for (int64_t i = places.count; places.count > 0 && i < kKeyTile; i++) places.key[i] = places.key[places.count - 1];
}

// Lines of the next tile, prefetched a few at a time between the multiplications of the current one. Prefetching all at once
// would fill the queue and delay other loads.
struct Fetcher {
    const char* rows[2 * kKeyTile];
    int64_t row = 0, num_rows = 0, byte = 0, row_bytes = 0;

    void aim(const AttentionArgs& args, const Places& places) {
        const int64_t size = oneloop::element_bytes(args.type);
        for (int64_t i = 0; i < places.count; i++) {
            rows[i] = static_cast<const char*>(args.k_cache) + places.key[i] * size;
            rows[places.count + i] = static_cast<const char*>(args.v_cache) + places.value[i] * size;
        }
        row = byte = 0;
        num_rows = 2 * places.count;
        row_bytes = oneloop::line_elements(args.type, args.head_size) * size;
    }

    void fetch(int lines) {
        for (; lines > 0 && row < num_rows; lines--) {
            prefetch_far(rows[row] + byte);
            byte += 64;
            if (byte >= row_bytes) byte = 0, row++;
        }
    }
};

// A line of the cache, as float32.
template <typename Type>
struct Line {
    const typename Type::Element* numbers;
    Line(const typename Type::Element* line, int64_t) : numbers(line) {}
    Vec load(int64_t d) const { return Type::load(numbers + d); }
    Vec load(int64_t d, int n) const { return Type::load(numbers + d, n); }
};
template <>
struct Line<Int8> {
    const int8_t* numbers;
    float scale;
    Line(const int8_t* line, int64_t head_size) : numbers(line) { __builtin_memcpy(&scale, line + head_size, sizeof scale); }
    Vec load(int64_t d) const { return Vec::load_int8(numbers + d) * Vec::broadcast(scale); }
    Vec load(int64_t d, int n) const { return Vec::load_int8(numbers + d, n) * Vec::broadcast(scale); }
};

// The keys of a tile, transposed.
template <typename Type>
void gather_keys(const AttentionArgs& args, const Places& places, Fetcher& coming, float* to) {
    const auto* cache = static_cast<const typename Type::Element*>(args.k_cache);
    for (int64_t group = 0; group < kKeyTile && group < places.count; group += W) {
        const int64_t* place = places.key + group;
        Vec square[W];
        int64_t d = 0;
        for (; d + W <= args.head_size; d += W) {
            ONELOOP_UNROLL
            for (int i = 0; i < W; i++) square[i] = Line<Type>(cache + place[i], args.head_size).load(d);
            transpose_square(square, to + d * kKeyTile + group, kKeyTile, W);
            coming.fetch(8);
        }
        if (d == args.head_size) continue;
        const int n = lanes(args.head_size - d);
        for (int i = 0; i < W; i++) square[i] = Line<Type>(cache + place[i], args.head_size).load(d, n);
        transpose_square(square, to + d * kKeyTile + group, kKeyTile, n);
    }
}

// Address of each key's value as float32: in the cache itself if it is float32, else in a copy.
template <typename Type>
void gather_values(const AttentionArgs& args, const Places& places, const Scratch& s) {
    const auto* cache = static_cast<const typename Type::Element*>(args.v_cache);
    if (args.type == CacheType::kFloat32 && args.head_size % W == 0) {
        for (int64_t i = 0; i < places.count; i++) s.value_rows[i] = static_cast<const float*>(args.v_cache) + places.value[i];
        return;
    }
    const int64_t padded = round_up(args.head_size, W);
    for (int64_t i = 0; i < places.count; i++) {
        const Line<Type> from(cache + places.value[i], args.head_size);
        float* to = s.values + i * padded;
        int64_t d = 0;
        for (; d + W <= args.head_size; d += W) from.load(d).store(to + d);
        if (d < args.head_size) from.load(d, lanes(args.head_size - d)).store(to + d);
        s.value_rows[i] = to;
    }
}

template <typename Type>
void gather(const AttentionArgs& args, const Places& places, Fetcher& coming, const Scratch& s) {
    gather_keys<Type>(args, places, coming, s.keys);
    gather_values<Type>(args, places, s);
}
