// The kernels for x86-64 with AVX-512 F, BW, DQ and VL.
#include "vec_avx512.h"

#include "kernels.inl"

namespace oneloop {
constinit const Kernels kernels_avx512 = make_kernels("avx512");
}
