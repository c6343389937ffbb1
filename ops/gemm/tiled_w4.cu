// out [M, N] = x weight^T of a weight in pieces (pieces.cuh), for any number of rows.
//
// A block computes WGS * 64 rows of the weight by ROWS rows of x, over a share of K. One thread keeps STAGES chunks of 128
// columns in flight, the weight's before the kernel that computes x ends; WGS warpgroups multiply. The `splits` blocks of a
// cluster share K; blocks of the same weight rows are adjacent. REGISTERS: registers per multiplying thread, if other threads
// release some.

template <class CODES, int ROWS, int WGS, int STAGES, int GROUPS, bool SCALED, bool GATED, int REGISTERS>
__device__ __forceinline__ void tiled_w4(const unsigned char* weight, const TensorMap* x_map, const u16* bias, u16* out, int M,
                                         int N, int K, int splits, int row_tiles, const unsigned char* next, int next_bytes) {
  extern __shared__ unsigned char shared[];
  __shared__ u64 full[STAGES], empty[STAGES];
  let_next_start();
  Ring<CODES, ROWS, WGS, STAGES, GROUPS, SCALED, GATED> ring(shared, full, empty);
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  const int split = blockIdx.x % splits, first_row = blockIdx.x / splits % row_tiles * ROWS, tile = blockIdx.x / splits / row_tiles;
  const int chunks = (K + CHUNK - 1) / CHUNK, first = chunks * split / splits, count = chunks * (split + 1) / splits - first;
  __syncthreads();

  if (warp >= ring.CONSUMERS / 32) {
    give_registers<REGISTERS>();
    if (threadIdx.x == ring.CONSUMERS) {
      const int pieces = (N + PIECE_ROWS - 1) / PIECE_ROWS, at_once = min(count, STAGES);
      for (ring.stage = 0; ring.stage < at_once; ring.stage++) ring.fetch_weight(weight, tile, pieces, chunks, first + ring.stage);
      wait_for_previous();
      for (ring.stage = 0; ring.stage < at_once; ring.stage++) ring.fetch_x(x_map, first_row, first + ring.stage);
      ring.stage = 0;
      for (int i = at_once; i < count; i++) {
        wait_for(empty + ring.stage, ring.parity);
        ring.fetch_weight(weight, tile, pieces, chunks, first + i);
        ring.fetch_x(x_map, first_row, first + i);
        ring.advance();
      }
      bring_ahead(next, next_bytes, blockIdx.x, gridDim.x);
    }
    __syncwarp();
    if (splits > 1) meet_cluster(), meet_cluster();
    return;
  }

  take_registers<REGISTERS>();
  float sums[ROWS / 2] = {};
  ring.multiply(sums, count);
  const int width = GATED ? N / 2 : N;
  const Rows rows{M - first_row, out + long(first_row) * width};
  write_tile<ROWS, ring.CONSUMERS, GATED>(sums, ring.x_stages, tile * WGS * 4 + warp, N, bias, rows, split, splits);
}

#define TILED_W4(NAME, CODES, ROWS, WGS, STAGES, GROUPS, SCALED, GATED, BLOCKS, THREADS, REGISTERS)                      \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                                          \
      NAME(const unsigned char* weight, const __grid_constant__ TensorMap x, const u16* bias, u16* out, int M, int N,    \
           int K, int splits, int row_tiles, const unsigned char* next, int next_bytes) {                                \
    tiled_w4<CODES, ROWS, WGS, STAGES, GROUPS, SCALED, GATED, REGISTERS>(weight, &x, bias, out, M, N, K, splits,         \
                                                                         row_tiles, next, next_bytes);                   \
  }
