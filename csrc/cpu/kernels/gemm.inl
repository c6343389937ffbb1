// Linear layers over packed panels of 16 output columns: float32, bfloat16 or float16 weights.

// W rows by W columns at a time: transposed in registers, and stored column by column.
void pack_tile(const float* x, int64_t stride, int64_t rows, int64_t k, float* to) {
    alignas(64) float turned[W * W];
    for (int64_t row = 0; row < rows; row += W) {
        const int num = lanes(rows - row);
        const float* from = x + row * stride;
        for (int64_t column = 0; column < k; column += W) {
            const int columns = lanes(k - column);
            Vec square[W];
            for (int i = 0; i < W; i++) square[i] = i < num ? Vec::load(from + i * stride + column, columns) : Vec::zero();
            transpose_square(square, turned, W, W);
            for (int c = 0; c < columns; c++) Vec::load(turned + c * W).store(to + (column + c) * rows + row, num);
        }
    }
}

// c [MR, NP panels] (+)= a [kc][MR] . b, one fused chain per element in the order of k. The chain starts at zero, with `resume`
// at c: splitting K does not change the sum. Bias, if any, is added after the chain. Meanwhile memory at `coming` of each panel
// is prefetched, `step` bytes more with each k.
template <class Type, int MR, int NP>
void linear_tile(const float* a, const void* weights, int64_t panel_stride, int64_t kc, float* c, int64_t ldc, bool resume,
                 const float* bias, const char* coming, int64_t step) {
    using Stored = typename Type::Element;
    constexpr int NV = NP * kVecsPerPanel;
    const auto* b = static_cast<const Stored*>(weights);
    Vec acc[MR][NV];
    ONELOOP_UNROLL
    for (int i = 0; i < MR; i++) {
        ONELOOP_UNROLL
        for (int j = 0; j < NV; j++) acc[i][j] = resume ? Vec::load(c + i * ldc + j * W) : Vec::zero();
    }
    for (int64_t k = 0; k < kc; k++) {
        Vec row[NV];
        ONELOOP_UNROLL
        for (int p = 0; p < NP; p++) prefetch(coming + p * panel_stride * sizeof(Stored));
        coming += step;
        ONELOOP_UNROLL
        for (int j = 0; j < NV; j++) row[j] = Type::load(b + (j / kVecsPerPanel) * panel_stride + (j % kVecsPerPanel) * W);
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) {
            Vec x = Vec::broadcast(a[i]);
            if (NV > 1) x.pin();
            ONELOOP_UNROLL
            for (int j = 0; j < NV; j++) acc[i][j] = Vec::fma(x, row[j], acc[i][j]);
        }
        a += MR;
        b += kPanel;
    }
    ONELOOP_UNROLL
    for (int j = 0; j < NV; j++) {
        Vec shift = bias ? Vec::load(bias + j * W) : Vec::zero();
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) (bias ? acc[i][j] + shift : acc[i][j]).store(c + i * ldc + j * W);
    }
}

using LinearTile = void (*)(const float*, const void*, int64_t, int64_t, float*, int64_t, bool, const float*, const char*, int64_t);

template <class Type, int NP, int MR>
struct TileTable {
    static void fill(LinearTile* table) {
        table[MR] = linear_tile<Type, MR, NP>;
        TileTable<Type, NP, MR - 1>::fill(table);
    }
};
template <class Type, int NP>
struct TileTable<Type, NP, 0> {
    static void fill(LinearTile*) {}
};

// Registers hold MR * NV sums, NV vectors of the weight and one of x. Rows share loaded weights; more panels keep more loads in
// flight. Many rows take two panels (or one, with few registers), and few rows four.
constexpr int kTileRows = W == kPanel ? 14 : W == 8 ? 6 : Vec::kRegisters == 32 ? 6 : 2;
constexpr int kFourPanelRows = W == kPanel ? 7 : W == 8 ? 1 : 0;
constexpr int kTwoPanelRows = W == kPanel ? 14 : W == 8 ? 2 : 0;

template <class Type>
struct LinearTiles {
    LinearTile one[kTileRows + 1], two[kTileRows + 1], four[kTileRows + 1];
    LinearTiles() {
        TileTable<Type, 1, kTileRows>::fill(one);
        TileTable<Type, 2, kTwoPanelRows>::fill(two);
        TileTable<Type, 4, kFourPanelRows>::fill(four);
    }
};

// Depth of K per pass when a panel meets several tiles of rows. Few tiles: small, so that prefetching the next part of the weight
// overlaps with multiplying this one. Many tiles: large, since they are compute-bound.
constexpr int64_t kFewTiles = 8, kFewTilesDepth = 64, kManyTilesDepth = 384;
// Prefetch distance in bytes: lines arrive in time, also across a page border, where the hardware prefetcher stops.
constexpr int64_t kAhead = 2048;

// All tiles of rows against `num` panels from `panel` on, writing to c (column 0 = the first column of `panel`).
template <class Type>
void linear_panels(const LinearArgs& args, int64_t panel, int num, float* c, int64_t ldc) {
    static const LinearTiles<Type> tiles;
    const LinearTile* table = num == 1 ? tiles.one : num == 2 ? tiles.two : tiles.four;
    const auto* w = static_cast<const typename Type::Element*>(args.w) + panel * args.k * kPanel;
    const float* bias = args.bias ? args.bias + panel * kPanel : nullptr;
    const int64_t most = args.rows.num_tiles <= kFewTiles ? kFewTilesDepth : kManyTilesDepth;
    const int64_t pieces = args.rows.num_tiles == 1 ? 1 : (args.k + most - 1) / most;
    const int64_t depth = (args.k + pieces - 1) / pieces;
    constexpr int64_t kLine = kPanel * sizeof(typename Type::Element);  // of one k
    for (int64_t k = 0; k < args.k; k += depth) {
        const int64_t kc = smaller(depth, args.k - k);
        const char* now = reinterpret_cast<const char*>(w + k * kPanel);
        // Few tiles share the prefetch of the next part evenly: the first one alone would wait for it.
        const bool shared = pieces > 1 && args.rows.num_tiles <= kFewTiles;
        const int64_t step = shared ? kLine / args.rows.num_tiles : kLine;
        const char* coming = !shared           ? now + kAhead
                             : k + kc < args.k ? now + kc * kLine
                                               : reinterpret_cast<const char*>(w + num * args.k * kPanel);
        for (int64_t t = 0; t < args.rows.num_tiles; t++) {
            const int64_t row = args.rows.row_start[t], rows = args.rows.row_start[t + 1] - row;
            table[rows](args.rows.data + row * args.k + k * rows, now, args.k * kPanel, kc, c + row * ldc, ldc, k > 0,
                        k + kc == args.k ? bias : nullptr, coming, step);
            coming += shared ? kc * step : 0;
        }
    }
}

// A last panel with fewer than kPanel columns: computed whole, tile by tile, then its real columns copied.
template <class Type>
void linear_ragged_panel(const LinearArgs& args, int64_t panel) {
    float whole[kTileRows * kPanel];
    const int64_t columns = args.n - panel * kPanel;
    for (int64_t t = 0; t < args.rows.num_tiles; t++) {
        LinearArgs tile = args;
        const int64_t row = args.rows.row_start[t], rows = args.rows.row_start[t + 1] - row;
        const int64_t starts[2] = {0, rows};
        tile.rows = {args.rows.data + row * args.k, starts, 1};
        linear_panels<Type>(tile, panel, 1, whole, kPanel);
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++) args.out[(row + i) * args.ld_out + panel * kPanel + j] = whole[i * kPanel + j];
    }
}

template <class Type>
void linear_of(const LinearArgs& args) {
    int64_t rows = 0;
    for (int64_t t = 0; t < args.rows.num_tiles; t++) {
        const int64_t here = args.rows.row_start[t + 1] - args.rows.row_start[t];
        rows = here > rows ? here : rows;
    }
    const int widest = rows <= kFourPanelRows ? 4 : rows <= kTwoPanelRows ? 2 : 1;
    const int64_t whole_end = smaller(args.panel_end, args.n / kPanel);
    int64_t panel = args.panel_begin;
    for (int num = widest; num > 0; num /= 2)
        for (; panel + num <= whole_end; panel += num)
            linear_panels<Type>(args, panel, num, args.out + panel * kPanel, args.ld_out);
    for (; panel < args.panel_end; panel++) linear_ragged_panel<Type>(args, panel);
}

void linear(const LinearArgs& args) {
    switch (args.element) {
        case Element::kFloat32: return linear_of<Float32>(args);
        case Element::kBFloat16: return linear_of<BFloat16>(args);
        case Element::kFloat16: return linear_of<Float16>(args);
        case Element::kInt8: return linear_of<Int8>(args);
    }
}

// NUM interleaved chains, each equal to `linear_tile`'s of one row and one panel.
template <class Type, int NUM>
void one_rows_together(const OneRow* rows, int64_t k) {
    using Stored = typename Type::Element;
    constexpr int kAhead = 2048 / sizeof(Stored);
    Vec acc[NUM][kVecsPerPanel];
    const float* x[NUM];
    const Stored* b[NUM];
    ONELOOP_UNROLL
    for (int i = 0; i < NUM; i++) {
        x[i] = rows[i].x, b[i] = static_cast<const Stored*>(rows[i].panel);
        ONELOOP_UNROLL
        for (int j = 0; j < kVecsPerPanel; j++) acc[i][j] = Vec::zero();
    }
    for (int64_t c = 0; c < k; c++) {
        ONELOOP_UNROLL
        for (int i = 0; i < NUM; i++) {
            if (c * kPanel * sizeof(Stored) % 64 == 0) prefetch(b[i] + c * kPanel + kAhead);
            const Vec value = Vec::broadcast(x[i][c]);
            ONELOOP_UNROLL
            for (int j = 0; j < kVecsPerPanel; j++) acc[i][j] = Vec::fma(value, Type::load(b[i] + c * kPanel + j * W), acc[i][j]);
        }
    }
    ONELOOP_UNROLL
    for (int i = 0; i < NUM; i++) {
        ONELOOP_UNROLL
        for (int j = 0; j < kVecsPerPanel; j++) acc[i][j].store(rows[i].out + j * W);
    }
}

template <class Type>
void one_rows_of(const OneRow* rows, int64_t count, int64_t k) {
    constexpr int kMost = kVecsPerPanel == 1 ? 8 : 4;
    int64_t i = 0;
    for (; i + kMost <= count; i += kMost) one_rows_together<Type, kMost>(rows + i, k);
    for (; i + 2 <= count; i += 2) one_rows_together<Type, 2>(rows + i, k);
    for (; i < count; i++) one_rows_together<Type, 1>(rows + i, k);
}

void one_rows(const OneRow* rows, int64_t count, Element element, int64_t k) {
    switch (element) {
        case Element::kFloat32: return one_rows_of<Float32>(rows, count, k);
        case Element::kBFloat16: return one_rows_of<BFloat16>(rows, count, k);
        case Element::kFloat16: return one_rows_of<Float16>(rows, count, k);
        case Element::kInt8: return one_rows_of<Int8>(rows, count, k);
    }
}

// NUM adjacent panels, the last of which may have fewer than kPanel columns in `out`.
template <class Type, int NUM>
void add_panels(const float* x, const typename Type::Element* b, int64_t k, float* out, int64_t n) {
    Vec acc[NUM][kVecsPerPanel];
    ONELOOP_UNROLL
    for (int p = 0; p < NUM; p++) {
        ONELOOP_UNROLL
        for (int j = 0; j < kVecsPerPanel; j++) acc[p][j] = Vec::zero();
    }
    for (int64_t c = 0; c < k; c++) {
        const Vec value = Vec::broadcast(x[c]);
        ONELOOP_UNROLL
        for (int p = 0; p < NUM; p++) {
            ONELOOP_UNROLL
            for (int j = 0; j < kVecsPerPanel; j++)
                acc[p][j] = Vec::fma(value, Type::load(b + (p * k + c) * kPanel + j * W), acc[p][j]);
        }
    }
    ONELOOP_UNROLL
    for (int p = 0; p < NUM; p++) {
        ONELOOP_UNROLL
        for (int j = 0; j < kVecsPerPanel; j++) {
            const int64_t column = p * kPanel + j * W;
            if (column >= n) return;
            const int here = lanes(n - column);
            (Vec::load(out + column, here) + acc[p][j]).store(out + column, here);
        }
    }
}

template <class Type>
void add_one_row_of(const float* x, const void* panels, int64_t k, float* out, int64_t n) {
    using Stored = typename Type::Element;
    constexpr int kMost = kVecsPerPanel == 1 ? 8 : kVecsPerPanel == 2 ? 4 : 1;
    constexpr int64_t kAhead = 8192;  // bytes: what comes after the next panels but one
    const auto* b = static_cast<const Stored*>(panels);
    const int64_t step = k * kPanel, num = (n + kPanel - 1) / kPanel;
    int64_t panel = 0;
    for (; panel + kMost <= num; panel += kMost, b += kMost * step) {
        const char* next = reinterpret_cast<const char*>(b) + kAhead;
        for (int64_t byte = 0; byte < kMost * step * static_cast<int64_t>(sizeof(Stored)); byte += 64) prefetch(next + byte);
        add_panels<Type, kMost>(x, b, k, out + panel * kPanel, n - panel * kPanel);
    }
    for (; panel < num; panel++, b += step) add_panels<Type, 1>(x, b, k, out + panel * kPanel, n - panel * kPanel);
}

void add_one_row(const float* x, const void* panels, Element element, int64_t k, float* out, int64_t n) {
    switch (element) {
        case Element::kFloat32: return add_one_row_of<Float32>(x, panels, k, out, n);
        case Element::kBFloat16: return add_one_row_of<BFloat16>(x, panels, k, out, n);
        case Element::kFloat16: return add_one_row_of<Float16>(x, panels, k, out, n);
        case Element::kInt8: return add_one_row_of<Int8>(x, panels, k, out, n);
    }
}
