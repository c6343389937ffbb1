// The kernels for quantised weights, for 64-bit ARM with Advanced SIMD.
#include "vec_neon.h"

#include "ints_neon.h"
#include "quants.inl"

namespace oneloop {
constinit const QuantKernels quants_neon = make_quant_kernels();
}
