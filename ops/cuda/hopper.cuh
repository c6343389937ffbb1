// Hopper's own features: barriers in shared memory that count bytes, copies of whole tiles by a tensor map, and matrix
// instructions that read tiles as these copies lay them out (128-byte rows, swizzled in groups of eight).

struct alignas(64) TensorMap {  // made by the host (program.py)
  u64 words[16];
};

__device__ __forceinline__ u32 address_of(const void* shared) { return u32(__cvta_generic_to_shared(shared)); }

__device__ __forceinline__ void make_barrier(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barriers_are_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives once, and expects this many bytes.
__device__ __forceinline__ void expect_bytes(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}
__device__ __forceinline__ void wait_for(u64* barrier, int parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n\t}" ::"r"(
          address_of(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void copy_tile(void* to, const TensorMap* map, u64* barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
          address_of(to)),
      "l"(map), "r"(address_of(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void copy_tile(void* to, const TensorMap* map, u64* barrier, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
                   address_of(to)),
               "l"(map), "r"(address_of(barrier)), "r"(c0), "r"(c1)
               : "memory");
}
// Copies contiguous bytes; size and address are multiples of 16.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address_of(to)),
               "l"(from), "r"(bytes), "r"(address_of(barrier))
               : "memory");
}

// A tile of 128-byte rows at a multiple of 1024 bytes, as operand of a matrix instruction.
__device__ __forceinline__ u64 operand(const void* tile) {
  return u64((address_of(tile) & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>  // groups of products that may still be in flight
__device__ __forceinline__ void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// Keeps the compiler from moving reads of sums above the wait.
template <int COUNT>
__device__ __forceinline__ void settle(float (&sums)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// Moves registers from the copying warpgroup to the multiplying ones, which then have REGISTERS each; 0: unchanged.
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  if constexpr (REGISTERS > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Barrier of a cluster's blocks without memory ordering: only the arrival of its threads counts.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait;" ::: "memory");
}
__device__ __forceinline__ float4 load_remote(const float4* from, int rank) {
  float4 v;
  u32 address = address_of(from);
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
