// Attention of rows with many queries over the paged cache, on Hopper's tensor cores. TMA copies keys and values page by page
// into contiguous tiles (Dao 2023, FlashAttention-2; Shah et al. 2024, FlashAttention-3).
//
// A block computes tiles of ROWS queries of one head from a list that it builds on the device from the step's lengths; idle
// blocks take the next tile, a request's longest tiles first. One warp copies; two warpgroups compute 64 queries each. A tile's
// scores are computed while the previous tile is mixed, and one group's softmax overlaps with the other's products. Keys are
// processed from last to first, so masked ones come first.
//
// An 8-bit cache (E4M3) is copied unchanged, in halves of a tile, into SLOTS. Other warps than the copying one convert it to
// float16, which represents all of its numbers exactly, into the tiles that the matrix units read. Queries and weights also
// become float16, with a smaller error than bfloat16. Scales are in `scale_log2` and `out_scale`.
//
// For long prompts triton_widened.py may have converted such a cache before: pages of a request are then contiguous from
// `first_pages` on, and read like a 16-bit cache. Requests with negative `first_pages` are read in codes.

#define UNSEEN (-__int_as_float(0x7f800000))  // score of a masked key: minus infinity
constexpr int PAGE = 16, ROWS = 128, CONSUMERS = 256, MAX_REQUESTS = 2048;

typedef unsigned char u8;

template <int KEYS>
struct Scores {  // scores (+)= q[64, 16] k[KEYS, 16]^T; see prefill.py
  static __device__ void add(float (&scores)[KEYS / 2], u64 q, u64 k, int begun);
};
template <int LANES>
struct Mixed {  // mixed += p[64, 16] v[16, LANES]
  static __device__ void add(float (&mixed)[LANES / 2], u32 p0, u32 p1, u32 p2, u32 p3, u64 v);
};

// Rows of 128 bytes in memory order, keys along the sum: `apart` bytes from the first 64 dims to the next.
__device__ __forceinline__ u64 operand_across(const void* tile, int apart) {
  return u64((address_of(tile) & 0x3ffff) >> 4) | u64(apart >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
__device__ __forceinline__ void copy_heads(void* to, const TensorMap* map, u64* barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          address_of(to)),
      "l"(map), "r"(address_of(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
// Warpgroups alternate on the tensor cores: barriers 1 and 2. Both groups: barrier 3.
__device__ __forceinline__ void await_turn(int group) { asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(CONSUMERS) : "memory"); }
__device__ __forceinline__ void pass_turn(int group) { asm volatile("bar.arrive %0, %1;" ::"r"(2 - group), "n"(CONSUMERS) : "memory"); }
__device__ __forceinline__ void meet_consumers() { asm volatile("bar.sync 3, %0;" ::"n"(CONSUMERS) : "memory"); }
__device__ __forceinline__ float exp2_fast(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

// Makes generic stores visible to the tensor cores and TMA.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ u32 pack_float16(float low, float high) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
struct alignas(8) Eight {  // codes E4M3
  u32 word[2];
};
__device__ __forceinline__ Vec widened(const Eight& eight) {
  Vec wide;
#pragma unroll
  for (int i = 0; i < 2; i++)
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(wide.word[2 * i]), "=r"(wide.word[2 * i + 1])
        : "r"(eight.word[i]));
  return wide;
}

// Half a tile of keys or values: converts KEYS / 2 rows of head_size codes to the rows from `first_row` on of a tile, in the layout
// of the copy engine's swizzle. Warps alternate by rows: `turn` selects the rows of this warp, here and in the
// next half. Rows from `num_rows` on were never written and are zeros, as are lanes beyond the head.
//
// An iteration's loads precede its stores, an order that the compiler must keep, since both access shared memory.
template <int LANES, int KEYS, int WIDENERS>
__device__ __forceinline__ void widen_half(const u8* from, u8* to, int first_row, int num_rows, int head_size, int& turn) {
  constexpr int CHUNKS = LANES / 8, AT_ONCE = 32 / CHUNKS;  // lanes per row, and rows of a warp at once
  constexpr int LOADS = LANES == 256 ? 8 : 4, ROWS_A_TURN = LOADS * AT_ONCE, TURNS = KEYS / 2 / ROWS_A_TURN;
  const int lane = threadIdx.x % 32, chunk = lane % CHUNKS, own_row = lane / CHUNKS;
  const bool in_head = chunk * 8 < head_size;
  for (; turn < TURNS; turn += WIDENERS) {
    const int row = turn * ROWS_A_TURN + own_row, left = num_rows - (first_row + row);
    u8* target = to + chunk / 8 * (KEYS * 128) + (first_row + row) * 128;
    auto widen = [&](bool whole) {
      const int pitch = whole ? LANES : head_size;
      const u8* source = from + row * pitch + chunk * 8;
      Eight codes[LOADS];
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        codes[i] = {};
        if (whole || (in_head && i * AT_ONCE < left)) codes[i] = *reinterpret_cast<const Eight*>(source + i * AT_ONCE * pitch);
      }
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        const int swizzled = (chunk % 8) ^ ((own_row + i * AT_ONCE) % 8);
        store(reinterpret_cast<u16*>(target + i * AT_ONCE * 128 + swizzled * 16), widened(codes[i]));
      }
    };
    if (head_size == LANES && first_row + (turn + 1) * ROWS_A_TURN <= num_rows) widen(true);
    else widen(false);
  }
  turn -= TURNS;
}

struct Work {  // a tile of queries of one head
  int request, head;
  int token;            // of the first query, in the step
  int num_queries;      // of the tile, up to ROWS
  int position;         // of the first query, in the sequence
  int first, end, keys; // tiles of keys [first, end), and the number of keys
};

template <int LANES, int KEYS, int Q_STAGES, int SLOTS, int WIDENERS>
__device__ __forceinline__ void prefill(const TensorMap* q_map, const TensorMap* k_map, const TensorMap* v_map, const int* tables,
                                        int table_stride, const int* first_pages, const int* rows, const int* starts,
                                        const int* lens, const float* sinks, u16* out, int* counters, int num_requests,
                                        int num_heads, int group_size, int head_size, int no_page, int min_queries, int window,
                                        float scale_log2, float softcap, const u8* k_codes, const u8* v_codes, float out_scale) {
  constexpr bool CODED = SLOTS > 0;
  constexpr int THREADS = CONSUMERS + 32 * (WIDENERS + 1), REGISTERS = WIDENERS > 3 ? 216 : 232;
  constexpr int SLOT_BYTES = KEYS / 2 * LANES;
  constexpr int STAGES = 2, HALVES = LANES / 64, PAGES = KEYS / PAGE, UNITS = LANES / 16;
  constexpr int Q_BYTES = ROWS * LANES * 2, TILE_BYTES = KEYS * LANES * 2;
  extern __shared__ unsigned char unaligned[];
  __shared__ u64 q_full[Q_STAGES], q_empty[Q_STAGES], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
  __shared__ u64 q_ready[Q_STAGES], slot_full[SLOTS + 1], slot_empty[SLOTS + 1];  // for codes only
  __shared__ int upto[MAX_REQUESTS];  // tiles of queries, times heads, of this and all earlier requests
  __shared__ int sums_of_warps[THREADS / 32];
  __shared__ Work works[Q_STAGES];
  unsigned char* q_tiles = unaligned + (1024 - address_of(unaligned) % 1024) % 1024;
  unsigned char* k_tiles = q_tiles + Q_STAGES * Q_BYTES;
  unsigned char* v_tiles = k_tiles + STAGES * TILE_BYTES;
  u8* slots = v_tiles + STAGES * TILE_BYTES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_heads = num_heads / group_size;
  let_next_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Q_STAGES; i++) {
      make_barrier(q_full + i, 1);
      make_barrier(q_empty + i, CONSUMERS / 32);
    }
    for (int i = 0; i < STAGES; i++) {
      make_barrier(k_full + i, CODED ? WIDENERS : 1);
      make_barrier(v_full + i, CODED ? WIDENERS : 1);
      make_barrier(k_empty + i, CONSUMERS / 32);
      make_barrier(v_empty + i, CONSUMERS / 32);
    }
    if constexpr (CODED) {
      for (int i = 0; i < Q_STAGES; i++) make_barrier(q_ready + i, WIDENERS);
      for (int i = 0; i < SLOTS; i++) {
        make_barrier(slot_full + i, 1);
        make_barrier(slot_empty + i, WIDENERS);
      }
    }
    barriers_are_made();
  }
  wait_for_previous();
  // Builds the list: requests of this kernel, and their numbers of tiles.
  for (int base = 0, before = 0; base < num_requests; base += THREADS) {
    const int request = base + threadIdx.x;
    int count = 0;
    if (request < num_requests) {
      const int queries = starts[request + 1] - starts[request];
      const bool ours = !first_pages || (first_pages[request] < 0) == CODED;
      if (ours && queries >= min_queries) count = (queries + ROWS - 1) / ROWS * num_heads;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(~0u, count, step);
      if (lane >= step) count += left;
    }
    if (lane == 31) sums_of_warps[warp] = count;
    __syncthreads();
    int all = 0;
    for (int w = 0; w < THREADS / 32; w++) {
      if (w < warp) count += sums_of_warps[w];
      all += sums_of_warps[w];
    }
    if (request < num_requests) upto[request] = before + count;
    before += all;
    __syncthreads();
  }
  __syncthreads();
  const int num_works = upto[num_requests - 1];
  if (num_works == 0) return;  // all blocks end, so none waits and nothing was counted

  if (warp >= CONSUMERS / 32) {
    give_registers<REGISTERS>();
    if (warp > CONSUMERS / 32) {
      if constexpr (CODED) {
        int own = warp - CONSUMERS / 32 - 1, half_tile = 0;  // of rows of a half; number of halves so far
        for (int turn = 0, tile = 0;; turn++) {
          const int q_stage = turn % Q_STAGES;
          wait_for(q_full + q_stage, turn / Q_STAGES & 1);
          const Work work = works[q_stage];
#ifndef FLOAT16
          if (work.request >= 0)
            for (int i = threadIdx.x - CONSUMERS - 32; i < Q_BYTES / 16; i += WIDENERS * 32) {
              u16* at = reinterpret_cast<u16*>(q_tiles + q_stage * Q_BYTES + i * 16);
              Vec v = load(at);
#pragma unroll
              for (int j = 0; j < 4; j++)
                v.word[j] = pack_float16(fminf(fmaxf(low(v.word[j]), -65504.f), 65504.f), fminf(fmaxf(high(v.word[j]), -65504.f), 65504.f));
              store(at, v);
            }
          publish();
          __syncwarp();
#endif
          if (lane == 0) arrive(q_ready + q_stage);
          if (work.request < 0) return;
          for (int keys_tile = work.end - 1; keys_tile >= work.first; keys_tile--, tile++) {
            const int stage = tile % STAGES, parity = (tile / STAGES - 1) & 1;
#pragma unroll
            for (int of_values = 0; of_values < 2; of_values++) {
              u8* to = (of_values ? v_tiles : k_tiles) + stage * TILE_BYTES;
              if (tile >= STAGES) wait_for((of_values ? v_empty : k_empty) + stage, parity);
#pragma unroll
              for (int half = 0; half < 2; half++, half_tile++) {
                const int slot = half_tile % SLOTS;
                wait_for(slot_full + slot, half_tile / SLOTS & 1);
                widen_half<LANES, KEYS, WIDENERS>(slots + slot * SLOT_BYTES, to, half * (KEYS / 2),
                                                  work.keys - keys_tile * KEYS, head_size, own);
                __syncwarp();
                if (lane == 0) arrive(slot_empty + slot);
              }
              publish();
              __syncwarp();
              if (lane == 0) arrive((of_values ? v_full : k_full) + stage);
            }
          }
        }
      }
      return;
    }
    int index = blockIdx.x;
    for (int turn = 0, tile = 0, half_tile = 0;; turn++) {
      const int q_stage = turn % Q_STAGES;
      int index_after = 0;  // requested now, used in the next iteration
      if (lane == 0) index_after = gridDim.x + atomicAdd(counters, 1);
      Work work;
      work.request = -1;
      if (index < num_works) {
        int low = 0, high = num_requests - 1;  // the first request with upto > index
        while (low < high) {
          const int middle = (low + high) / 2;
          if (upto[middle] > index) high = middle;
          else low = middle + 1;
        }
        work.request = low;
        const int local = index - (low ? upto[low - 1] : 0), start = starts[low], queries = starts[low + 1] - start;
        const int tile_of_queries = (queries + ROWS - 1) / ROWS - 1 - local / num_heads, context = lens[low];
        work.head = local % num_heads;
        work.token = start + tile_of_queries * ROWS;
        work.num_queries = min(ROWS, queries - tile_of_queries * ROWS);
        work.position = context - queries + tile_of_queries * ROWS;
        work.keys = work.position + work.num_queries;
        work.end = (work.keys + KEYS - 1) / KEYS;
        work.first = max(0, work.position + 1 - window) / KEYS;
      }
      if (turn >= Q_STAGES) wait_for(q_empty + q_stage, (turn / Q_STAGES - 1) & 1);
      if (lane == 0) {
        works[q_stage] = work;
        if (work.request < 0) {
          arrive(q_full + q_stage);
        } else {
          expect_bytes(q_full + q_stage, Q_BYTES);
          for (int h = 0; h < HALVES; h++)
            for (int part = 0; part < 2; part++)
              copy_heads(q_tiles + q_stage * Q_BYTES + h * (ROWS * 128) + part * (64 * 128), q_map, q_full + q_stage, h * 64, work.head,
                         work.token + part * 64);
        }
      }
      if (work.request < 0) break;
      const int* table = tables + long(rows ? max(rows[work.request], 0) : work.request) * table_stride;
      const int kv_head = work.head / group_size, first_page = first_pages ? first_pages[work.request] : 0;
      auto page_of = [&](int keys_tile) {  // this lane's page of the tile; zeros after the last key
        const int page = keys_tile * PAGES + lane;
        if (lane >= PAGES || keys_tile < 0 || page * PAGE >= work.keys) return no_page;
        return ((first_pages ? first_page + page : table[page]) * kv_heads + kv_head) * PAGE;
      };
      if constexpr (CODED) {
        const int page_bytes = PAGE * head_size;
        for (int keys_tile = work.end - 1; keys_tile >= work.first; keys_tile--) {
          const int page = keys_tile * PAGES + lane;
          long at = 0;
          if (lane < PAGES && page * PAGE < work.keys) at = (long(table[page]) * kv_heads + kv_head) * page_bytes;
          const int num_pages = (work.keys + PAGE - 1) / PAGE - keys_tile * PAGES;  // from here on
#pragma unroll
          for (int part = 0; part < 4; part++, half_tile++) {  // two of keys, two of values
            const int half = part % 2, slot = half_tile % SLOTS;
            const int count = max(0, min(PAGES / 2, num_pages - half * (PAGES / 2))), own = lane - half * (PAGES / 2);
            if (half_tile >= SLOTS) wait_for(slot_empty + slot, (half_tile / SLOTS - 1) & 1);
            if (lane == 0) expect_bytes(slot_full + slot, count * page_bytes);
            __syncwarp();
            if (own >= 0 && own < count)
              copy_bytes(slots + slot * SLOT_BYTES + own * page_bytes, (part < 2 ? k_codes : v_codes) + at, page_bytes, slot_full + slot);
          }
        }
      } else {
        int at = page_of(work.end - 1);
        for (int keys_tile = work.end - 1; keys_tile >= work.first; keys_tile--, tile++) {
          const int stage = tile % STAGES, parity = (tile / STAGES - 1) & 1;
          const int next = page_of(keys_tile - 1);
          if (tile >= STAGES) wait_for(k_empty + stage, parity);
          if (lane == 0) expect_bytes(k_full + stage, TILE_BYTES);
          __syncwarp();
          if (lane < PAGES)
            for (int h = 0; h < HALVES; h++)
              copy_tile(k_tiles + stage * TILE_BYTES + h * (KEYS * 128) + lane * (PAGE * 128), k_map, k_full + stage, h * 64, at);
          if (tile >= STAGES) wait_for(v_empty + stage, parity);
          if (lane == 0) expect_bytes(v_full + stage, TILE_BYTES);
          __syncwarp();
          if (lane < PAGES)
            for (int h = 0; h < HALVES; h++)
              copy_tile(v_tiles + stage * TILE_BYTES + h * (KEYS * 128) + lane * (PAGE * 128), v_map, v_full + stage, h * 64, at);
          at = next;
        }
      }
      index = __shfl_sync(~0u, index_after, 0);
    }
    if (lane == 0) {  // the last block to finish resets the list for the next launch
      __threadfence();
      if (atomicAdd(counters + 1, 1) == int(gridDim.x) - 1) counters[0] = counters[1] = 0;
    }
    return;
  }

  take_registers<REGISTERS>();
  const int group = warp / 4, g = lane / 4, t = lane % 4;
  if (group == 1) pass_turn(1);
  for (int turn = 0, tile = 0;; turn++) {
    const int q_stage = turn % Q_STAGES;
    wait_for((CODED ? q_ready : q_full) + q_stage, turn / Q_STAGES & 1);
    const Work work = works[q_stage];
    if (work.request < 0) break;
    const int row = group * 64 + warp % 4 * 16 + g;  // and row + 8
    float scores[KEYS / 2], mixed[LANES / 2] = {}, best[2] = {UNSEEN, UNSEEN}, total[2] = {};
    u32 p[KEYS / 4];
    const u64 q = operand(q_tiles + q_stage * Q_BYTES + group * (64 * 128));
    auto begin_scores = [&](int stage) {
      begin_products();
      const u64 k = operand(k_tiles + stage * TILE_BYTES);
#pragma unroll
      for (int u = 0; u < UNITS; u++)
        Scores<KEYS>::add(scores, q + (u / 4 * (ROWS * 128) + u % 4 * 32) / 16, k + (u / 4 * (KEYS * 128) + u % 4 * 32) / 16, u);
      end_products();
    };
    auto begin_mixing = [&](int stage) {
      begin_products();
      const u64 v = operand_across(v_tiles + stage * TILE_BYTES, KEYS * 128);
#pragma unroll
      for (int u = 0; u < PAGES; u++)
        Mixed<LANES>::add(mixed, p[4 * u], p[4 * u + 1], p[4 * u + 2], p[4 * u + 3], v + u * (PAGE * 128 / 16));
      end_products();
    };
    float shrink[2];
    auto soften = [&](int keys_tile) {  // scores become weights, in place; the accumulated output is scaled by `shrink`
      const int first_key = keys_tile * KEYS + 2 * t;
      float scale = scale_log2;
      if (softcap > 0.f) {
        scale = 1.4426950408889634f;
        const float inner = scale_log2 * (2.f / softcap);
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) scores[i] = softcap - 2.f * softcap / (exp2_fast(scores[i] * inner) + 1.f);
      }
      const bool late = (keys_tile + 1) * KEYS - 1 > work.position + group * 64;  // some key is after some query
      if (late || keys_tile * KEYS <= work.position + ROWS - 1 - window) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const int position = work.position + row + 8 * c, last = position - first_key, before = last - window;
#pragma unroll
          for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
              if (8 * j + e > last || 8 * j + e <= before) scores[4 * j + 2 * c + e] = UNSEEN;
        }
      }
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float top = best[c];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) top = fmaxf(top, fmaxf(scores[4 * j + 2 * c], scores[4 * j + 2 * c + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float level = top == UNSEEN ? 0.f : top * scale;
        shrink[c] = exp2_fast(best[c] * scale - level);
        best[c] = top;
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& score = scores[4 * j + 2 * c + e];
            score = exp2_fast(score * scale - level);
            sum += score;
          }
        total[c] = total[c] * shrink[c] + sum;
      }
    };
    auto pack_weights = [&]() {
#pragma unroll
      for (int i = 0; i < KEYS / 4; i++) p[i] = CODED ? pack_float16(scores[2 * i], scores[2 * i + 1]) : pack(scores[2 * i], scores[2 * i + 1]);
    };

    wait_for(k_full + tile % STAGES, tile / STAGES & 1);
    await_turn(group);
    begin_scores(tile % STAGES);
    pass_turn(group);
    wait_for_products<0>();
    if (lane == 0) arrive(k_empty + tile % STAGES);
    soften(work.end - 1);
    pack_weights();
    // Only the sequence's part of the last page: the rest is uninitialised; a NaN times a weight of zero stays NaN.
    if (!CODED && work.keys % PAGE) {
      wait_for(v_full + tile % STAGES, tile / STAGES & 1);
      const int from = work.keys % KEYS, count = (PAGE - work.keys % PAGE) * (LANES / 8);
      for (int i = threadIdx.x; i < count; i += CONSUMERS) {
        const int half = i % (LANES / 8) / 8, chunk = i % 8, key = from + i / (LANES / 8);
        store(reinterpret_cast<u16*>(v_tiles + tile % STAGES * TILE_BYTES + half * (KEYS * 128) + key * 128 + chunk * 16), Vec{});
      }
      publish();
      meet_consumers();
    }
    for (int keys_tile = work.end - 2; keys_tile >= work.first; keys_tile--, tile++) {
      const int stage = tile % STAGES, next = (tile + 1) % STAGES;
      wait_for(k_full + next, (tile + 1) / STAGES & 1);
      await_turn(group);
      begin_scores(next);
      wait_for(v_full + stage, tile / STAGES & 1);
      begin_mixing(stage);
      pass_turn(group);
      wait_for_products<1>();
      if (lane == 0) arrive(k_empty + next);
      soften(keys_tile);
      wait_for_products<0>();
      if (lane == 0) arrive(v_empty + stage);
      if (__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f))  // the largest score is usually seen early
#pragma unroll
        for (int i = 0; i < LANES / 2; i++) mixed[i] *= shrink[i / 2 % 2];
      pack_weights();
    }
    if (lane == 0) arrive(q_empty + q_stage);
    wait_for(v_full + tile % STAGES, tile / STAGES & 1);
    begin_mixing(tile % STAGES);
    const float sink = sinks ? sinks[work.head] * 1.4426950408889634f : 0.f;
    float share[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
      total[c] += __shfl_xor_sync(~0u, total[c], 1);
      total[c] += __shfl_xor_sync(~0u, total[c], 2);
      const float level = best[c] == UNSEEN ? 0.f : best[c] * (softcap > 0.f ? 1.4426950408889634f : scale_log2);
      if (sinks) total[c] += exp2f(sink - level);
      share[c] = out_scale / total[c];
    }
    wait_for_products<0>();
    if (lane == 0) arrive(v_empty + tile % STAGES);
    tile++;
    // A lane has two dims of every eight; four lanes exchange so that each has eight dims of every 32, and writes 16 bytes.
#pragma unroll
    for (int c = 0; c < 2; c++) {
      u16* to = out + (long(work.token + row + 8 * c) * num_heads + work.head) * head_size;
      const bool inside = row + 8 * c < work.num_queries;
#pragma unroll
      for (int j = 0; j < LANES / 8; j += 4) {
        u32 mine[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          mine[i] = pack(mixed[4 * (j + i) + 2 * c] * share[c], mixed[4 * (j + i) + 2 * c + 1] * share[c]);
        // Transpose 4 x 4 words over four lanes: first within pairs of words, then of pairs.
#pragma unroll
        for (int step = 1; step < 4; step *= 2)
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (!(i & step)) {
              const u32 sent = t & step ? mine[i] : mine[i | step];
              const u32 got = __shfl_xor_sync(~0u, sent, step);
              if (t & step) mine[i] = got;
              else mine[i | step] = got;
            }
        const int dim = (j + t) * 8;
        if (inside && dim < head_size) store(to + dim, Vec{mine[0], mine[1], mine[2], mine[3]});
      }
    }
  }
}

#define PREFILL(NAME, LANES, KEYS, Q_STAGES, SLOTS, WIDENERS)                                                            \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 32 * (WIDENERS + 1), 1)                                       \
      NAME(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, \
           const int* tables, int table_stride, const int* first_pages, const int* rows, const int* starts,              \
           const int* lens, const float* sinks, u16* out, int* counters, int num_requests, int num_heads,                \
           int group_size, int head_size, int no_page, int min_queries, int window, float scale_log2, float softcap,     \
           float out_scale) {                                                                                            \
    prefill<LANES, KEYS, Q_STAGES, 0, WIDENERS>(&q, &k, &v, tables, table_stride, first_pages, rows, starts, lens,       \
                                                sinks, out, counters, num_requests, num_heads, group_size, head_size,    \
                                                no_page, min_queries, window, scale_log2, softcap, nullptr, nullptr,     \
                                                out_scale);                                                              \
  }
#define PREFILL_CODED(NAME, LANES, KEYS, Q_STAGES, SLOTS, WIDENERS)                                                      \
  extern "C" __global__ void __launch_bounds__(CONSUMERS + 32 * (WIDENERS + 1), 1)                                       \
      NAME(const __grid_constant__ TensorMap q, const u8* k_codes, const u8* v_codes, const int* tables,                 \
           int table_stride, const int* first_pages, const int* rows, const int* starts, const int* lens,                \
           const float* sinks, u16* out, int* counters, int num_requests, int num_heads, int group_size, int head_size,  \
           int min_queries, int window, float scale_log2, float softcap, float out_scale) {                              \
    prefill<LANES, KEYS, Q_STAGES, SLOTS, WIDENERS>(&q, nullptr, nullptr, tables, table_stride, first_pages, rows,       \
                                                    starts, lens, sinks, out, counters, num_requests, num_heads,         \
                                                    group_size, head_size, 0, min_queries, window, scale_log2, softcap,  \
                                                    k_codes, v_codes, out_scale);                                        \
  }
