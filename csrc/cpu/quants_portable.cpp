// The kernels for quantised weights, for any machine.
#include "vec_portable.h"

#include "ints_portable.h"
#include "quants.inl"

namespace oneloop {
constinit const QuantKernels quants_portable = make_quant_kernels();
}
