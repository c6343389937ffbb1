// The kernels for 64-bit ARM, every one of which has Advanced SIMD.
#include "vec_neon.h"

#include "kernels.inl"

namespace oneloop {
constinit const Kernels kernels_neon = make_kernels("neon");
}
