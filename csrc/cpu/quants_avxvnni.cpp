// The kernels for quantised weights, for x86-64 with AVX2, FMA and F16C and AVX-VNNI.
#include "vec_avx2.h"

#include "ints_avx2.h"
#include "quants.inl"

namespace oneloop {
constinit const QuantKernels quants_avxvnni = make_quant_kernels();
}
