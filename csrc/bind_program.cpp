// Python bindings of Program: ops are checked when they are recorded, a step's inputs when it runs. The program owns the Python
// objects whose memory its ops use.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>

#include "checks.h"
#include "cpu/lora.h"
#include "cpu/program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace oneloop {
namespace {

struct CacheShape {
    int64_t blocks, block_size;
};

struct AttendShape {
    int64_t num_heads, num_kv_heads, head_size;
    float scale;
    int64_t window;  // 0 for none
    float softcap;   // 0 for none
};

constexpr int64_t kMaxWidth = int64_t{1} << 31;  // floats; twice this number does not overflow the counters

class BoundProgram {
public:
    int add_register(int64_t width) {
        if (finished()) throw nb::value_error("the program is finished");
        if (width < 1 || width > kMaxWidth) throw nb::value_error("a register's width is between 1 and 2^31");
        return program_.add_register(width);
    }

    void linear(nb::object linear_, int x, int out) {
        const Linear* linear = nb::cast<const Linear*>(linear_);
        expect(x, linear->k(), "x"), expect(out, linear->n(), "out"), apart(x, out);
        keep_.push_back(linear_);
        const int64_t k = linear->k(), n = linear->n();
        added_ = std::make_shared<Added>(out);
        program_.add(
            [=, added = added_](const Program::Frame& f) {
                if (added->slots && f.inputs.adapters) {
                    const Upcoming then = added->slots->upcoming(f.inputs.tokens, f.inputs.adapters);
                    return linear->matmul(f[x], f.inputs.tokens, k, f[out], n, &then);
                }
                linear->matmul(f[x], f.inputs.tokens, k, f[out], n);
            },
            {x, out});
    }

    // out += the adapters' product of x for a layer.
    void lora(nb::object slots_, int x, int out) {
        const LoraSlots* slots = nb::cast<const LoraSlots*>(slots_);
        const int64_t k = slots->k(), n = slots->n();
        expect(x, k, "x"), expect(out, n, "out"), apart(x, out);
        keep_.push_back(slots_);
        num_adapters_ = std::min(num_adapters_, slots->num_slots());
        if (added_ && added_->out == out) added_->slots = slots;
        program_.add(
            [=](const Program::Frame& f) {
                if (f.inputs.adapters) slots->add(f[x], f.inputs.tokens, k, f.inputs.adapters, f[out], n);
            },
            {x, out});
    }

    void rms_norm(int x, std::optional<int> residual, nb::object weight, float eps, int out) {
        const int64_t h = norm_width(x, residual, out);
        const float* scale = check_vector(Tensor(weight, "weight"), h);
        keep_.push_back(weight);
        if (residual)
            program_.add([=, r = *residual](
                             const Program::Frame& f) { add_rms_norm(f[x], h, f[r], h, f.inputs.tokens, h, scale, eps, f[out]); },
                         {x, *residual, out});
        else
            program_.add([=](const Program::Frame& f) { oneloop::rms_norm(f[x], f.inputs.tokens, 1, h, 0, h, scale, eps, f[out]); },
                         {x, out});
    }

    void layer_norm(int x, std::optional<int> residual, nb::object weight, nb::object bias, float eps, int out) {
        const int64_t h = norm_width(x, residual, out);
        const float *scale = check_optional(weight, "weight", h), *shift = check_optional(bias, "bias", h);
        keep_.push_back(weight), keep_.push_back(bias);
        if (residual)
            program_.add(
                [=, r = *residual](const Program::Frame& f) {
                    add_layer_norm(f[x], h, f[r], h, f.inputs.tokens, h, scale, shift, eps, f[out]);
                },
                {x, *residual, out});
        else
            program_.add(
                [=](const Program::Frame& f) { oneloop::layer_norm(f[x], f.inputs.tokens, 1, h, 0, h, scale, shift, eps, f[out]); },
                {x, out});
    }

    void attend(int qkv, int out, const AttendShape& s, nb::object cos_sin_, nb::object q_norm, nb::object k_norm, float eps,
                nb::object sinks_, nb::object k_cache_, nb::object v_cache_, size_t table) {
        const int64_t d = s.head_size, row = check_attend(qkv, out, s);
        const Tensor k_cache(k_cache_, "k_cache"), v_cache(v_cache_, "v_cache");
        const PagedCache cache = check_caches(k_cache, v_cache, s.num_kv_heads, d);
        const int64_t blocks = k_cache.size(0), block_size = cache.block_size;
        if (blocks < 1 || block_size < 1) k_cache.fail("has no room");
        note_cache(table, {blocks, block_size});
        const HeadNorms norms{check_optional(q_norm, "q_norm", d), check_optional(k_norm, "k_norm", d), eps};
        const Turns turns = check_turns(cos_sin_, d);
        const float* sinks = check_optional(sinks_, "sinks", s.num_heads);
        for (const nb::object& each : {cos_sin_, q_norm, k_norm, sinks_, k_cache_, v_cache_}) keep_.push_back(each);
        AttentionArgs args{nullptr,
                           row,
                           d,
                           cache.k.data,
                           cache.v.data,
                           cache.k.stride_b,
                           cache.k.stride_h,
                           cache.k.stride_s,
                           cache.v.stride_b,
                           cache.v.stride_h,
                           cache.v.stride_s,
                           cache.type,
                           block_size,
                           d,
                           s.num_heads / s.num_kv_heads,
                           s.scale,
                           s.window ? s.window : kNoWindow,
                           s.softcap,
                           sinks};
        program_.add(
            [=](const Program::Frame& f) {
                float* x = f[qkv];
                const Heads q{x, s.num_heads, row, d}, keys{x + s.num_heads * d, s.num_kv_heads, row, d},
                    values{x + (s.num_heads + s.num_kv_heads) * d, s.num_kv_heads, row, d};
                const StepTable& step = f.inputs.tables[table];
                norm_rope_store(q, keys, values, d, norms, turns, f.inputs.positions, cache, step.slots, f.inputs.tokens);
                AttentionArgs mine = args;
                mine.q = x;
                paged_attention(mine, step.lines, s.num_kv_heads, step.starts, step.lens, step.tables, step.stride_table, f[out],
                                s.num_heads * d, d);
            },
            {qkv, out});
    }

    // `attend` within the step's own rows, without a cache: each query attends to keys before and after it.
    void attend_packed(int qkv, int out, const AttendShape& s, nb::object cos_sin_, nb::object q_norm, nb::object k_norm, float eps,
                       nb::object sinks_) {
        const int64_t d = s.head_size, row = check_attend(qkv, out, s);
        const Turns turns = check_turns(cos_sin_, d);
        const HeadNorms norms{check_optional(q_norm, "q_norm", d), check_optional(k_norm, "k_norm", d), eps};
        const PackedScores scores{s.scale, s.window ? s.window : kNoWindow, s.softcap,
                                  check_optional(sinks_, "sinks", s.num_heads)};
        for (const nb::object& each : {cos_sin_, q_norm, k_norm, sinks_}) keep_.push_back(each);
        asks_for_rows_ = true;
        program_.add(
            [=](const Program::Frame& f) {
                float* x = f[qkv];
                const Heads q{x, s.num_heads, row, d}, keys{x + s.num_heads * d, s.num_kv_heads, row, d},
                    values{x + (s.num_heads + s.num_kv_heads) * d, s.num_kv_heads, row, d};
                norm_rope(q, keys, d, norms, turns, f.inputs.positions, f.inputs.tokens);
                packed_attention(q, keys, values, f.inputs.rows, f.inputs.starts, scores, d, f[out], s.num_heads * d, d);
            },
            {qkv, out});
    }

    void copy(int x, int out) {
        const int64_t n = program_.width(x);
        expect(out, n, "out"), apart(x, out);
        program_.add([=](const Program::Frame& f) { std::copy_n(f[x], n * f.inputs.tokens, f[out]); }, {x, out});
    }

    void zero(int x) {
        const int64_t n = program_.width(x);
        program_.add([=](const Program::Frame& f) { std::fill_n(f[x], n * f.inputs.tokens, 0.0f); }, {x});
    }

    void gated(int x, const std::string& activation, int out) {
        const int64_t half = program_.width(out);
        const Activation kind = activation_called(activation);
        expect(x, 2 * half, "x"), apart(x, out);
        program_.add([=](const Program::Frame& f) { oneloop::gated(kind, f[x], 2 * half, f.inputs.tokens, half, f[out]); },
                     {x, out});
    }

    void activate(int x, const std::string& activation, int out) {
        const int64_t n = program_.width(out);
        const Activation kind = activation_called(activation);
        expect(x, n, "x"), apart(x, out);
        program_.add([=](const Program::Frame& f) { oneloop::activate(kind, f[x], n, f.inputs.tokens, n, f[out]); }, {x, out});
    }

    void scale(int x, float factor) {
        const int64_t n = program_.width(x);
        program_.add([=](const Program::Frame& f) { oneloop::scale(f[x], n * f.inputs.tokens, factor); }, {x});
    }

    void add(int x, int y) {
        const int64_t n = program_.width(x);
        expect(y, n, "y");
        program_.add([=](const Program::Frame& f) { oneloop::add(f[x], f[y], n * f.inputs.tokens); }, {x, y});
    }

    int64_t size() const { return program_.size(); }
    bool finished() const { return program_.finished(); }
    void truncate(int64_t size) { program_.truncate(size); }
    void finish(std::vector<int> external) { program_.finish(std::move(external)); }

    // external: a [tokens, width] float32 tensor for each external register; tables: (slots, query_starts, context_lens,
    // block_tables) of each block table; unused tables are not read. adapters: [tokens] int32, or None.
    void run(nb::list external_, nb::handle positions_, nb::list tables_, nb::handle adapters_) {
        if (!finished()) throw nb::value_error("the program is not finished");
        const Tensor positions(positions_, "positions");
        const int64_t tokens = positions.typed(Type::kInt64).shaped({-1}).contiguous().size(0);
        check_range<int64_t>(positions, 0, max_positions_);
        if (nb::len(external_) != program_.external().size()) throw nb::value_error("not a tensor for each external register");
        std::vector<float*> external;
        for (nb::handle each : external_) {
            const Tensor tensor(each, "external");
            const int64_t width = program_.width(program_.external()[external.size()]);
            external.push_back(tensor.typed(Type::kFloat32).shaped({tokens, width}).contiguous().data<float>());
        }
        if (nb::len(tables_) < caches_.size()) throw nb::value_error("fewer tables than ops use");
        StepInputs inputs{tokens, positions.data<int64_t>(), nullptr, {}};
        if (!adapters_.is_none()) {
            const Tensor adapters(adapters_, "adapters");
            adapters.typed(Type::kInt32).shaped({tokens}).contiguous();
            check_range<int32_t>(adapters, -1, num_adapters_);
            inputs.adapters = adapters.data<int32_t>();
        }
        inputs.tables.resize(caches_.size());
        for (size_t i = 0; i < caches_.size(); i++)
            if (caches_[i]) inputs.tables[i] = step_table(tables_[i], tokens, *caches_[i]);
        if (asks_for_rows_) {
            if (nb::len(tables_) < 1) throw nb::value_error("there is no table to take the rows from");
            const Tensor starts(tables_[0][1], "query_starts");
            inputs.rows = check_packed_rows(starts, tokens), inputs.starts = starts.data<int32_t>();
        }
        if (tokens == 0) return;
        nb::gil_scoped_release unlocked;
        program_.run(inputs, external);
    }

private:
    static StepTable step_table(nb::handle parts, int64_t tokens, CacheShape cache) {
        const Tensor slots(parts[0], "slots"), starts(parts[1], "query_starts"), lens(parts[2], "context_lens"),
            tables(parts[3], "block_tables");
        slots.typed(Type::kInt64).shaped({tokens}).contiguous();
        lens.typed(Type::kInt32).shaped({-1}).contiguous();
        starts.typed(Type::kInt32).shaped({lens.size(0) + 1}).contiguous();
        tables.typed(Type::kInt32).shaped({lens.size(0), -1}).row_contiguous();
        check_range<int64_t>(slots, -1, cache.blocks * cache.block_size);
        check_rows(starts, lens, tables, tokens, cache.blocks, cache.block_size);
        return {slots.data<int64_t>(),  starts.data<int32_t>(), lens.data<int32_t>(),
                tables.data<int32_t>(), lens.size(0),           tables.stride(0)};
    }

    // Returns the width of a row of qkv, if all arguments match.
    int64_t check_attend(int qkv, int out, const AttendShape& s) const {
        const int64_t d = s.head_size;
        if (d < 8 || d % 8) throw nb::value_error("head_size is not a multiple of 8");
        if (s.num_kv_heads < 1 || s.num_heads < 1 || s.num_heads % s.num_kv_heads)
            throw nb::value_error("heads do not fit kv heads");
        if (s.num_heads > program_.width(qkv) / d) throw nb::value_error("heads do not fit qkv");
        if (s.window < 0 || !(s.softcap >= 0)) throw nb::value_error("window or softcap is negative");
        const int64_t row = (s.num_heads + 2 * s.num_kv_heads) * d;
        expect(qkv, row, "qkv"), expect(out, s.num_heads * d, "out"), apart(qkv, out);
        return row;
    }

    Turns check_turns(nb::handle cos_sin_, int64_t d) {
        const Tensor cos_sin(cos_sin_, "cos_sin");
        cos_sin.typed(Type::kFloat32).shaped({-1, -1}).row_contiguous();
        if (cos_sin.size(1) > d || cos_sin.size(1) % 2) cos_sin.fail("turns a number of dims that heads do not have");
        if (cos_sin.size(1)) max_positions_ = std::min(max_positions_, cos_sin.size(0));
        return {cos_sin.data<float>(), cos_sin.stride(0), cos_sin.size(1) / 2};
    }

    void note_cache(size_t table, CacheShape shape) {
        if (table >= 64) throw nb::value_error("no such table");
        if (caches_.size() <= table) caches_.resize(table + 1);
        if (!caches_[table]) caches_[table] = shape;
        if (caches_[table]->block_size != shape.block_size) throw nb::value_error("caches of one table differ in their blocks");
        caches_[table]->blocks = std::min(caches_[table]->blocks, shape.blocks);
    }

    void expect(int reg, int64_t width, const char* name) const {
        if (program_.width(reg) != width)
            throw nb::value_error(
                (std::string(name) + " is " + std::to_string(program_.width(reg)) + " wide, expected " + std::to_string(width))
                    .c_str());
    }

    static void apart(int x, int out) {
        if (x == out) throw nb::value_error("an op cannot write what it reads");
    }

    int64_t norm_width(int x, std::optional<int> residual, int out) const {
        const int64_t h = program_.width(x);
        expect(out, h, "out"), apart(x, out);
        if (residual) expect(*residual, h, "residual"), apart(x, *residual), apart(*residual, out);
        return h;
    }

    Program program_;
    // A linear layer's output and its adapters, which it prefetches; `slots` is null without adapters.
    struct Added {
        explicit Added(int to) : out(to) {}
        int out;
        const LoraSlots* slots = nullptr;
    };
    std::shared_ptr<Added> added_;  // of the last linear layer
    std::vector<nb::object> keep_;
    std::vector<std::optional<CacheShape>> caches_;  // by table
    int64_t max_positions_ = INT64_MAX, num_adapters_ = INT64_MAX;
    bool asks_for_rows_ = false;
};

}  // namespace

void bind_program(nb::module_& m) {
    nb::class_<AttendShape>(m, "AttendShape")
        .def(nb::init<int64_t, int64_t, int64_t, float, int64_t, float>(), "num_heads"_a, "num_kv_heads"_a, "head_size"_a,
             "scale"_a, "window"_a = 0, "softcap"_a = 0.0f);
    nb::class_<BoundProgram>(m, "Program", "Ops on registers [tokens, width] float32, recorded once, run by one call.")
        .def(nb::init<>())
        .def("register", &BoundProgram::add_register, "width"_a)
        .def("linear", &BoundProgram::linear, "linear"_a, "x"_a, "out"_a)
        .def("lora", &BoundProgram::lora, "slots"_a, "x"_a, "out"_a)
        .def("rms_norm", &BoundProgram::rms_norm, "x"_a, "residual"_a.none(), "weight"_a, "eps"_a, "out"_a)
        .def("layer_norm", &BoundProgram::layer_norm, "x"_a, "residual"_a.none(), "weight"_a.none(), "bias"_a.none(), "eps"_a,
             "out"_a)
        .def("attend", &BoundProgram::attend, "qkv"_a, "out"_a, "shape"_a, "cos_sin"_a, "q_norm"_a.none(), "k_norm"_a.none(),
             "eps"_a, "sinks"_a.none(), "k_cache"_a, "v_cache"_a, "table"_a)
        .def("attend_packed", &BoundProgram::attend_packed, "qkv"_a, "out"_a, "shape"_a, "cos_sin"_a, "q_norm"_a.none(),
             "k_norm"_a.none(), "eps"_a, "sinks"_a.none())
        .def("copy", &BoundProgram::copy, "x"_a, "out"_a)
        .def("zero", &BoundProgram::zero, "x"_a)
        .def("gated", &BoundProgram::gated, "x"_a, "activation"_a, "out"_a)
        .def("activate", &BoundProgram::activate, "x"_a, "activation"_a, "out"_a)
        .def("scale", &BoundProgram::scale, "x"_a, "factor"_a)
        .def("add", &BoundProgram::add, "x"_a, "y"_a)
        .def("__len__", &BoundProgram::size)
        .def("truncate", &BoundProgram::truncate, "size"_a)
        .def("finish", &BoundProgram::finish, "external"_a)
        .def_prop_ro("finished", &BoundProgram::finished)
        .def("run", &BoundProgram::run, "external"_a, "positions"_a, "tables"_a, "adapters"_a.none() = nb::none());
}

}  // namespace oneloop
