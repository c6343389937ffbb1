// The kernels, written once over Vec (vec_*.h) and compiled once per instruction set; one file an op in kernels/.
//
// Include after a vec_*.h, inside a file with that instruction set's flags. Everything is in an unnamed namespace, and no
// template of the standard library is used: a shared symbol compiled with wider instructions could otherwise be the
// one the linker keeps for everybody. Tables are static inside functions: a global initialiser would run these
// instructions at load, on any machine.

#include "kernels.h"

namespace {

using oneloop::Activation;
using oneloop::AttentionArgs;
using oneloop::AttentionState;
using oneloop::AttentionTask;
using oneloop::CacheType;
using oneloop::Element;
using oneloop::kKeyTile;
using oneloop::kPanel;
using oneloop::kSegment;
using oneloop::LinearArgs;
using oneloop::OneRow;

#include "kernels/math.inl"

#include "kernels/gemm.inl"
#include "kernels/norm.inl"
#include "kernels/rope.inl"
#include "kernels/activation.inl"
#include "kernels/kv.inl"
#include "kernels/attention_keys.inl"
#include "kernels/attention.inl"
#include "kernels/sampling.inl"

constexpr oneloop::Kernels make_kernels(const char* name) {
    return {name, W,        kTileRows,   linear,  one_rows,  add_one_row, pack_tile, rms_norm, layer_norm,
            rope, activate, to_bfloat16, to_int8, attention, merge,       finish,    largest};
}

}  // namespace
