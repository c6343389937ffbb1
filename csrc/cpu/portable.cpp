// The kernels for any machine.
#include "vec_portable.h"

#include "kernels.inl"

namespace oneloop {
constinit const Kernels kernels_portable = make_kernels("portable");
}
