// The kernels for quantised weights, for x86-64 with AVX-512 (F, BW, DQ, VL).
#include "vec_avx512.h"

#include "ints_avx512.h"
#include "quants.inl"

namespace oneloop {
constinit const QuantKernels quants_avx512 = make_quant_kernels();
}
