// Sums and concatenations over the ranks of a model, each on its own device, through peer memory.
//
// Every rank calls the same kernels in the same order. A call's number is stored on the device, so captured graphs can use it;
// its parity selects half of every buffer. A rank in call n + 1 has flags from all others that they are in it, so they have ended
// call n, and buffers of call n - 1 may be overwritten. Sums are computed in float32 in rank order and rounded once: the same
// bits on every rank.
//
// Small tensors are pushed in lines of 16 bytes, two words each with the call's number; a reader that finds the number has the
// words (NCCL's LL protocol, Jeaugey 2019). Larger ones are copied, with a flag for each block, and read by the peers.

constexpr int MAX_RANKS = 8;
constexpr u64 PATIENCE_NS = 120000000000ull;  // a compiling peer takes long; a failed one never arrives

struct Memory {  // of each rank, as addresses on this device
  u64 lines[MAX_RANKS];   // [2][ranks][capacity] lines
  u64 blocks[MAX_RANKS];  // [2][capacity] vectors
  u64 flags[MAX_RANKS];   // [blocks][ranks] u32
};

__device__ __forceinline__ u64 now() {
  u64 ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__device__ __forceinline__ void put_line(Vec* to, u32 first, u32 second, u32 mark) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(first), "r"(mark), "r"(second), "r"(mark) : "memory");
}
__device__ __forceinline__ Vec peek(const Vec* from) {
  Vec v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void raise_flag(u32* flag, u32 mark) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(mark) : "memory");
}
__device__ __forceinline__ u32 read_flag(const u32* flag) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Sum so far, of words with two 16-bit floats or one of 32 bits.
template <bool WIDE>
struct Sum {
  float low_, high_;
  __device__ __forceinline__ void add(u32 word, bool first) {
    const float a = WIDE ? __uint_as_float(word) : low(word), b = WIDE ? 0.f : high(word);
    low_ = first ? a : low_ + a;
    high_ = first ? b : high_ + b;
  }
  __device__ __forceinline__ u32 word() const { return WIDE ? __float_as_uint(low_) : pack(low_, high_); }
};

// The last block of a call increments the counter.
__device__ __forceinline__ void end_call(u32* calls, u32 call) {
  __syncthreads();
  if (threadIdx.x == 0 && atomicAdd(calls + 1, 1u) == gridDim.x - 1) {
    calls[1] = 0;
    __threadfence();
    calls[0] = call + 1;
  }
}

// Returns the two words of a line once both carry this call's mark; NaN if a peer never wrote it.
__device__ __forceinline__ void await_line(const Vec* line, u32 mark, u64 began, u32& first, u32& second) {
  Vec v = peek(line);
  while (v.word[1] != mark || v.word[3] != mark) {
    if (now() - began > PATIENCE_NS) {
      v.word[0] = v.word[2] = 0xffffffffu;
      break;
    }
    v = peek(line);
  }
  first = v.word[0], second = v.word[2];
}

template <bool WIDE>
__device__ __forceinline__ void sum_lines(const u32* x, u32* out, int num_words, Memory memory, u32* calls, int rank, int ranks,
                                          int capacity) {
  let_next_start();
  wait_for_previous();
  const u32 call = *reinterpret_cast<volatile u32*>(calls), mark = call + 1;
  const int num_lines = (num_words + 1) / 2, stride = gridDim.x * blockDim.x, begin = blockIdx.x * blockDim.x + threadIdx.x;
  const long long half = (long long)(call & 1) * ranks * capacity;
  for (int i = begin; i < num_lines; i += stride) {
    const u32 first = x[2 * i], second = 2 * i + 1 < num_words ? x[2 * i + 1] : 0;
    for (int peer = 0; peer < ranks; peer++)
      if (peer != rank) put_line(reinterpret_cast<Vec*>(memory.lines[peer]) + half + (long long)rank * capacity + i, first, second, mark);
  }
  const Vec* own = reinterpret_cast<const Vec*>(memory.lines[rank]) + half;
  const u64 began = now();
  for (int i = begin; i < num_lines; i += stride) {
    Sum<WIDE> a, b;
    for (int peer = 0; peer < ranks; peer++) {
      u32 first, second;
      if (peer == rank) {
        first = x[2 * i], second = 2 * i + 1 < num_words ? x[2 * i + 1] : 0;
      } else {
        await_line(own + (long long)peer * capacity + i, mark, began, first, second);
      }
      a.add(first, peer == 0);
      b.add(second, peer == 0);
    }
    out[2 * i] = a.word();
    if (2 * i + 1 < num_words) out[2 * i + 1] = b.word();
  }
  end_call(calls, call);
}

// Copies this block's vectors to its exchange buffer, sets the flags, and waits for the peers' flags. False on a timeout.
__device__ __forceinline__ bool exchange(const Vec* x, int begin, int end, Memory memory, u32 call, int rank, int ranks, int capacity) {
  Vec* own = reinterpret_cast<Vec*>(memory.blocks[rank]) + (long long)(call & 1) * capacity;
  for (int i = begin + threadIdx.x; i < end; i += blockDim.x) own[i] = x[i];
  __syncthreads();
  const int peer = threadIdx.x;
  bool came = true;
  if (peer < ranks && peer != rank) {
    __threadfence_system();
    raise_flag(reinterpret_cast<u32*>(memory.flags[peer]) + blockIdx.x * ranks + rank, call + 1);
    const u32* flag = reinterpret_cast<const u32*>(memory.flags[rank]) + blockIdx.x * ranks + peer;
    const u64 began = now();
    while (int(read_flag(flag) - (call + 1)) < 0)  // it may be a call ahead
      if (now() - began > PATIENCE_NS) {
        came = false;
        break;
      }
  }
  return __syncthreads_and(came);
}

template <bool WIDE>
__device__ __forceinline__ void sum_blocks(const Vec* x, Vec* out, int num_vectors, int per_block, Memory memory, u32* calls, int rank,
                                           int ranks, int capacity) {
  let_next_start();
  wait_for_previous();
  const u32 call = *reinterpret_cast<volatile u32*>(calls);
  const int begin = blockIdx.x * per_block, end = min(begin + per_block, num_vectors);
  const bool came = exchange(x, begin, end, memory, call, rank, ranks, capacity);
  const long long half = (long long)(call & 1) * capacity;
  for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
    Sum<WIDE> sums[4];
    for (int peer = 0; peer < ranks; peer++) {
      const Vec v = peer == rank ? x[i] : peek(reinterpret_cast<const Vec*>(memory.blocks[peer]) + half + i);
#pragma unroll
      for (int w = 0; w < 4; w++) sums[w].add(v.word[w], peer == 0);
    }
    Vec v;
#pragma unroll
    for (int w = 0; w < 4; w++) v.word[w] = came ? sums[w].word() : 0xffffffffu;
    out[i] = v;
  }
  end_call(calls, call);
}

// x [rows, width] -> out [rows, ranks * width], widths in vectors: columns in rank order.
__device__ __forceinline__ void concat_blocks(const Vec* x, Vec* out, int num_vectors, int per_block, int width, Memory memory, u32* calls,
                                              int rank, int ranks, int capacity) {
  let_next_start();
  wait_for_previous();
  const u32 call = *reinterpret_cast<volatile u32*>(calls);
  const int begin = blockIdx.x * per_block, end = min(begin + per_block, num_vectors);
  const bool came = exchange(x, begin, end, memory, call, rank, ranks, capacity);
  const long long half = (long long)(call & 1) * capacity;
  for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const int row = i / width, column = i - row * width;
    for (int peer = 0; peer < ranks; peer++) {
      Vec v = peer == rank ? x[i] : peek(reinterpret_cast<const Vec*>(memory.blocks[peer]) + half + i);
      if (!came) v.word[0] = v.word[1] = v.word[2] = v.word[3] = 0xffffffffu;
      out[((long long)row * ranks + peer) * width + column] = v;
    }
  }
  end_call(calls, call);
}

// Returns the sum of a value over a block's threads, to each thread.
__device__ __forceinline__ float over_block(float value) {
  __shared__ float of_warp[32];
#pragma unroll
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.f;
  for (int warp = 0; warp < blockDim.x / 32; warp++) sum += of_warp[warp];
  __syncthreads();  // all threads have read it
  return sum;
}

// Next value of the residual, rounded as stored, from a sum that is rounded as a separate all-reduce would round it.
__device__ __forceinline__ u32 added(u32 residual, u32 sum) { return pack(low(residual) + low(sum), high(residual) + high(sum)); }
__device__ __forceinline__ float square(u32 word) { return low(word) * low(word) + high(word) * high(word); }
__device__ __forceinline__ u32 normed(u32 word, float scale, u32 weight) {
  return pack(low(word) * scale * low(weight), high(word) * scale * high(weight));
}

// A block has one row of `num_lines` lines: the sum of x [rows] is added to residual [rows], whose RMS norm is out [rows].
__device__ __forceinline__ void sum_lines_and_norm(const u32* x, u32* residual, const u32* weight, u32* out, int num_lines, float eps,
                                                   Memory memory, u32* calls, int rank, int ranks, int capacity) {
  constexpr int MANY = 4;  // lines per thread
  let_next_start();
  u32 weights[MANY][2];
#pragma unroll
  for (int k = 0; k < MANY; k++) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i < num_lines) weights[k][0] = weight[2 * i], weights[k][1] = weight[2 * i + 1];
  }
  wait_for_previous();
  const u32 call = *reinterpret_cast<volatile u32*>(calls), mark = call + 1;
  const long long half = (long long)(call & 1) * ranks * capacity;
  const int first_line = blockIdx.x * num_lines;
  x += 2ll * first_line, residual += 2ll * first_line, out += 2ll * first_line;
  u32 own[MANY][2], stream[MANY][2];
#pragma unroll
  for (int k = 0; k < MANY; k++) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i >= num_lines) continue;
    own[k][0] = x[2 * i], own[k][1] = x[2 * i + 1];
    for (int peer = 0; peer < ranks; peer++)
      if (peer != rank)
        put_line(reinterpret_cast<Vec*>(memory.lines[peer]) + half + (long long)rank * capacity + first_line + i, own[k][0], own[k][1], mark);
    stream[k][0] = residual[2 * i], stream[k][1] = residual[2 * i + 1];
  }
  const Vec* given = reinterpret_cast<const Vec*>(memory.lines[rank]) + half + first_line;
  const u64 began = now();
  float squares = 0.f;
#pragma unroll
  for (int k = 0; k < MANY; k++) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i >= num_lines) continue;
    Sum<false> a, b;
    for (int peer = 0; peer < ranks; peer++) {
      u32 first = own[k][0], second = own[k][1];
      if (peer != rank) await_line(given + (long long)peer * capacity + i, mark, began, first, second);
      a.add(first, peer == 0);
      b.add(second, peer == 0);
    }
    stream[k][0] = added(stream[k][0], a.word()), stream[k][1] = added(stream[k][1], b.word());
    residual[2 * i] = stream[k][0], residual[2 * i + 1] = stream[k][1];
    squares += square(stream[k][0]) + square(stream[k][1]);
  }
  const float scale = rsqrtf(over_block(squares) / (4 * num_lines) + eps);
#pragma unroll
  for (int k = 0; k < MANY; k++) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i >= num_lines) continue;
    out[2 * i] = normed(stream[k][0], scale, weights[k][0]), out[2 * i + 1] = normed(stream[k][1], scale, weights[k][1]);
  }
  end_call(calls, call);
}

// The same for larger ones: a block has `per_block` rows of `width` vectors.
__device__ __forceinline__ void sum_blocks_and_norm(const Vec* x, Vec* residual, const Vec* weight, Vec* out, int num_rows, int per_block,
                                                    int width, float eps, Memory memory, u32* calls, int rank, int ranks, int capacity) {
  constexpr int MANY = 4;  // vectors of a row per thread
  let_next_start();
  wait_for_previous();
  const u32 call = *reinterpret_cast<volatile u32*>(calls);
  const int first_row = blockIdx.x * per_block, last_row = min(first_row + per_block, num_rows);
  const bool came = exchange(x, first_row * width, last_row * width, memory, call, rank, ranks, capacity);
  const long long half = (long long)(call & 1) * capacity;
  for (int row = first_row; row < last_row; row++) {
    Vec stream[MANY];
    float squares = 0.f;
#pragma unroll
    for (int k = 0; k < MANY; k++) {
      const int column = threadIdx.x + k * blockDim.x, i = row * width + column;
      if (column >= width) continue;
      Sum<false> sums[4];
      for (int peer = 0; peer < ranks; peer++) {
        const Vec v = peer == rank ? x[i] : peek(reinterpret_cast<const Vec*>(memory.blocks[peer]) + half + i);
#pragma unroll
        for (int w = 0; w < 4; w++) sums[w].add(v.word[w], peer == 0);
      }
      stream[k] = residual[i];
#pragma unroll
      for (int w = 0; w < 4; w++) {
        stream[k].word[w] = came ? added(stream[k].word[w], sums[w].word()) : 0xffffffffu;
        squares += square(stream[k].word[w]);
      }
      residual[i] = stream[k];
    }
    const float scale = rsqrtf(over_block(squares) / (8 * width) + eps);
#pragma unroll
    for (int k = 0; k < MANY; k++) {
      const int column = threadIdx.x + k * blockDim.x;
      if (column >= width) continue;
      const Vec weights = weight[column];
#pragma unroll
      for (int w = 0; w < 4; w++) stream[k].word[w] = normed(stream[k].word[w], scale, weights.word[w]);
      out[row * width + column] = stream[k];
    }
  }
  end_call(calls, call);
}

#define SUM_LINES(NAME, WIDE)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(256)                                                                                 \
      NAME(const u32* x, u32* out, int num_words, Memory memory, u32* calls, int rank, int ranks, int capacity) {                   \
    sum_lines<WIDE>(x, out, num_words, memory, calls, rank, ranks, capacity);                                                       \
  }
#define SUM_BLOCKS(NAME, WIDE)                                                                                                      \
  extern "C" __global__ void __launch_bounds__(512) NAME(const Vec* x, Vec* out, int num_vectors, int per_block, Memory memory,     \
                                                         u32* calls, int rank, int ranks, int capacity) {                           \
    sum_blocks<WIDE>(x, out, num_vectors, per_block, memory, calls, rank, ranks, capacity);                                         \
  }
#define CONCAT_BLOCKS(NAME)                                                                                                         \
  extern "C" __global__ void __launch_bounds__(512) NAME(const Vec* x, Vec* out, int num_vectors, int per_block, int width,         \
                                                         Memory memory, u32* calls, int rank, int ranks, int capacity) {            \
    concat_blocks(x, out, num_vectors, per_block, width, memory, calls, rank, ranks, capacity);                                     \
  }
#define SUM_LINES_NORM(NAME)                                                                                                        \
  extern "C" __global__ void __launch_bounds__(1024) NAME(const u32* x, u32* residual, const u32* weight, u32* out, int num_lines,  \
                                                          float eps, Memory memory, u32* calls, int rank, int ranks, int capacity) { \
    sum_lines_and_norm(x, residual, weight, out, num_lines, eps, memory, calls, rank, ranks, capacity);                             \
  }
#define SUM_BLOCKS_NORM(NAME)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(512)                                                                                 \
      NAME(const Vec* x, Vec* residual, const Vec* weight, Vec* out, int num_rows, int per_block, int width, float eps, Memory memory, \
           u32* calls, int rank, int ranks, int capacity) {                                                                         \
    sum_blocks_and_norm(x, residual, weight, out, num_rows, per_block, width, eps, memory, calls, rank, ranks, capacity);           \
  }
