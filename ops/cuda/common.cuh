// Words of two 16-bit floats, 16-byte loads, one matrix instruction, and the two ends of programmatic dependent launch.
// Compiled by NVRTC without any header. FLOAT16 chooses float16, otherwise bfloat16.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef FLOAT16
#define HALF "f16"
#else
#define HALF "bf16"
#endif

struct alignas(16) Vec {  // eight 16-bit floats
  u32 word[4];
};

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 word;
#ifdef FLOAT16
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
  return word;
}

__device__ __forceinline__ float to_float(u16 half) {
#ifdef FLOAT16
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
  return __uint_as_float(u32(half) << 16);
#endif
}

__device__ __forceinline__ float low(u32 word) { return to_float(u16(word)); }
__device__ __forceinline__ float high(u32 word) { return to_float(u16(word >> 16)); }
__device__ __forceinline__ float rounded(float value) { return low(pack(value, 0.f)); }

// d[16, 8] += a[16, 16] b[16, 8]. With lane = 4 g + t: a0 a1 are rows g and g + 8 of columns 2t, 2t + 1, a2 a3 of columns
// 2t + 8, 2t + 9; b0 b1 are the same rows of column g; d0 d1 row g, d2 d3 row g + 8, of columns 2t, 2t + 1.
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifdef FLOAT16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ Vec load(const u16* from) { return *reinterpret_cast<const Vec*>(from); }
__device__ __forceinline__ void store(u16* to, const Vec& v) { *reinterpret_cast<Vec*>(to) = v; }

// Loads data that one multiprocessor reads once, bypassing L1.
__device__ __forceinline__ Vec load_streamed(const u16* from) {
  Vec v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from));
  return v;
}

// Asynchronous copies to shared memory. Each lane reads back only its own data, so shared memory is a queue of any depth, without
// barriers or registers.
__device__ __forceinline__ void copy_async(Vec* to, const u16* from) {
  const u32 address = u32(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
__device__ __forceinline__ void end_of_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>  // batches that may still be in flight
__device__ __forceinline__ void wait_for_batches() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Prefetches bytes of a later kernel into L2 while memory is idle, divided among `count` threads of all blocks; this is thread
// `index`. Size and address are multiples of 16.
__device__ __forceinline__ void bring_ahead(const unsigned char* from, int num_bytes, int index, int count) {
  constexpr int PIECE = 4096;
  for (int at = index * PIECE; at < num_bytes; at += count * PIECE)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + at), "r"(min(PIECE, num_bytes - at)) : "memory");
}

// Clusters of blocks: barrier, and shared memory of the block `rank`.
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ float load_remote(const float* from, int rank) {
  float value;
  u32 address = u32(__cvta_generic_to_shared(from));
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

// Every kernel lets the next one start at once, and waits before it accesses memory that an earlier one writes or reads. Without
// the wait, its successors would overtake its predecessors.
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
