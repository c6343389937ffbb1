// The kernels for quantised weights, for 64-bit ARM with mixed dot products (FEAT_I8MM).
#include "vec_neon.h"

#include "ints_neon.h"
#include "quants.inl"

namespace oneloop {
constinit const QuantKernels quants_neoni8mm = make_quant_kernels();
}
