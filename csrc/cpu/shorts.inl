// The kernels for numbers of sixteen bits. Included by quants.inl.

// c [MR, its columns] = the tile's rows times NP panels. NV registers of columns share what is loaded of the rows: of several
// panels where a register is as wide as one. Meanwhile `lines` lines a block are asked for, from `coming` on.
template <int MR, int NP>
void short_tile(const uint8_t* panels, int64_t blocks, const uint8_t* tile, const float* bias, float* c, int64_t ldc,
                const uint8_t* coming, int64_t lines) {
    constexpr int NV = W == kPanel ? NP : 2;
    const int64_t panel_bytes = blocks * kShortBlockBytes;
    for (int from = 0; from < NP * kPanel; from += NV * W) {
        Vec acc[MR][NV];
        ONELOOP_UNROLL
        for (int i = 0; i < MR; i++) {
            ONELOOP_UNROLL
            for (int j = 0; j < NV; j++) acc[i][j] = Vec::zero();
        }
        const uint8_t* w[NV];
        ONELOOP_UNROLL
        for (int j = 0; j < NV; j++) {
            const int column = from + j * W;
            w[j] = panels + column / kPanel * panel_bytes + column % kPanel * 2 * static_cast<int64_t>(sizeof(int16_t));
        }
        const uint8_t* rows = tile;
        for (int64_t block = 0; block < blocks; block++, rows += MR * kShortRowBytes) {
            for (int64_t line = 0; line < lines; line++, coming += 64) prefetch_far(coming);
            Ints sums[MR][NV];
            ONELOOP_UNROLL
            for (int i = 0; i < MR; i++) {
                ONELOOP_UNROLL
                for (int j = 0; j < NV; j++) sums[i][j] = Ints::zero();
            }
            ONELOOP_UNROLL
            for (int pair = 0; pair < kBlock / 2; pair++) {
                Bytes weights[NV];
                ONELOOP_UNROLL
                for (int j = 0; j < NV; j++) weights[j] = Bytes::load(w[j] + pair * kPanel * 4);
                ONELOOP_UNROLL
                for (int i = 0; i < MR; i++) {
                    Ints two = Ints::broadcast_from(rows + (i * kBlock + pair * 2) * static_cast<int64_t>(sizeof(int16_t)));
                    ONELOOP_UNROLL
                    for (int j = 0; j < NV; j++) sums[i][j] = dot_shorts(sums[i][j], weights[j], two);
                }
            }
            const auto* scales = reinterpret_cast<const float*>(rows + MR * kBlock * sizeof(int16_t));
            Vec d[NV];
            ONELOOP_UNROLL
            for (int j = 0; j < NV; j++)
                d[j] = Vec::load(reinterpret_cast<const float*>(w[j] - (from + j * W) % kPanel * 4 + kPanel * kBlock * 2) +
                                 (from + j * W) % kPanel);
            ONELOOP_UNROLL
            for (int i = 0; i < MR; i++) {
                const Vec scale = Vec::broadcast(scales[i]);
                ONELOOP_UNROLL
                for (int j = 0; j < NV; j++) acc[i][j] = Vec::fma(sums[i][j].floats() * scale, d[j], acc[i][j]);
            }
            ONELOOP_UNROLL
            for (int j = 0; j < NV; j++) w[j] += kShortBlockBytes;
        }
        ONELOOP_UNROLL
        for (int j = 0; j < NV; j++) {
            const Vec shift = bias ? Vec::load(bias + from + j * W) : Vec::zero();
            ONELOOP_UNROLL
            for (int i = 0; i < MR; i++) (bias ? acc[i][j] + shift : acc[i][j]).store(c + i * ldc + from + j * W);
        }
    }
}

using ShortTile = void (*)(const uint8_t*, int64_t, const uint8_t*, const float*, float*, int64_t, const uint8_t*, int64_t);

// Of a tile: sums and results of two registers of columns for each, beside two of weights and one of x.
constexpr int kShortRows = Vec::kRegisters == 32 ? 6 : 3;
constexpr int kShortPanels = W == kPanel ? 2 : 1;

template <int NP, int MR>
struct ShortTileTable {
    static void fill(ShortTile* table) {
        table[MR] = short_tile<MR, NP>;
        ShortTileTable<NP, MR - 1>::fill(table);
    }
};
template <int NP>
struct ShortTileTable<NP, 0> {
    static void fill(ShortTile*) {}
};

struct ShortTiles {
    ShortTile one[kShortRows + 1], most[kShortRows + 1];
    ShortTiles() {
        ShortTileTable<1, kShortRows>::fill(one);
        ShortTileTable<kShortPanels, kShortRows>::fill(most);
    }
};

void short_linear(const ShortArgs& args) {
    static const ShortTiles tiles;
    float ragged[kShortRows * kPanel];
    const int64_t panel_bytes = args.blocks * kShortBlockBytes;
    for (int64_t panel = args.panel_begin, num; panel < args.panel_end; panel += num) {
        num = panel + kShortPanels <= args.panel_end && (panel + kShortPanels) * kPanel <= args.n ? kShortPanels : 1;
        const ShortTile* table = num == kShortPanels ? tiles.most : tiles.one;
        const float* bias = args.bias ? args.bias + panel * kPanel : nullptr;
        const int64_t columns = args.n - panel * kPanel;
        // What comes next is fetched while this is multiplied, evenly: asked for by the first tile alone it would be waited for.
        const uint8_t* weights = args.w + panel * panel_bytes;
        const int64_t left = (args.n + kPanel - 1) / kPanel - panel - num, next = left < num ? left : num;
        const int64_t lines = (next * kShortBlockBytes / 64 + args.rows.num_tiles - 1) / args.rows.num_tiles;
        const uint8_t* coming = weights + num * panel_bytes;
        for (int64_t t = 0; t < args.rows.num_tiles; t++) {
            const int64_t row = args.rows.row_start[t], rows = args.rows.row_start[t + 1] - row;
            const uint8_t* tile = args.rows.data + row * args.blocks * kShortRowBytes;
            float* c = args.out + row * args.ld_out + panel * kPanel;
            if (columns >= kPanel) {
                table[rows](weights, args.blocks, tile, bias, c, args.ld_out, coming + t * args.blocks * lines * 64, lines);
                continue;
            }
            tiles.one[rows](weights, args.blocks, tile, bias, ragged, kPanel, coming, 0);
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < columns; j++) c[i * args.ld_out + j] = ragged[i * kPanel + j];
        }
    }
}

// The largest of a block becomes kShortMost. Of blocks under 1e-30, and of those with a NaN or an infinity, as in round_row.
void round_short_row(const float* x, int64_t k, int64_t tile_rows, int64_t row, uint8_t* tile) {
    constexpr float kMost = oneloop::kShortMost;
    for (int64_t at = 0; at < k; at += kBlock, tile += tile_rows * kShortRowBytes) {
        Vec value[kBlock / W], most = Vec::zero(), poison = Vec::zero();
        ONELOOP_UNROLL
        for (int j = 0; j < kBlock / W; j++) {
            const int64_t left = k - at - j * W;
            value[j] = left >= W  ? Vec::load(x + at + j * W)
                       : left > 0 ? Vec::load(x + at + j * W, static_cast<int>(left))
                                  : Vec::zero();
            most = Vec::max(most, Vec::max(value[j], Vec::zero() - value[j]));
            poison = Vec::fma(value[j], Vec::zero(), poison);
        }
        const float largest = most.largest();
        const Vec inverse = Vec::broadcast(largest > 1e-30f ? kMost / largest : 0.0f);
        ONELOOP_UNROLL
        for (int j = 0; j < kBlock / W; j++)
            store_shorts(Vec::round(value[j] * inverse), tile + (row * kBlock + j * W) * static_cast<int64_t>(sizeof(int16_t)));
        const float scale = largest / kMost + poison.sum();
        __builtin_memcpy(
            tile + tile_rows * kBlock * static_cast<int64_t>(sizeof(int16_t)) + row * static_cast<int64_t>(sizeof(float)), &scale,
            sizeof scale);
    }
}
