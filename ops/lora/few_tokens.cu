// Adapters of a few tokens: out += scale (x A^T) B^T, by two kernels that take the time of reading A and B once.
//
// A tile is up to 16 tokens of one adapter (triton_index.py). Each matrix instruction processes a whole tile, and its operands are
// in memory as lanes read them, 8 or 16 bytes at a time, so that no value ever changes lanes. A and B are requested before the
// kernel that computes x or the weight's own output has ended; then its results are requested all at once. So a program
// waits for memory twice, once in parallel with other work.
//
// slots: a [PARTS * RANK, K], b [N, RANK], scale [PARTS] float32 of each, `stride` apart, in units of 16 bytes (of 4 for scale).
// h [pieces, T as sorted, PARTS * RANK] float32: the sums over a piece of K.

constexpr int WARPS = 4;

struct Tile {
  int slot, first, end;  // -1: tokens without an adapter; positions in the sorted order
  bool is_there;
};

// For `used[which]` tiles. A block without a tile may end at once, except the first, which waits: otherwise the next kernel would
// consider the predecessors finished.
__device__ __forceinline__ Tile tile_of(const int* tiles, int num_tiles, const int* used, int which) {
  const int number = blockIdx.y;
  Tile tile = {tiles[number], tiles[num_tiles + number], tiles[2 * num_tiles + number], number < used[which]};
  tile.end = min(tile.end, tile.first + 16);
  if (!tile.is_there && blockIdx.x + blockIdx.y == 0) wait_for_previous();
  return tile;
}

// Sixteen ranks of one piece of K: blockIdx.x is rank group + groups * piece. A warp has CHUNKS * 32 columns.
template <int CHUNKS>
__device__ __forceinline__ void shrink(const u16* x, int stride_x, const u16* a, int stride, const int* order, const int* tiles,
                                       const int* used, float* h, int num_tokens, int num_tiles, int groups, int K) {
  __shared__ float sums[WARPS][2][4][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int group = blockIdx.x % groups, piece = blockIdx.x / groups;
  let_next_start();
  const Tile tile = tile_of(tiles, num_tiles, used, 0);
  if (!tile.is_there) return;
  const int begin = (piece * WARPS + warp) * CHUNKS * 32 + t * 8;
  const u16* rows = a + long(tile.slot) * stride * 8 + long(group * 16 + g) * K + begin;
  Vec upper[CHUNKS], lower[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    upper[c] = lower[c] = Vec{};
    if (begin + c * 32 < K) upper[c] = load(rows + c * 32), lower[c] = load(rows + 8 * K + c * 32);
  }
  // Tokens past the tile's last repeat it: their sums are not kept.
  const u16* some = x + long(order[min(tile.first + g, tile.end - 1)]) * stride_x + begin;
  const u16* others = x + long(order[min(tile.first + g + 8, tile.end - 1)]) * stride_x + begin;
  const bool is_half = tile.end - tile.first <= 8;
  wait_for_previous();

  float sum[2][4] = {};
  Vec v[CHUNKS], w[CHUNKS];
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    v[c] = w[c] = Vec{};
    if (begin + c * 32 < K) {
      v[c] = load(some + c * 32);
      if (!is_half) w[c] = load(others + c * 32);
    }
  }
#pragma unroll
  for (int c = 0; c < CHUNKS; c++)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const u32 *p = v[c].word, *q = w[c].word;
      mma(sum[0], p[i], q[i], p[i + 1], q[i + 1], upper[c].word[i], upper[c].word[i + 1]);
      mma(sum[1], p[i], q[i], p[i + 1], q[i + 1], lower[c].word[i], lower[c].word[i + 1]);
    }
#pragma unroll
  for (int i = 0; i < 8; i++) sums[warp][i / 4][i % 4][lane] = sum[i / 4][i % 4];
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += WARPS * 32) {
    const int row = i / 16, rank = i % 16, from = row % 8 * 4 + rank % 8 / 2, c = row / 8 * 2 + rank % 2;
    float total = 0.f;
#pragma unroll
    for (int other = 0; other < WARPS; other++) total += sums[other][rank / 8][c][from];
    const int place = tile.first + row;
    if (place < tile.end) h[((long(piece) * num_tokens + place) * groups + group) * 16 + rank] = total;
  }
}

// The left operands of a tile for RANK ranks of one part, from rank group `group` on: rows g and g + 8 of h, added up and scaled.
// The ranks of a lane's four words are 4 t to 4 t + 3 of each sixteen.
template <int RANK>
__device__ __forceinline__ void load_left(u32 (&left)[RANK / 16][4], const float* h, const Tile& tile, float scale, int num_tokens,
                                          int groups, int group, int pieces) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool is_half = tile.end - tile.first <= 8;
  const long step = long(num_tokens) * groups * 16;
  const float* some = h + (long(min(tile.first + g, tile.end - 1)) * groups + group) * 16 + t * 4;
  const float* others = h + (long(min(tile.first + g + 8, tile.end - 1)) * groups + group) * 16 + t * 4;
#pragma unroll
  for (int k = 0; k < RANK / 16; k++) {
    float4 p = {}, q = {};
#pragma unroll 4
    for (int piece = 0; piece < pieces; piece++) {
      const float4 more = *reinterpret_cast<const float4*>(some + piece * step + k * 16);
      p.x += more.x, p.y += more.y, p.z += more.z, p.w += more.w;
      if (!is_half) {
        const float4 m = *reinterpret_cast<const float4*>(others + piece * step + k * 16);
        q.x += m.x, q.y += m.y, q.z += m.z, q.w += m.w;
      }
    }
    left[k][0] = pack(p.x * scale, p.y * scale), left[k][2] = pack(p.z * scale, p.w * scale);
    left[k][1] = pack(q.x * scale, q.y * scale), left[k][3] = pack(q.z * scale, q.w * scale);
  }
}

// Thirty-two columns of B. A lane's sums are eight adjacent ones, 8 t to 8 t + 7: matrix instruction j has two of each eight.
template <int RANK>
struct Right {
  uint2 word[4][RANK / 16];

  __device__ __forceinline__ void fetch(const u16* b, int column, int end) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int n = column + g / 2 * 8 + 2 * j + g % 2;
#pragma unroll
      for (int k = 0; k < RANK / 16; k++)
        word[j][k] = n < end ? *reinterpret_cast<const uint2*>(b + long(n) * RANK + k * 16 + t * 4) : uint2{};
    }
  }

  // sum[row half][column of eight]
  __device__ __forceinline__ void multiply(float (&sum)[2][8], const u32 (&left)[RANK / 16][4]) const {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float d[4] = {};
#pragma unroll
      for (int k = 0; k < RANK / 16; k++) mma(d, left[k][0], left[k][1], left[k][2], left[k][3], word[j][k].x, word[j][k].y);
      sum[0][2 * j] = d[0], sum[0][2 * j + 1] = d[1], sum[1][2 * j] = d[2], sum[1][2 * j + 1] = d[3];
    }
  }
};

__device__ __forceinline__ void add(float (&values)[8], const Vec& given) {
#pragma unroll
  for (int i = 0; i < 4; i++) values[2 * i] += low(given.word[i]), values[2 * i + 1] += high(given.word[i]);
}

__device__ __forceinline__ Vec packed(const float (&values)[8]) {
  return Vec{{pack(values[0], values[1]), pack(values[2], values[3]), pack(values[4], values[5]), pack(values[6], values[7])}};
}

// blocks [3, gridDim.x]: the part, first column and end of each block's columns, of which a warp has BLOCKS times 32.
// out [T, N] += ...
template <int RANK, int BLOCKS>
__device__ __forceinline__ void expand(const float* h, const u16* b, int stride, const float* scales, int stride_scale,
                                       const int* blocks, const int* order, const int* tiles, const int* used, u16* out, int N,
                                       int num_tokens, int num_tiles, int groups, int pieces) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  let_next_start();
  const Tile tile = tile_of(tiles, num_tiles, used, 0);
  if (!tile.is_there) return;
  const int part = blocks[blockIdx.x], end = blocks[2 * gridDim.x + blockIdx.x];
  const int column = blocks[gridDim.x + blockIdx.x] + warp * BLOCKS * 32;
  const float scale = scales[long(tile.slot) * stride_scale + part];
  const u16* matrix = b + long(tile.slot) * stride * 8;
  Right<RANK> right[BLOCKS];
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) right[i].fetch(matrix, column + i * 32, end);
  const int places[2] = {tile.first + g, tile.first + g + 8};
  long rows[2];
#pragma unroll
  for (int i = 0; i < 2; i++) rows[i] = long(order[min(places[i], tile.end - 1)]) * N;
  wait_for_previous();
  if (scale == 0.f) return;  // the adapter does not change this part

  Vec given[BLOCKS][2];
#pragma unroll
  for (int i = 0; i < BLOCKS; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (places[half] < tile.end && column + i * 32 + t * 8 < end) given[i][half] = load(out + rows[half] + column + i * 32 + t * 8);
  u32 left[RANK / 16][4];
  load_left<RANK>(left, h, tile, scale, num_tokens, groups, part * (RANK / 16), pieces);
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) {
    float sum[2][8];
    right[i].multiply(sum, left);
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (places[half] < tile.end && column + i * 32 + t * 8 < end) {
        add(sum[half], given[i][half]);
        store(out + rows[half] + column + i * 32 + t * 8, packed(sum[half]));
      }
  }
}

// out [T, WIDTH] = silu(gate) up of gate_up [T, 2 WIDTH] plus adapters, for all tokens, including those without an adapter.
template <int RANK, int BLOCKS>
__device__ __forceinline__ void expand_gated(const float* h, const u16* b, int stride, const float* scales, int stride_scale,
                                             const int* order, const int* tiles, const int* used, const u16* gate_up, u16* out,
                                             int width, int num_tokens, int num_tiles, int pieces) {
  constexpr int GROUPS = RANK / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  let_next_start();
  const Tile tile = tile_of(tiles, num_tiles, used, 1);
  if (!tile.is_there) return;
  const int column = (blockIdx.x * WARPS + warp) * BLOCKS * 32, slot = max(tile.slot, 0);
  float scale[2] = {};
  Right<RANK> right[2][BLOCKS];
  if (tile.slot >= 0) {
    const u16* matrix = b + long(slot) * stride * 8;
#pragma unroll
    for (int part = 0; part < 2; part++) {
      scale[part] = scales[long(slot) * stride_scale + part];
#pragma unroll
      for (int i = 0; i < BLOCKS; i++)
        right[part][i].fetch(matrix + long(part) * width * RANK, column + i * 32, width);
    }
  }
  const int places[2] = {tile.first + g, tile.first + g + 8};
  long rows[2];
#pragma unroll
  for (int i = 0; i < 2; i++) rows[i] = order[min(places[i], tile.end - 1)];
  wait_for_previous();

  Vec given[2][BLOCKS][2];
#pragma unroll
  for (int part = 0; part < 2; part++)
#pragma unroll
    for (int i = 0; i < BLOCKS; i++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (places[half] < tile.end && column + i * 32 + t * 8 < width)
          given[part][i][half] = load(gate_up + (rows[half] * 2 + part) * width + column + i * 32 + t * 8);
  u32 left[2][GROUPS][4] = {};
#pragma unroll
  for (int part = 0; part < 2; part++)
    if (scale[part] != 0.f) load_left<RANK>(left[part], h, tile, scale[part], num_tokens, 2 * GROUPS, part * GROUPS, pieces);
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) {
    float gate[2][8] = {}, up[2][8] = {};
    if (scale[0] != 0.f) right[0][i].multiply(gate, left[0]);
    if (scale[1] != 0.f) right[1][i].multiply(up, left[1]);
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (places[half] < tile.end && column + i * 32 + t * 8 < width) {
        add(gate[half], given[0][i][half]);
        add(up[half], given[1][i][half]);
#pragma unroll
        for (int c = 0; c < 8; c++) {
          const float value = rounded(gate[half][c]);
          gate[half][c] = value / (1.f + __expf(-value)) * rounded(up[half][c]);
        }
        store(out + rows[half] * width + column + i * 32 + t * 8, packed(gate[half]));
      }
  }
}

#define SHRINK(NAME, CHUNKS)                                                                                             \
  extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                               \
      NAME(const u16* x, int stride_x, const u16* a, int stride, const int* order, const int* tiles, const int* used,    \
           float* h, int num_tokens, int num_tiles, int groups, int K) {                                                 \
    shrink<CHUNKS>(x, stride_x, a, stride, order, tiles, used, h, num_tokens, num_tiles, groups, K);                     \
  }
#define EXPAND(NAME, RANK, BLOCKS)                                                                                       \
  extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                               \
      NAME(const float* h, const u16* b, int stride, const float* scales, int stride_scale, const int* blocks,           \
           const int* order, const int* tiles, const int* used, u16* out, int N, int num_tokens, int num_tiles,          \
           int groups, int pieces) {                                                                                     \
    expand<RANK, BLOCKS>(h, b, stride, scales, stride_scale, blocks, order, tiles, used, out, N, num_tokens, num_tiles,  \
                         groups, pieces);                                                                                \
  }
#define EXPAND_GATED(NAME, RANK, BLOCKS)                                                                                 \
  extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                               \
      NAME(const float* h, const u16* b, int stride, const float* scales, int stride_scale, const int* order,            \
           const int* tiles, const int* used, const u16* gate_up, u16* out, int width, int num_tokens, int num_tiles,    \
           int pieces) {                                                                                                 \
    expand_gated<RANK, BLOCKS>(h, b, stride, scales, stride_scale, order, tiles, used, gate_up, out, width, num_tokens,  \
                               num_tiles, pieces);                                                                       \
  }
