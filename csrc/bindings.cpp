// The Python module oneloop_native: each op checks every shape, releases the GIL and runs.
//
// The caller allocates outputs and passes them in. After the checks no kernel can access memory outside its tensors, whatever
// numbers they contain. Wrong shapes raise ValueError, wrong element types or devices TypeError.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "checks.h"
#include "cpu/drivers.h"
#include "cpu/lora.h"
#include "cpu/quant_pack.h"
#include "isa.h"
#include "tensor.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace oneloop {

void bind_program(nb::module_& m);  // bind_program.cpp

namespace {

Heads heads(const Tensor& x) { return {x.data<float>(), x.size(1), x.stride(0), x.stride(1)}; }

void check_heads(const Tensor& x, int64_t tokens, int64_t num_heads, int64_t head_size) {
    x.typed(Type::kFloat32).shaped({tokens, num_heads, head_size}).row_contiguous();
}

// weight [N, K] of any element type the kernels read.
Element element_of(const Tensor& weight) {
    if (weight.type() == Type::kInt8) return Element::kInt8;
    if (weight.type() == Type::kBFloat16) return Element::kBFloat16;
    if (weight.type() == Type::kFloat16) return Element::kFloat16;
    weight.typed(Type::kFloat32);
    return Element::kFloat32;
}

const float* bias_of(nb::handle bias, int64_t n) {
    return bias.is_none() ? nullptr : Tensor(bias, "bias").typed(Type::kFloat32).shaped({n}).contiguous().data<float>();
}

template <class Made>
Made* make_from_floats(nb::handle weight_, nb::handle bias_) {
    const Tensor weight(weight_, "weight");
    const Element element = element_of(weight);
    weight.shaped({-1, -1});
    if (weight.size(1) == 0) weight.fail("has no input features");
    const float* bias = bias_of(bias_, weight.size(0));
    nb::gil_scoped_release unlocked;
    return new Made(weight.data<void>(), element, weight.size(0), weight.size(1), weight.stride(0), weight.stride(1), bias);
}

QuantType quant_type(const std::string& name) {
#define ONELOOP_NAMED(known, ...) \
    if (name == #known) return QuantType::k##known;
    ONELOOP_BLOCK_TYPES(ONELOOP_NAMED)
    throw std::invalid_argument("no kernel reads the type '" + name + "'");
}

QuantLinear* make_quant(const std::string& type_name, nb::handle raw_, nb::handle bias_) {
    const QuantType type = quant_type(type_name);
    const StoredBlock block = stored_block(type);
    const Tensor raw(raw_, "raw");
    raw.typed(Type::kUInt8).shaped({-1, -1}).row_contiguous();
    const int64_t n = raw.size(0), row_bytes = raw.size(1);
    if (row_bytes == 0 || row_bytes % block.bytes)
        raw.fail("has rows of " + std::to_string(row_bytes) + " bytes, not of whole blocks of " + std::to_string(block.bytes));
    const float* bias = bias_of(bias_, n);
    nb::gil_scoped_release unlocked;
    return new QuantLinear(type, raw.data<uint8_t>(), raw.stride(0), n, row_bytes / block.bytes * block.weights, bias);
}

void matmul(const Linear& packed, nb::handle x_, nb::handle out_) {
    const Tensor x(x_, "x"), out(out_, "out");
    x.typed(Type::kFloat32).shaped({-1, packed.k()}).row_contiguous();
    out.typed(Type::kFloat32).shaped({x.size(0), packed.n()}).row_contiguous();
    nb::gil_scoped_release unlocked;
    packed.matmul(x.data<float>(), x.size(0), x.stride(0), out.data<float>(), out.stride(0));
}

// parts: (expand, start, offset, scale) of each.
using LoraPart = std::tuple<std::shared_ptr<PackedLinear>, int64_t, int64_t, float>;

LoraShare* make_lora_share(std::shared_ptr<PackedLinear> shrink, const std::vector<LoraPart>& parts_, int64_t out_features,
                           std::vector<float> rank_scales) {
    std::vector<LoraShare::Part> parts;
    for (const auto& [expand, start, offset, scale] : parts_) parts.push_back({expand, start, offset, scale});
    return new LoraShare(std::move(shrink), std::move(parts), out_features, std::move(rank_scales));
}

void bind_lora_add(const LoraSlots& slots, nb::handle x_, nb::handle adapters_, nb::handle out_) {
    const Tensor x(x_, "x"), adapters(adapters_, "adapters"), out(out_, "out");
    x.typed(Type::kFloat32).shaped({-1, slots.k()}).row_contiguous();
    adapters.typed(Type::kInt32).shaped({x.size(0)}).contiguous();
    out.typed(Type::kFloat32).shaped({x.size(0), slots.n()}).row_contiguous();
    check_range<int32_t>(adapters, -1, slots.num_slots());
    nb::gil_scoped_release unlocked;
    slots.add(x.data<float>(), x.size(0), x.stride(0), adapters.data<int32_t>(), out.data<float>(), out.stride(0));
}

void packed_rows(const Linear& packed, nb::handle ids_, nb::handle out_) {
    const Tensor ids(ids_, "ids"), out(out_, "out");
    ids.typed(Type::kInt64).shaped({-1}).contiguous();
    out.typed(Type::kFloat32).shaped({ids.size(0), packed.k()}).contiguous();
    check_range<int64_t>(ids, 0, packed.n());
    nb::gil_scoped_release unlocked;
    packed.rows(ids.data<int64_t>(), ids.size(0), out.data<float>());
}

// Rows [outer, inner, h] of a tensor with one to three dimensions, strided in all but the last, and their output.
struct Rows {
    int64_t outer, inner, h, stride_outer, stride_inner;
};

Rows check_norm_rows(const Tensor& x, const Tensor& out) {
    const int64_t rank = x.rank();
    if (rank < 1 || rank > 3) x.fail("has " + std::to_string(rank) + " dimensions, expected 1 to 3");
    const Rows rows{rank > 1 ? x.size(0) : 1, rank > 2 ? x.size(1) : 1, x.size(rank - 1), rank > 1 ? x.stride(0) : 0,
                    rank > 2 ? x.stride(1) : 0};
    x.typed(Type::kFloat32).row_contiguous();
    out.typed(Type::kFloat32).contiguous();
    if (rank == 1) out.shaped({rows.h});
    if (rank == 2) out.shaped({rows.outer, rows.h});
    if (rank == 3) out.shaped({rows.outer, rows.inner, rows.h});
    return rows;
}

void check_add_rows(const Tensor& x, const Tensor& residual, const Tensor& out) {
    x.typed(Type::kFloat32).shaped({-1, -1}).row_contiguous();
    residual.typed(Type::kFloat32).shaped({x.size(0), x.size(1)}).row_contiguous();
    out.typed(Type::kFloat32).shaped({x.size(0), x.size(1)}).contiguous();
}

void bind_rms_norm(nb::handle x_, nb::handle weight_, float eps, nb::handle out_) {
    const Tensor x(x_, "x"), weight(weight_, "weight"), out(out_, "out");
    const Rows rows = check_norm_rows(x, out);
    const float* scale = check_vector(weight, rows.h);
    nb::gil_scoped_release unlocked;
    rms_norm(x.data<float>(), rows.outer, rows.inner, rows.stride_outer, rows.stride_inner, rows.h, scale, eps, out.data<float>());
}

void bind_add_rms_norm(nb::handle x_, nb::handle residual_, nb::handle weight_, float eps, nb::handle out_) {
    const Tensor x(x_, "x"), residual(residual_, "residual"), weight(weight_, "weight"), out(out_, "out");
    check_add_rows(x, residual, out);
    const float* scale = check_vector(weight, x.size(1));
    nb::gil_scoped_release unlocked;
    add_rms_norm(x.data<float>(), x.stride(0), residual.data<float>(), residual.stride(0), x.size(0), x.size(1), scale, eps,
                 out.data<float>());
}

void bind_layer_norm(nb::handle x_, nb::handle weight_, nb::handle bias_, float eps, nb::handle out_) {
    const Tensor x(x_, "x"), out(out_, "out");
    const Rows rows = check_norm_rows(x, out);
    const float *scale = check_optional(weight_, "weight", rows.h), *shift = check_optional(bias_, "bias", rows.h);
    nb::gil_scoped_release unlocked;
    layer_norm(x.data<float>(), rows.outer, rows.inner, rows.stride_outer, rows.stride_inner, rows.h, scale, shift, eps,
               out.data<float>());
}

void bind_add_layer_norm(nb::handle x_, nb::handle residual_, nb::handle weight_, nb::handle bias_, float eps, nb::handle out_) {
    const Tensor x(x_, "x"), residual(residual_, "residual"), out(out_, "out");
    check_add_rows(x, residual, out);
    const int64_t h = x.size(1);
    const float *scale = check_optional(weight_, "weight", h), *shift = check_optional(bias_, "bias", h);
    nb::gil_scoped_release unlocked;
    add_layer_norm(x.data<float>(), x.stride(0), residual.data<float>(), residual.stride(0), x.size(0), h, scale, shift, eps,
                   out.data<float>());
}

void bind_rope(nb::handle q_, nb::handle k_, nb::handle positions_, nb::handle cos_sin_, bool interleaved) {
    const Tensor q(q_, "q"), k(k_, "k"), positions(positions_, "positions"), cos_sin(cos_sin_, "cos_sin");
    check_heads(q, -1, -1, -1);
    const int64_t tokens = q.size(0), head_size = q.size(2);
    check_heads(k, tokens, -1, head_size);
    positions.typed(Type::kInt64).shaped({tokens}).contiguous();
    cos_sin.typed(Type::kFloat32).shaped({-1, -1}).row_contiguous();
    const int64_t turned = cos_sin.size(1);
    if (turned > head_size || turned % 2)
        cos_sin.fail("turns " + std::to_string(turned) + " dims of heads with " + std::to_string(head_size));
    check_range<int64_t>(positions, 0, cos_sin.size(0));
    nb::gil_scoped_release unlocked;
    rope(heads(q), heads(k), tokens, positions.data<int64_t>(), cos_sin.data<float>(), cos_sin.stride(0), turned / 2, interleaved);
}

void bind_store_kv(nb::handle k_, nb::handle v_, nb::handle k_cache_, nb::handle v_cache_, nb::handle slots_) {
    const Tensor k(k_, "k"), v(v_, "v"), k_cache(k_cache_, "k_cache"), v_cache(v_cache_, "v_cache"), slots(slots_, "slots");
    check_heads(k, -1, -1, -1);
    const int64_t tokens = k.size(0), kv_heads = k.size(1), head_size = k.size(2);
    check_heads(v, tokens, kv_heads, head_size);
    const PagedCache cache = check_caches(k_cache, v_cache, kv_heads, head_size);
    slots.typed(Type::kInt64).shaped({tokens}).contiguous();
    check_range<int64_t>(slots, -1, k_cache.size(0) * cache.block_size);
    nb::gil_scoped_release unlocked;
    store_kv(heads(k), heads(v), cache, head_size, slots.data<int64_t>(), tokens);
}

void bind_paged_attention(nb::handle q_, nb::handle k_cache_, nb::handle v_cache_, nb::handle starts_, nb::handle lens_,
                          nb::handle tables_, float scale, nb::handle out_, int64_t window, float softcap, nb::handle sinks_) {
    const Tensor q(q_, "q"), k_cache(k_cache_, "k_cache"), v_cache(v_cache_, "v_cache"), starts(starts_, "query_starts"),
        lens(lens_, "context_lens"), tables(tables_, "block_tables"), out(out_, "out");
    check_heads(q, -1, -1, -1);
    const int64_t tokens = q.size(0), num_heads = q.size(1), head_size = q.size(2);
    if (head_size == 0 || head_size % 8) q.fail("has a head size that is not a multiple of 8: " + std::to_string(head_size));
    check_heads(out, tokens, num_heads, head_size);
    const PagedCache cache = check_caches(k_cache, v_cache, -1, head_size);
    const Cache &k = cache.k, &v = cache.v;
    const int64_t blocks = k_cache.size(0), kv_heads = k_cache.size(1), block_size = cache.block_size;
    if (kv_heads == 0 || block_size == 0) k_cache.fail("has no head or no room in a block");
    if (num_heads % kv_heads) q.fail("has " + std::to_string(num_heads) + " heads for " + std::to_string(kv_heads) + " kv heads");
    lens.typed(Type::kInt32).shaped({-1}).contiguous();
    starts.typed(Type::kInt32).shaped({lens.size(0) + 1}).contiguous();
    tables.typed(Type::kInt32).shaped({lens.size(0), -1}).row_contiguous();
    check_rows(starts, lens, tables, tokens, blocks, block_size);
    if (window < 0) throw nb::value_error("window is negative");
    if (!(softcap >= 0)) throw nb::value_error("softcap is negative");
    const float* sinks = nullptr;
    if (!sinks_.is_none()) sinks = Tensor(sinks_, "sinks").typed(Type::kFloat32).shaped({num_heads}).contiguous().data<float>();
    if (tokens == 0 || num_heads == 0) return;
    const AttentionArgs args{q.data<float>(),
                             q.stride(0),
                             q.stride(1),
                             k.data,
                             v.data,
                             k.stride_b,
                             k.stride_h,
                             k.stride_s,
                             v.stride_b,
                             v.stride_h,
                             v.stride_s,
                             cache.type,
                             block_size,
                             head_size,
                             num_heads / kv_heads,
                             scale,
                             window ? window : kNoWindow,
                             softcap,
                             sinks};
    nb::gil_scoped_release unlocked;
    paged_attention(args, lens.size(0), kv_heads, starts.data<int32_t>(), lens.data<int32_t>(), tables.data<int32_t>(),
                    tables.stride(0), out.data<float>(), out.stride(0), out.stride(1));
}

void bind_packed_attention(nb::handle q_, nb::handle k_, nb::handle v_, nb::handle starts_, float scale, nb::handle out_,
                           int64_t window, float softcap, nb::handle sinks_) {
    const Tensor q(q_, "q"), k(k_, "k"), v(v_, "v"), starts(starts_, "query_starts"), out(out_, "out");
    check_heads(q, -1, -1, -1);
    const int64_t tokens = q.size(0), num_heads = q.size(1), head_size = q.size(2);
    if (head_size == 0 || head_size % 8) q.fail("has a head size that is not a multiple of 8: " + std::to_string(head_size));
    check_heads(out, tokens, num_heads, head_size);
    check_heads(k, tokens, -1, head_size);
    const int64_t kv_heads = k.size(1);
    check_heads(v, tokens, kv_heads, head_size);
    if (kv_heads == 0 || num_heads % kv_heads)
        q.fail("has " + std::to_string(num_heads) + " heads for " + std::to_string(kv_heads) + " kv heads");
    const int64_t rows = check_packed_rows(starts, tokens);
    if (window < 0) throw nb::value_error("window is negative");
    if (!(softcap >= 0)) throw nb::value_error("softcap is negative");
    const float* sinks = nullptr;
    if (!sinks_.is_none()) sinks = Tensor(sinks_, "sinks").typed(Type::kFloat32).shaped({num_heads}).contiguous().data<float>();
    if (tokens == 0 || num_heads == 0) return;
    const PackedScores scores{scale, window ? window : kNoWindow, softcap, sinks};
    nb::gil_scoped_release unlocked;
    packed_attention(heads(q), heads(k), heads(v), rows, starts.data<int32_t>(), scores, head_size, out.data<float>(),
                     out.stride(0), out.stride(1));
}

void bind_gated(nb::handle gate_up_, const std::string& activation, nb::handle out_) {
    const Tensor gate_up(gate_up_, "gate_up"), out(out_, "out");
    const Activation kind = activation_called(activation);
    gate_up.typed(Type::kFloat32).shaped({-1, -1}).row_contiguous();
    if (gate_up.size(1) % 2) gate_up.fail("has an odd number of columns");
    const int64_t rows = gate_up.size(0), half = gate_up.size(1) / 2;
    out.typed(Type::kFloat32).shaped({rows, half}).contiguous();
    nb::gil_scoped_release unlocked;
    gated(kind, gate_up.data<float>(), gate_up.stride(0), rows, half, out.data<float>());
}

void bind_silu_mul(nb::handle gate_up, nb::handle out) { bind_gated(gate_up, "silu", out); }

void bind_activate(nb::handle x_, const std::string& activation, nb::handle out_) {
    const Tensor x(x_, "x"), out(out_, "out");
    const Activation kind = activation_called(activation);
    x.typed(Type::kFloat32).shaped({-1, -1}).row_contiguous();
    out.typed(Type::kFloat32).shaped({x.size(0), x.size(1)}).contiguous();
    nb::gil_scoped_release unlocked;
    activate(kind, x.data<float>(), x.stride(0), x.size(0), x.size(1), out.data<float>());
}

// Samples rows that need only their largest logit; returns the other rows.
std::vector<int64_t> bind_sample_largest(nb::handle logits_, nb::handle rows_, nb::handle records_, nb::handle last_ids_,
                                         nb::handle ids_) {
    const Tensor logits(logits_, "logits"), rows(rows_, "sample_rows"), records(records_, "records"),
        last_ids(last_ids_, "last_ids"), ids(ids_, "ids");
    const int64_t lines = logits.typed(Type::kFloat32).shaped({-1, -1}).row_contiguous().size(0);
    rows.typed(Type::kInt32).shaped({lines}).contiguous();
    ids.typed(Type::kInt64).shaped({lines}).contiguous();
    records.typed(Type::kInt32).shaped({-1, -1}).contiguous();
    last_ids.typed(Type::kInt64).shaped({records.size(0)}).contiguous();
    check_range<int32_t>(rows, -1, records.size(0));
    if (records.size(1) < 1 || logits.size(1) < 1) logits.fail("or records have no columns");
    const int32_t* row = rows.data<int32_t>();
    std::vector<uint8_t> needs_more(lines);
    std::vector<int64_t> others;
    for (int64_t i = 0; i < lines; i++) {
        needs_more[i] = row[i] >= 0 && records.data<int32_t>()[row[i] * records.size(1)] != 0;
        if (needs_more[i]) others.push_back(i);
    }
    nb::gil_scoped_release unlocked;
    int64_t* id = ids.data<int64_t>();
    largest(logits.data<float>(), logits.stride(0), lines, logits.size(1), needs_more.data(), id);
    for (int64_t i = 0; i < lines; i++)
        if (!needs_more[i] && row[i] >= 0) last_ids.data<int64_t>()[row[i]] = id[i] < 0 ? 0 : id[i];
    return others;
}

}  // namespace
}  // namespace oneloop

NB_MODULE(oneloop_native, m) {
    using namespace oneloop;
    m.doc() = "CPU kernels of oneloop. Use them through the ops package.";
    m.def("set_num_threads", &set_num_threads, "n"_a);
    m.def("num_threads", &num_threads);
    m.def("isas", &available_isas, "Instruction sets this processor has kernels for, widest first.");
    m.def("isa", [] { return std::string(isa()); });
    m.def("set_isa", &set_isa, "name"_a, "Choose among isas(); for tests and measurements.");

    nb::class_<Linear>(m, "Linear", "A linear layer's weight [N, K], packed for the kernels.")
        .def_prop_ro("out_features", &Linear::n)
        .def_prop_ro("in_features", &Linear::k)
        .def_prop_ro("nbytes", &Linear::nbytes)
        .def("matmul", &matmul, "x"_a, "out"_a)
        .def("rows", &packed_rows, "ids"_a, "out"_a);
    nb::class_<PackedLinear, Linear>(m, "PackedLinear", "weight [N, K] as it came: float32, bfloat16, float16, or int8.")
        .def(nb::new_(&make_from_floats<PackedLinear>), "weight"_a, "bias"_a.none() = nb::none());
    nb::class_<QuantLinear, Linear>(m, "QuantLinear", "The weight in blocks of a GGUF type.")
        .def(nb::new_(&make_quant), "type"_a, "raw"_a, "bias"_a.none() = nb::none(),
             "raw [N, bytes of a row] uint8, as in the file.")
        .def_static("rounded", &make_from_floats<QuantLinear>, "weight"_a, "bias"_a.none() = nb::none(),
                    "weight [N, K] rounded to Q8_0.");
    nb::class_<ShortLinear, Linear>(m, "ShortLinear", "weight [N, K] rounded to sixteen bits.")
        .def(nb::new_(&make_from_floats<ShortLinear>), "weight"_a, "bias"_a.none() = nb::none());
    nb::class_<StackedLinear, Linear>(m, "StackedLinear", "Layers with the same inputs as one, outputs side by side.")
        .def(nb::init<std::vector<std::shared_ptr<Linear>>>(), "parts"_a);

    nb::class_<LoraShare>(m, "LoraShare", "What one adapter does to one linear layer.")
        .def(nb::new_(&make_lora_share), "shrink"_a, "parts"_a, "out_features"_a, "rank_scales"_a = std::vector<float>{});
    nb::class_<LoraSlots>(m, "LoraSlots", "The shares of one linear layer, by slot.")
        .def(nb::init<int64_t, int64_t, int64_t>(), "out_features"_a, "in_features"_a, "num_slots"_a)
        .def("put", &LoraSlots::put, "slot"_a, "share"_a.none())
        .def("add", &bind_lora_add, "x"_a, "adapters"_a, "out"_a, "out += what each row's adapter adds; -1: nothing.");

    m.def("rms_norm", &bind_rms_norm, "x"_a, "weight"_a, "eps"_a, "out"_a);
    m.def("add_rms_norm", &bind_add_rms_norm, "x"_a, "residual"_a, "weight"_a, "eps"_a, "out"_a);
    m.def("layer_norm", &bind_layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a, "out"_a);
    m.def("add_layer_norm", &bind_add_layer_norm, "x"_a, "residual"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a, "out"_a);
    m.def("rope", &bind_rope, "q"_a, "k"_a, "positions"_a, "cos_sin"_a, "interleaved"_a);
    m.def("store_kv", &bind_store_kv, "k"_a, "v"_a, "k_cache"_a, "v_cache"_a, "slots"_a);
    m.def("packed_attention", &bind_packed_attention, "q"_a, "k"_a, "v"_a, "query_starts"_a, "scale"_a, "out"_a, "window"_a = 0,
          "softcap"_a = 0.0f, "sinks"_a.none() = nb::none());
    m.def("paged_attention", &bind_paged_attention, "q"_a, "k_cache"_a, "v_cache"_a, "query_starts"_a, "context_lens"_a,
          "block_tables"_a, "scale"_a, "out"_a, "window"_a = 0, "softcap"_a = 0.0f, "sinks"_a.none() = nb::none());
    m.def("silu_mul", &bind_silu_mul, "gate_up"_a, "out"_a);
    m.def("gated", &bind_gated, "gate_up"_a, "activation"_a, "out"_a);
    m.def("activate", &bind_activate, "x"_a, "activation"_a, "out"_a);
    m.def("sample_largest", &bind_sample_largest, "logits"_a, "sample_rows"_a, "records"_a, "last_ids"_a, "ids"_a,
          "The first word of a row's record is not zero where it needs more than its largest logit.");
    bind_program(m);
}
