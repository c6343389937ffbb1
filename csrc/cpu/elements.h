// Element types of weights, and conversion of single numbers.
#pragma once

#include <cstring>

#include "float16.h"
#include "kernels.h"

namespace oneloop {

static inline int64_t element_bytes(Element element) {
    return element == Element::kFloat32 ? 4 : element == Element::kInt8 ? 1 : 2;
}

static inline float float_at(const void* elements, Element element, int64_t index) {
    if (element == Element::kFloat32) return static_cast<const float*>(elements)[index];
    if (element == Element::kInt8) return static_cast<const int8_t*>(elements)[index];
    const uint16_t half = static_cast<const uint16_t*>(elements)[index];
    if (element == Element::kFloat16) return float_of(half);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

}  // namespace oneloop
