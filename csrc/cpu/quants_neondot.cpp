// The kernels for quantised weights, for 64-bit ARM with dot products (FEAT_DotProd).
#include "vec_neon.h"

#include "ints_neon.h"
#include "quants.inl"

namespace oneloop {
constinit const QuantKernels quants_neondot = make_quant_kernels();
}
