// Choice of the kernels' instruction set: the processor's widest, unless one is selected.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/quants.h"

namespace oneloop {

const Kernels& kernels();
const QuantKernels& quant_kernels();
const char* isa();
// Names of the instruction sets that this processor supports, widest first.
std::vector<std::string> available_isas();
// Throws std::invalid_argument for a name not among available_isas(). Packed weights serve every set.
void set_isa(const std::string& name);

}  // namespace oneloop
