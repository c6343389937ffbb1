// Every kernel of every instruction set that this processor has, beside plain arithmetic in double precision.
//
// A program without Python, so that one processor's kernels can be tried in an emulator of it: tests/nightly/test_arm.py does. It
// prints the names of the sets, then one line for each comparison that failed, and ends with 1 if there was one. Sets of ARM
// have one width and all fuse a multiply with an add, so their results must also be each other's, bit for bit.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "../../../csrc/cpu/drivers.h"
#include "../../../csrc/cpu/elements.h"
#include "../../../csrc/cpu/shorts.h"
#include "../../../csrc/isa.h"

using namespace oneloop;

namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

std::mt19937 random_bits(1);
int failures = 0;

float normal() { return std::normal_distribution<float>()(random_bits); }
Floats normals(int64_t n, float scale = 1.0f) {
    Floats x(n);
    for (float& value : x) value = normal() * scale;
    return x;
}
uint16_t bfloat16_of(float x) {  // towards zero: only for making weights
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>(bits >> 16);
}

void fail(const std::string& what, const char* how, int64_t at, double got, double wanted) {
    std::printf("%s, %s: %s at %lld: %.9g, wanted %.9g\n", isa(), what.c_str(), how, static_cast<long long>(at), got, wanted);
    failures++;
}

// `run` under each set: within `tolerance` of `wanted` (each element's own), and on ARM the same bits from all.
void compare(const std::string& what, const std::function<Floats()>& run, const Doubles& wanted, const Doubles& tolerance) {
    Floats first;
    for (const std::string& name : available_isas()) {
        set_isa(name);
        const Floats got = run();
        for (size_t i = 0; i < wanted.size(); i++) {
            const bool same = std::isnan(wanted[i])   ? std::isnan(got[i])
                              : std::isinf(wanted[i]) ? got[i] == static_cast<float>(wanted[i])
                                                      : std::abs(static_cast<double>(got[i]) - wanted[i]) <= tolerance[i];
            if (!same) {
                fail(what, "wrong", i, got[i], wanted[i]);
                break;
            }
        }
#if defined(ONELOOP_ARM)
        if (first.empty()) first = got;
        for (size_t i = 0; i < got.size(); i++) {
            if (std::memcmp(&got[i], &first[i], sizeof(float)) != 0 && !std::isnan(got[i])) {
                fail(what, "other bits than the first set's", i, got[i], first[i]);
                break;
            }
        }
#endif
    }
}
void compare(const std::string& what, const std::function<Floats()>& run, const Doubles& wanted, double tolerance) {
    compare(what, run, wanted, Doubles(wanted.size(), tolerance));
}

// ---- linear layers ----------------------------------------------------------------------------------------------------

// A sum of k products in float32 is off by at most k + 1 roundings of the sum of their magnitudes (Higham, Accuracy and
// Stability of Numerical Algorithms, section 3.1).
constexpr double kRounding = 1.0 / (1 << 24);

// A layer's product with the rows of x beside what it should be.
void compare_product(const std::string& what, const Linear& linear, const Floats& x, const Doubles& wanted,
                     const Doubles& tolerance) {
    const int64_t n = linear.n(), k = linear.k(), m = static_cast<int64_t>(x.size()) / k;
    const std::string sizes = std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k);
    compare(
        what + ", " + sizes,
        [&] {
            Floats out(m * n);
            linear.matmul(x.data(), m, k, out.data(), n);
            return out;
        },
        wanted, tolerance);
}

void check_linear(Element element, int64_t m, int64_t n, int64_t k) {
    const Floats x = normals(m * k), bias = normals(n);
    Floats plain(n * k);
    std::vector<uint8_t> weight(n * k * element_bytes(element));
    for (int64_t i = 0; i < n * k; i++) {
        const float w = normal();
        const uint16_t half = element == Element::kFloat16 ? half_of(std::abs(w)) | (w < 0 ? 0x8000 : 0) : bfloat16_of(w);
        const auto byte = static_cast<int8_t>(std::clamp(w * 40.0f, -127.0f, 127.0f));
        const void* from = element == Element::kFloat32 ? static_cast<const void*>(&w)
                           : element == Element::kInt8  ? static_cast<const void*>(&byte)
                                                        : &half;
        std::memcpy(weight.data() + i * element_bytes(element), from, element_bytes(element));
        plain[i] = float_at(weight.data(), element, i);
    }
    const PackedLinear linear(weight.data(), element, n, k, k, 1, bias.data());
    Doubles wanted(m * n), tolerance(m * n);
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = bias[j], magnitude = std::abs(bias[j]);
            for (int64_t c = 0; c < k; c++) {
                const double product = static_cast<double>(x[i * k + c]) * plain[j * k + c];
                sum += product, magnitude += std::abs(product);
            }
            wanted[i * n + j] = sum, tolerance[i * n + j] = (k + 2) * kRounding * magnitude;
        }
    }
    compare_product("linear of element " + std::to_string(static_cast<int>(element)), linear, x, wanted, tolerance);
}

struct Block {
    QuantType type;
    int64_t inputs, bytes, scale_at, scales;  // `scales` float16 numbers from byte `scale_at` on
};
#define BLOCK(name, id, columns, bytes, bits, minimum, super, halves) \
    {QuantType::k##name, columns, bytes, (super) && !(minimum) ? (bytes) - 2 : 0, (minimum) ? 2 : 1},
constexpr Block kBlocks[] = {ONELOOP_BLOCK_TYPES(BLOCK)};

// x as kernels round it: in blocks of 32, the largest of which becomes `most`.
Floats rounded(const Floats& x, float most) {
    Floats y(x.size());
    for (size_t at = 0; at < x.size(); at += kBlock) {
        const size_t end = std::min(x.size(), at + kBlock);
        float largest = 0;
        for (size_t i = at; i < end; i++) largest = std::max(largest, std::abs(x[i]));
        for (size_t i = at; i < end; i++) y[i] = std::nearbyint(x[i] * (most / largest)) * (largest / most);
    }
    return y;
}

// A layer over rounded rows beside float64. `most`: as of `rounded`. `offset`: how much of a rounded number its block's minimum or
// offset adds to what a product may be off by.
void check_rounded(const std::string& name, const Linear& linear, const Floats& bias, int64_t m, float most, double offset) {
    const int64_t n = linear.n(), k = linear.k();
    Floats weight(n * k);
    std::vector<int64_t> ids(n);
    for (int64_t i = 0; i < n; i++) ids[i] = i;
    linear.rows(ids.data(), n, weight.data());
    Floats x, near;
    for (int64_t i = 0; i < m; i++) {
        const Floats row = normals(k), whole = rounded(row, most);
        x.insert(x.end(), row.begin(), row.end()), near.insert(near.end(), whole.begin(), whole.end());
    }
    Doubles wanted(m * n), tolerance(m * n);
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = bias[j], magnitude = std::abs(bias[j]);
            for (int64_t c = 0; c < k; c++) {
                const double product = static_cast<double>(near[i * k + c]) * weight[j * k + c];
                sum += product, magnitude += std::abs(product) + offset * std::abs(near[i * k + c]);
            }
            wanted[i * n + j] = sum, tolerance[i * n + j] = (3 * k / kBlock + 8) * kRounding * magnitude * 4;
        }
    }
    compare_product(name, linear, x, wanted, tolerance);
}

void check_quants(const Block& block, int64_t m, int64_t n, int64_t k) {
    const int64_t row_bytes = k / block.inputs * block.bytes;
    std::vector<uint8_t> file(n * row_bytes);
    for (uint8_t& byte : file) byte = static_cast<uint8_t>(random_bits());
    for (int64_t at = block.scale_at; at < n * row_bytes; at += block.bytes) {
        for (int64_t i = 0; i < block.scales; i++) {  // of any sign, about 2^-7
            const auto half = static_cast<uint16_t>(0x2000 | (random_bits() & 0x83ff));
            std::memcpy(file.data() + at + i % block.scales * 2, &half, sizeof half);
        }
        if (block.type == QuantType::kMXFP4) file[at] = static_cast<uint8_t>(120 + random_bits() % 8);  // 2^-7 to 1
    }
    const Floats bias = normals(n);
    const QuantLinear linear(block.type, file.data(), row_bytes, n, k, bias.data());
    // A block's products are q - offset, or q and a minimum apart: eight bits' worth more than their sum at most.
    check_rounded("quants of type " + std::to_string(static_cast<int>(block.type)), linear, bias, m, 127.0f, 1.0);
}

void check_shorts(int64_t m, int64_t n, int64_t k) {
    const Floats bias = normals(n), given = normals(n * k);
    const ShortLinear linear(given.data(), Element::kFloat32, n, k, k, 1, bias.data());
    check_rounded("numbers of sixteen bits", linear, bias, m, kShortMost, 0.0);
}

// ---- one token at a time ------------------------------------------------------------------------------------------------

void check_norms(int64_t rows, int64_t h) {
    const Floats x = normals(rows * h, 3.0f), residual = normals(rows * h), weight = normals(h), bias = normals(h);
    Doubles rms(rows * h), added(rows * h), layer(rows * h);
    for (int64_t r = 0; r < rows; r++) {
        double squares = 0, added_squares = 0, sum = 0, apart = 0;
        for (int64_t i = r * h; i < (r + 1) * h; i++) {
            const double both = static_cast<double>(residual[i] + x[i]);
            squares += static_cast<double>(x[i]) * x[i], added_squares += both * both, sum += x[i];
        }
        for (int64_t i = r * h; i < (r + 1) * h; i++) apart += (x[i] - sum / h) * (x[i] - sum / h);
        for (int64_t i = r * h; i < (r + 1) * h; i++) {
            rms[i] = x[i] / std::sqrt(squares / h + 1e-5) * weight[i - r * h];
            added[i] = static_cast<double>(residual[i] + x[i]) / std::sqrt(added_squares / h + 1e-5) * weight[i - r * h];
            layer[i] = (x[i] - sum / h) / std::sqrt(apart / h + 1e-5) * weight[i - r * h] + bias[i - r * h];
        }
    }
    const double tolerance = 1e-5 * 12;  // of numbers up to a dozen
    const std::string size = " of " + std::to_string(h);
    Floats y(rows * h);
    compare(
        "rms_norm" + size, [&] { return rms_norm(x.data(), rows, 1, h, h, h, weight.data(), 1e-5f, y.data()), y; }, rms, tolerance);
    compare(
        "layer_norm" + size, [&] { return layer_norm(x.data(), rows, 1, h, h, h, weight.data(), bias.data(), 1e-5f, y.data()), y; },
        layer, tolerance);
    compare(
        "add_rms_norm" + size,
        [&] {
            Floats stream = residual;
            add_rms_norm(x.data(), h, stream.data(), h, rows, h, weight.data(), 1e-5f, y.data());
            return y;
        },
        added, tolerance);
}

void check_activations() {
    Floats x = normals(61, 4.0f);
    x.insert(x.end(), {0.0f, -0.0f, 88.0f, -88.0f, 200.0f, -200.0f, kNan});
    const auto n = static_cast<int64_t>(x.size());
    const auto each = [&](const char* what, Activation kind, double (*of)(double)) {
        Doubles wanted(n), tolerance(n);
        for (int64_t i = 0; i < n; i++) wanted[i] = of(x[i]), tolerance[i] = 2e-6 * (0.1 + std::abs(wanted[i]));
        Floats y(n);
        compare(what, [&] { return activate(kind, x.data(), n, 1, n, y.data()), y; }, wanted, tolerance);
    };
    each("silu", Activation::kSilu, [](double z) { return z / (1 + std::exp(-z)); });
    each("gelu", Activation::kGelu, [](double z) { return z * 0.5 * std::erfc(-z / std::sqrt(2.0)); });
    each("gelu by tanh", Activation::kGeluTanh,
         [](double z) { return z * 0.5 * (1 + std::tanh(0.7978845608028654 * (z + 0.044715 * z * z * z))); });
    each("relu", Activation::kRelu, [](double z) { return z < 0 ? 0 : z; });
    each("relu squared", Activation::kRelu2, [](double z) { return z < 0 ? 0 : z * z; });
}

void check_rope(bool interleaved) {
    const int64_t half = 10;
    const Floats head = normals(2 * half);
    Floats cos_sin(2 * half);
    for (int64_t i = 0; i < half; i++) cos_sin[i] = std::cos(0.1f * i), cos_sin[half + i] = std::sin(0.1f * i);
    Doubles wanted(2 * half);
    for (int64_t i = 0; i < half; i++) {
        const int64_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : half + i;
        wanted[a] = static_cast<double>(head[a]) * cos_sin[i] - static_cast<double>(head[b]) * cos_sin[half + i];
        wanted[b] = static_cast<double>(head[b]) * cos_sin[i] + static_cast<double>(head[a]) * cos_sin[half + i];
    }
    compare(
        "rope",
        [&] {
            Floats turned = head;
            kernels().rope(turned.data(), cos_sin.data(), half, interleaved);
            return turned;
        },
        wanted, 1e-6);
}

void check_narrowing() {
    Floats x = normals(40, 100.0f);
    x.insert(x.end(), {1.00390625f, 1.01171875f, 3.3895314e38f, 0.0f, -0.0f, 1e-42f});  // two ties, one that becomes infinite
    Floats strange = x;
    strange.insert(strange.end(), {kNan, kInfinity, -kInfinity});
    const auto whole = [](const Floats& from, auto write) {
        return [&from, write] {
            Floats out;
            write(from, out);
            return out;
        };
    };
    Doubles bits;
    for (float value : strange) {  // the nearest of both neighbours, of which the even one at a tie
        uint32_t all;
        std::memcpy(&all, &value, sizeof all);
        const uint32_t rest = all & 0xffff, top = all >> 16;
        bits.push_back(std::isnan(value) ? top | 0x40 : top + (rest > 0x8000 || (rest == 0x8000 && top % 2)));
    }
    compare("to_bfloat16",
            whole(strange,
                  [](const Floats& from, Floats& out) {
                      std::vector<uint16_t> halves(from.size());
                      kernels().to_bfloat16(from.data(), halves.data(), static_cast<int64_t>(from.size()));
                      out.assign(halves.begin(), halves.end());
                  }),
            bits, 0.0);
    const auto line = [](const Floats& from, Floats& out) {
        std::vector<int8_t> bytes(from.size() + kScaleBytes);
        kernels().to_int8(from.data(), bytes.data(), static_cast<int64_t>(from.size()));
        out.assign(bytes.begin(), bytes.end() - kScaleBytes);
        out.push_back(0);
        std::memcpy(&out.back(), bytes.data() + from.size(), kScaleBytes);
    };
    const Floats usual = normals(45, 5.0f);
    float largest = 0;
    for (float value : usual) largest = std::max(largest, std::abs(value));
    Doubles wanted;
    for (float value : usual) wanted.push_back(std::nearbyint(value / (largest / 127.0f)));
    wanted.push_back(largest / 127.0f);
    compare("to_int8", whole(usual, line), wanted, 0.0);
    wanted.assign(strange.size(), 0.0);
    wanted.push_back(kNan);
    compare("to_int8 of a NaN", whole(strange, line), wanted, 0.0);
}

void check_largest() {
    const int64_t n = 3001;
    const auto id = [](const std::string& what, const Floats& x, double wanted) {
        compare(
            what, [&] { return Floats{static_cast<float>(kernels().largest(x.data(), static_cast<int64_t>(x.size())))}; }, {wanted},
            0.0);
    };
    Floats x = normals(n);
    for (int64_t at : {0, 1023, 1024, 2049, 3000}) {
        Floats y = x;
        y[at] = 10.0f, y[std::min<int64_t>(n - 1, at + 5)] = 10.0f;
        id("largest at " + std::to_string(at), y, static_cast<double>(at));
        y[2222] = kNan;
        id("largest beside a NaN", y, -1);
        y[2222] = kInfinity;
        id("an infinite largest", y, -1);
    }
}

// ---- attention ----------------------------------------------------------------------------------------------------------

struct Context {
    CacheType type;
    int64_t head_size, window;
    float softcap;
    bool sinks;
};

void check_attention(const Context& c) {
    constexpr int64_t kBlockSize = 16, kKvHeads = 2, kOfEach = 3, kHeads = kKvHeads * kOfEach;
    const std::vector<int32_t> queries = {1, 5, 1, 40}, lens = {1, 21, 1100, 530};
    const int64_t d = c.head_size, line = line_elements(c.type, d), most = 1100 / kBlockSize + 1, blocks = most * 4;
    std::vector<int32_t> starts = {0}, tables(blocks);
    for (int32_t count : queries) starts.push_back(starts.back() + count);
    for (int64_t i = 0; i < blocks; i++) tables[i] = static_cast<int32_t>(i);
    std::shuffle(tables.begin(), tables.end(), random_bits);
    const int64_t tokens = starts.back(), lines = blocks * kKvHeads * kBlockSize;
    const Floats q = normals(tokens * kHeads * d), sinks = normals(kHeads);
    std::vector<uint8_t> caches[2];
    Floats plain[2];
    for (int which = 0; which < 2; which++) {
        caches[which].resize(lines * line * element_bytes(c.type));
        for (int64_t at = 0; at < lines; at++) {
            uint8_t* to = caches[which].data() + at * line * element_bytes(c.type);
            const float scale = 0.01f + 0.001f * std::abs(normal());
            for (int64_t i = 0; i < d; i++) {
                const float value = normal();
                const uint16_t half = bfloat16_of(value);
                const auto byte = static_cast<int8_t>(std::clamp(value * 40.0f, -127.0f, 127.0f));
                if (c.type == CacheType::kFloat32) std::memcpy(to + i * 4, &value, 4), plain[which].push_back(value);
                if (c.type == CacheType::kBFloat16)
                    std::memcpy(to + i * 2, &half, 2), plain[which].push_back(float_at(&half, Element::kBFloat16, 0));
                if (c.type == CacheType::kInt8) to[i] = static_cast<uint8_t>(byte), plain[which].push_back(byte * scale);
            }
            if (c.type == CacheType::kInt8) std::memcpy(to + d, &scale, sizeof scale);
        }
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    Doubles wanted(tokens * kHeads * d);
    for (size_t row = 0; row < queries.size(); row++) {
        for (int64_t i = 0; i < queries[row]; i++) {
            const int64_t position = lens[row] - queries[row] + i, token = starts[row] + i;
            for (int64_t head = 0; head < kHeads; head++) {
                Doubles values(d), weights;
                double sum = c.sinks ? std::exp(static_cast<double>(sinks[head])) : 0.0;
                for (int64_t key = hidden_before(position, c.window); key <= position; key++) {
                    const int64_t block = tables[row * most + key / kBlockSize];
                    const int64_t at = ((block * kKvHeads + head / kOfEach) * kBlockSize + key % kBlockSize) * d;
                    double score = 0;
                    for (int64_t e = 0; e < d; e++)
                        score += static_cast<double>(q[(token * kHeads + head) * d + e]) * plain[0][at + e];
                    score *= scale;
                    if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
                    const double weight = std::exp(score);
                    sum += weight;
                    for (int64_t e = 0; e < d; e++) values[e] += weight * plain[1][at + e];
                }
                for (int64_t e = 0; e < d; e++) wanted[(token * kHeads + head) * d + e] = values[e] / sum;
            }
        }
    }
    const int64_t stride_h = kBlockSize * line, stride_b = kKvHeads * stride_h;
    const AttentionArgs args{q.data(),
                             kHeads * d,
                             d,
                             caches[0].data(),
                             caches[1].data(),
                             stride_b,
                             stride_h,
                             line,
                             stride_b,
                             stride_h,
                             line,
                             c.type,
                             kBlockSize,
                             d,
                             kOfEach,
                             scale,
                             c.window,
                             c.softcap,
                             c.sinks ? sinks.data() : nullptr};
    const std::string what = "attention over cache type " + std::to_string(static_cast<int>(c.type)) + ", head " +
                             std::to_string(d) + ", window " + std::to_string(c.window);
    // Scores of about 1, off by some roundings of float32 for each of d products, and as much of up to 1,100 weights.
    compare(
        what,
        [&] {
            Floats out(tokens * kHeads * d);
            paged_attention(args, static_cast<int64_t>(queries.size()), kKvHeads, starts.data(), lens.data(), tables.data(), most,
                            out.data(), kHeads * d, d);
            return out;
        },
        wanted, 2e-5);
}

}  // namespace

int main() {
    for (const std::string& name : available_isas()) std::printf("%s ", name.c_str());
    std::printf("\n");
    for (Element element : {Element::kFloat32, Element::kBFloat16, Element::kFloat16, Element::kInt8})
        for (int64_t m : {1, 2, 7, 33}) check_linear(element, m, m == 2 ? 37 : 80, m == 7 ? 403 : 66);
    for (const Block& block : kBlocks)
        for (int64_t m : {1, 3, 8, 21}) check_quants(block, m, m == 3 ? 37 : 48, 512);
    for (int64_t m : {1, 3, 8, 21}) check_shorts(m, m == 3 ? 37 : 80, m == 8 ? 403 : 96);
    for (int64_t h : {7, 64, 130}) check_norms(3, h);
    check_activations();
    check_rope(false);
    check_rope(true);
    check_narrowing();
    check_largest();
    for (CacheType type : {CacheType::kFloat32, CacheType::kBFloat16, CacheType::kInt8}) {
        check_attention({type, 64, kNoWindow, 0.0f, false});
        check_attention({type, 24, 100, 5.0f, true});
    }
    if (failures) std::printf("%d failed\n", failures);
    return failures ? 1 : 0;
}
