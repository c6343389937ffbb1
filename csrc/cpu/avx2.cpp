// The kernels for x86-64 with AVX2 and FMA.
#include "vec_avx2.h"

#include "kernels.inl"

namespace oneloop {
constinit const Kernels kernels_avx2 = make_kernels("avx2");
}
