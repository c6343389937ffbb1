// Made by csrc/generate.py from ops/formats.json.
#pragma once

// clang-format off
// X(name, ggml's id, columns of a block, bytes of a block, bits, minimum, super, halves): the last four as of QuantLayout.
#define ONELOOP_BLOCK_TYPES(X) \
    X(Q4_0, 2, 32, 18, 4, false, false, 1) \
    X(Q4_1, 3, 32, 20, 4, true, false, 1) \
    X(Q5_0, 6, 32, 22, 5, false, false, 1) \
    X(Q5_1, 7, 32, 24, 5, true, false, 1) \
    X(Q8_0, 8, 32, 34, 8, false, false, 1) \
    X(Q4_K, 12, 256, 144, 4, true, true, 1) \
    X(Q5_K, 13, 256, 176, 5, true, true, 1) \
    X(Q6_K, 14, 256, 210, 6, false, true, 2) \
    X(MXFP4, 39, 32, 17, 5, false, false, 1)
namespace oneloop {

constexpr float kE2m1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

}  // namespace oneloop
// clang-format on
