#include "quant_pack.h"

#include <cmath>
#include <cstring>

#include "float16.h"

namespace oneloop {
namespace {

constexpr int kHalfBlock = kBlock / 2;
constexpr uint16_t kSign = 0x8000;

uint16_t load16(const uint8_t* p) {
    uint16_t x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
void store16(uint8_t* p, uint16_t x) { std::memcpy(p, &x, sizeof x); }

uint32_t load32(const uint8_t* p) {
    uint32_t x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
void store32(uint8_t* p, uint32_t x) { std::memcpy(p, &x, sizeof x); }

// Decoders of file blocks: layouts as in ggml's block_q4_0 and its kin.
struct Decoded {
    uint8_t quants[kSuperBlock][kBlock];  // without sign: offset included
    uint16_t scale, minimum;              // half floats: of the block, or of the super-block
    uint8_t sub_scales[kSuperBlock][2];   // of a super-block's blocks: scale and minimum, or the scale of each half
};

void split_nibbles(const uint8_t* bytes, int count, uint8_t* low, uint8_t* high) {
    for (int i = 0; i < count; i++) low[i] = bytes[i] & 15, high[i] = bytes[i] >> 4;
}

void decode_plain(QuantLayout layout, const uint8_t* p, Decoded& to) {
    to.scale = load16(p);
    p += 2;
    if (layout.minimum) {
        to.minimum = load16(p);
        p += 2;
    }
    uint8_t* q = to.quants[0];
    if (layout.bits == 8) {
        for (int i = 0; i < kBlock; i++) q[i] = p[i] ^ 0x80;
        return;
    }
    uint32_t fifth = 0;
    if (layout.bits == 5) {
        fifth = load32(p);
        p += 4;
    }
    split_nibbles(p, kHalfBlock, q, q + kHalfBlock);
    for (int i = 0; i < kBlock; i++) q[i] = static_cast<uint8_t>(q[i] | (fifth >> i & 1) << 4);
}

// Q4_K and Q5_K: 16 six-bit numbers in 12 bytes: four scales, four minima, then the low bits of the other eight, whose
// upper bits are in the upper bits of the first eight.
void decode_minimum_super(QuantLayout layout, const uint8_t* p, Decoded& to) {
    to.scale = load16(p);
    to.minimum = load16(p + 2) ^ kSign;  // it is subtracted
    const uint8_t *packed = p + 4, *high = p + 16, *low = layout.bits == 5 ? p + 48 : p + 16;
    for (int i = 0; i < 4; i++) {
        to.sub_scales[i][0] = packed[i] & 63;
        to.sub_scales[i][1] = packed[4 + i] & 63;
        to.sub_scales[4 + i][0] = static_cast<uint8_t>((packed[8 + i] & 15) | (packed[i] >> 2 & 48));
        to.sub_scales[4 + i][1] = static_cast<uint8_t>(packed[8 + i] >> 4 | (packed[4 + i] >> 2 & 48));
        split_nibbles(low + i * kBlock, kBlock, to.quants[2 * i], to.quants[2 * i + 1]);
    }
    if (layout.bits != 5) return;
    for (int b = 0; b < kSuperBlock; b++)
        for (int i = 0; i < kBlock; i++) to.quants[b][i] = static_cast<uint8_t>(to.quants[b][i] | (high[i] >> b & 1) << 4);
}

// Q6_K: twice 128 weights: 64 bytes of low bits, 32 bytes of high ones; then 16 scales and a float.
void decode_q6(const uint8_t* p, Decoded& to) {
    const uint8_t *high = p + 128, *scales = p + 192;
    to.scale = load16(p + 208);
    for (int h = 0; h < 2; h++) {
        uint8_t (*q)[kBlock] = to.quants + 4 * h;
        for (int i = 0; i < 2; i++) split_nibbles(p + h * 64 + i * kBlock, kBlock, q[i], q[2 + i]);
        for (int b = 0; b < 4; b++)
            for (int i = 0; i < kBlock; i++) q[b][i] = static_cast<uint8_t>(q[b][i] | (high[h * 32 + i] >> (2 * b) & 3) << 4);
    }
    for (int b = 0; b < kSuperBlock; b++)
        for (int i = 0; i < 2; i++) to.sub_scales[b][i] = scales[2 * b + i];
}

// MXFP4: a power-of-two scale, then table indices; table numbers are halves of integers. False if the scale is no float16.
bool decode_mxfp4(const uint8_t* p, Decoded& to) {
    const float scale = std::ldexp(1.0f, p[0] - 128);
    if (scale > 32768.0f) return false;
    to.scale = half_of(scale);
    split_nibbles(p + 1, kHalfBlock, to.quants[0], to.quants[0] + kHalfBlock);
    for (uint8_t& q : to.quants[0]) q = static_cast<uint8_t>(16.0f + 2.0f * kE2m1[q]);
    return true;
}

bool decode(QuantType type, const uint8_t* p, Decoded& to) {
    if (type == QuantType::kMXFP4) return decode_mxfp4(p, to);
    const QuantLayout layout = layout_of(type);
    if (!layout.super)
        decode_plain(layout, p, to);
    else if (layout.minimum)
        decode_minimum_super(layout, p, to);
    else
        decode_q6(p, to);
    return true;
}

// One column of a block of quants, laid out as in quants.h: groups of kGroup bytes are contiguous.
void place_quants(int bits, const uint8_t* q, int64_t column, uint8_t* to) {
    static_assert(kGroup == 4);
    constexpr uint32_t kEach = 0x01010101;  // times a number below 256: the number in each byte
    constexpr int kGroups = kBlock / kGroup, kHalf = kGroups / 2;
    to += column * kGroup;
    uint32_t groups[kGroups];
    for (int g = 0; g < kGroups; g++) groups[g] = load32(q + g * kGroup);
    if (bits == 8) {
        for (int g = 0; g < kGroups; g++) store32(to + g * 64, groups[g] ^ 0x80 * kEach);
        return;
    }
    for (int g = 0; g < kHalf; g++) store32(to + g * 64, (groups[g] & 15 * kEach) | (groups[g + kHalf] & 15 * kEach) << 4);
    to += kHalf * 64;
    uint32_t high[2] = {};
    for (int g = 0; bits == 5 && g < kGroups; g++) high[0] |= (groups[g] >> 4 & kEach) << g;
    for (int g = 0; bits == 6 && g < kGroups; g++) high[g / kHalf] |= (groups[g] >> 4 & 3 * kEach) << (2 * (g % kHalf));
    for (int i = 0; i < bits - 4; i++) store32(to + i * 64, high[i]);
}

void take_quants(int bits, const uint8_t* from, int64_t column, uint8_t* q) {
    from += column * kGroup;
    for (int i = 0; i < kBlock; i++) {
        const int group = i / kGroup, lane = i % kGroup;
        if (bits == 8) {
            q[i] = from[group * 64 + lane] ^ 0x80;
            continue;
        }
        uint8_t low = from[group % 4 * 64 + lane];
        low = group < 4 ? low & 15 : low >> 4;
        if (bits == 5) low = static_cast<uint8_t>(low | (from[4 * 64 + lane] >> group & 1) << 4);
        if (bits == 6) low = static_cast<uint8_t>(low | (from[(4 + group / 4) * 64 + lane] >> (group % 4 * 2) & 3) << 4);
        q[i] = low;
    }
}

}  // namespace

#define ONELOOP_STORED_BLOCK(name, id, columns, bytes, ...) \
    case QuantType::k##name: return {columns, bytes};
StoredBlock stored_block(QuantType type) {
    switch (type) { ONELOOP_BLOCK_TYPES(ONELOOP_STORED_BLOCK) }
    return {};
}

bool pack_panel(QuantType type, const uint8_t* rows, int64_t row_bytes, int64_t count, int64_t blocks, uint8_t* panel) {
    const QuantLayout layout = layout_of(type);
    const int64_t per_stored = layout.super ? kSuperBlock : 1, stored_bytes = stored_block(type).bytes;
    uint8_t* supers = panel + blocks * layout.block_scale_bytes();
    uint8_t* quants = panel + layout.scale_bytes(blocks);
    Decoded decoded = {};
    for (int64_t column = 0; column < count; column++) {
        for (int64_t block = 0; block < blocks; block += per_stored) {
            if (!decode(type, rows + column * row_bytes + block / per_stored * stored_bytes, decoded)) return false;
            for (int64_t b = 0; b < per_stored; b++) {
                place_quants(layout.bits, decoded.quants[b], column, quants + (block + b) * layout.block_quant_bytes());
                uint8_t* scales = panel + (block + b) * layout.block_scale_bytes();
                for (int i = 0; layout.super && i < 2; i++) scales[i * kPanel + column] = decoded.sub_scales[b][i];
            }
            uint8_t* floats = layout.super ? supers + block / kSuperBlock * layout.super_scale_bytes()
                                           : panel + block * layout.block_scale_bytes();
            store16(floats + 2 * column, decoded.scale);
            if (layout.minimum) store16(floats + 2 * (kPanel + column), decoded.minimum);
        }
    }
    return true;
}

void unpack_column(QuantType type, const uint8_t* panel, int64_t blocks, int64_t column, int64_t k, float* out) {
    const QuantLayout layout = layout_of(type);
    const uint8_t* supers = panel + blocks * layout.block_scale_bytes();
    const uint8_t* quants = panel + layout.scale_bytes(blocks);
    const auto offset = static_cast<float>(layout.offset());
    uint8_t q[kBlock];
    for (int64_t block = 0; block < blocks; block++) {
        take_quants(layout.bits, quants + block * layout.block_quant_bytes(), column, q);
        const uint8_t* scales = panel + block * layout.block_scale_bytes();
        const uint8_t* floats = layout.super ? supers + block / kSuperBlock * layout.super_scale_bytes() : scales;
        float d[2], m = 0.0f;
        d[0] = d[1] = float_of(load16(floats + 2 * column));
        if (layout.minimum) m = float_of(load16(floats + 2 * (kPanel + column)));
        if (layout.super && layout.minimum) {
            d[0] = d[1] = d[0] * scales[column];
            m = m * scales[kPanel + column];
        } else if (layout.super) {
            for (int i = 0; i < 2; i++) d[i] = d[i] * static_cast<int8_t>(scales[i * kPanel + column]);
        }
        for (int64_t i = 0; i < kBlock && block * kBlock + i < k; i++) {
            const float value = (static_cast<float>(q[i]) - offset) * d[i / kHalfBlock];
            out[block * kBlock + i] = layout.minimum ? value + m : value;
        }
    }
}

}  // namespace oneloop
