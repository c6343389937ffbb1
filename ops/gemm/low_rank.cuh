// Adds adapters to a tile of sums in registers: h B^T, where another kernel computes h = scale x A^T (lora/few_tokens.cu). Each
// row of x uses the B of its own slot. One warp gathers h meanwhile; the multiplying warps add.
//
// h [pieces, M as sorted, PARTS * RANK] float32, whose pieces are summed here; b [N, RANK] and scale [PARTS] of each slot,
// `stride` times 16 bytes apart (for scale: 4); order [M]: the rows as sorted; slots [M]: of each row, -1 for none; tiles
// [num_tiles]: slots in that order, of which `used` occur, each once or more often; parts: the part of each tile of the weight.

struct LowRank {
  const float* h;
  const u16* b;
  const float* scales;
  const int *order, *slots, *tiles, *used, *parts;
  int stride, stride_scale, row_size, pieces;  // row_size: PARTS * RANK
};

__device__ __forceinline__ void fetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Up to ROWS rows of x, HALVES parts of the tile: one, or gate and up. In shared memory.
template <int ROWS, int RANK, int HALVES>
struct Gathered {
  uint2 h[HALVES][ROWS][RANK / 4];  // scaled, in 16 bits
  int row[ROWS];                    // in sorted order
  int slot[ROWS];                   // of each row, -1 for none
  int distinct[ROWS];               // distinct slots of the rows
  int num_distinct;
  u64 is_there;

  __device__ __forceinline__ void make() { make_barrier(&is_there, 1); }

  // Start of the slot's B for one half of the tile's pairs, which are rows n and n + 8, or gate and up.
  static __device__ __forceinline__ const u16* matrix(const LowRank& low, int slot, int tile, int N, int half) {
    const int first = HALVES == 2 ? half * (N / 2) + tile * 64 : tile * 128 + half * 8;
    return low.b + long(slot) * low.stride * 8 + long(first) * RANK;
  }

  // Called by one whole warp, after `is_there` is initialised.
  __device__ __forceinline__ void gather(const LowRank& low, int tile, int M, int N) {
    const int lane = threadIdx.x % 32, quad = lane % 4, at = lane / 4;
    const int part = HALVES == 2 ? 0 : low.parts[tile], num_tiles = *low.used;
    int count = 0;
    for (int first = 0; first < num_tiles; first += 32) {
      const int i = first + lane;
      const bool is_new = i < num_tiles && (i == 0 || low.tiles[i] != low.tiles[i - 1]);
      const u32 all = __ballot_sync(~0u, is_new);
      if (is_new) distinct[count + __popc(all & ((1u << lane) - 1))] = low.tiles[i];
      count += __popc(all);
    }
    if (lane == 0) num_distinct = count;
    __syncwarp();
    // Prefetches 128 rows of B of each slot for the other warps.
    for (int i = 0; i < count; i++)
      for (int line = lane; line < 2 * RANK; line += 32)
        fetch_line(reinterpret_cast<const char*>(matrix(low, distinct[i], tile, N, HALVES == 2 ? line / RANK : 0)) +
                   (HALVES == 2 ? line % RANK : line) * 128);
    for (int place = lane; place < ROWS; place += 32) {
      const int found = place < M ? low.order[place] : place;
      row[place] = found;
      slot[found] = place < M ? low.slots[found] : -1;
    }
    __syncwarp();
    wait_for_previous();
#pragma unroll 1
    for (int place = at; place < ROWS; place += 8) {
      const int to = row[place], own = slot[to];
#pragma unroll
      for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int k = 0; k < RANK / 16; k++) {
          float4 sum = {};
          if (own >= 0) {
            const float* from = low.h + long(place) * low.row_size + (part + half) * RANK + k * 16 + quad * 4;
            const float scale = low.scales[long(own) * low.stride_scale + part + half];
#pragma unroll 4
            for (int piece = 0; piece < low.pieces; piece++) {
              const float4 more = *reinterpret_cast<const float4*>(from + long(piece) * M * low.row_size);
              sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            sum.x *= scale, sum.y *= scale, sum.z *= scale, sum.w *= scale;
          }
          h[half][to][k * 4 + quad] = uint2{pack(sum.x, sum.y), pack(sum.z, sum.w)};
        }
    }
    __syncwarp();
    if (lane == 0) arrive(&is_there);
  }

  // sums [ROWS / 2] of the warp's pairs, `pair` within the tile, as a matrix instruction leaves them.
  __device__ __forceinline__ void add(float (&sums)[ROWS / 2], const LowRank& low, int tile, int pair, int N) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    wait_for(&is_there, 0);
    int own[ROWS / 8];
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) own[j] = slot[8 * j + g];
    const int count = num_distinct;
    const long at = long(pair * (HALVES == 2 ? 8 : 16) + g) * RANK + t * 4;
#pragma unroll 2
    for (int i = 0; i < count; i++) {
      const int which = distinct[i];
#pragma unroll
      for (int k = 0; k < RANK / 16; k++) {
        const uint2 upper = *reinterpret_cast<const uint2*>(matrix(low, which, tile, N, 0) + at + k * 16);
        const uint2 lower = *reinterpret_cast<const uint2*>(matrix(low, which, tile, N, 1) + at + k * 16);
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) {
          float d[4] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]};
          const bool is_own = own[j] == which;
          const uint2 first = is_own ? h[0][8 * j + g][k * 4 + t] : uint2{};
          if constexpr (HALVES == 2) {
            const uint2 second = is_own ? h[1][8 * j + g][k * 4 + t] : uint2{};
            mma(d, upper.x, 0, upper.y, 0, first.x, first.y);
            mma(d, 0, lower.x, 0, lower.y, second.x, second.y);
          } else {
            mma(d, upper.x, lower.x, upper.y, lower.y, first.x, first.y);
          }
          sums[4 * j] = d[0], sums[4 * j + 1] = d[1], sums[4 * j + 2] = d[2], sums[4 * j + 3] = d[3];
        }
      }
    }
  }
};

template <int ROWS, int HALVES>
struct Gathered<ROWS, 0, HALVES> {
  __device__ __forceinline__ void make() {}
  __device__ __forceinline__ void gather(const LowRank&, int, int, int) {}
  __device__ __forceinline__ void add(float (&)[ROWS / 2], const LowRank&, int, int, int) {}
};
