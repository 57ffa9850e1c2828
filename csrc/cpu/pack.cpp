#include "pack.h"

#include <cmath>
#include <cstring>

#define ISA isa_pack
#include "vec_portable.h"

#include "round4.h"

using isa_pack::half_to_float;
using isa_pack::widen_bf16;

namespace {

void store4(uint8_t* at, uint32_t four) { memcpy(at, &four, 4); }

struct Place {  // one row of a packed weight
    uint8_t *codes, *scales, *mins;
    int64_t lane;

    Place(const Layout& at, uint8_t* packed, int64_t row)
        : codes(packed + row / PANEL * at.code_bytes),
          scales(packed + at.scales_at + row / PANEL * at.scale_bytes),
          mins(packed + at.mins_at + row / PANEL * at.scale_bytes),
          lane(row % PANEL) {}

    uint8_t& byte(int64_t k) { return codes[k / 4 * 64 + lane * 4 + k % 4]; }
    // Writes a group's 32 codes of up to 6 bits, or one of them. A step of a product reads four codes of a row.
    void put(int bits, int64_t group, const uint8_t* code) {
        uint8_t* at = codes + group * 64 * bits + lane * 4;
        uint32_t four[8], planes[2] = {0, 0}, third = 0;
        for (int t = 0; t < 8; t++) memcpy(&four[t], code + 4 * t, 4);
        if (bits < 4) {
            for (int t = 0; t < 8; t++) {
                planes[t / 4] |= (four[t] & 0x03030303u) << 2 * (t % 4);
                third |= (four[t] >> 2 & 0x01010101u) << t;
            }
            store4(at, planes[0]), store4(at + 64, planes[1]);
            if (bits == 3) store4(at + 128, third);
            return;
        }
        for (int t = 0; t < 4; t++) store4(at + 64 * t, (four[t] & 0x0f0f0f0fu) | (four[t + 4] & 0x0f0f0f0fu) << 4);
        if (bits == 4) return;
        for (int t = 0; t < 8; t++) {
            if (bits == 5) planes[0] |= (four[t] >> 4 & 0x01010101u) << t;
            else planes[t / 4] |= (four[t] >> 4 & 0x03030303u) << 2 * (t % 4);
        }
        for (int plane = 0; plane < bits - 4; plane++) store4(at + 256 + 64 * plane, planes[plane]);
    }
    int code(int bits, int64_t k) {
        const int64_t t = k % GROUP / 4;
        const uint8_t* at = codes + k / GROUP * 64 * bits + lane * 4 + k % 4;
        if (bits == 8) return at[64 * t];
        if (bits < 4) return (at[64 * (t / 4)] >> 2 * (t % 4) & 3) | (bits == 3 ? (at[128] >> t & 1) << 2 : 0);
        int found = t < 4 ? at[64 * t] & 15 : at[64 * (t - 4)] >> 4;
        if (bits == 5) found |= (at[256] >> t & 1) << 4;
        if (bits == 6) found |= (at[256 + 64 * (t / 4)] >> 2 * (t % 4) & 3) << 4;
        return found;
    }
    // A group's float16 or float32 in `of`; in a K kind its superblock's d (0) or e (1), and its own bytes.
    uint16_t& half(uint8_t* of, int64_t group) { return ((uint16_t*)of)[group * PANEL + lane]; }
    float& single(int32_t kind, uint8_t* of, int64_t group) { return ((float*)(of + scale_at(kind, group)))[lane]; }
    uint16_t& super(int32_t kind, int64_t group, int which) {
        return ((uint16_t*)(scales + super_at(kind, group)))[which * PANEL + lane];
    }
    uint8_t& exponent(int64_t group) { return scales[group * PANEL + lane]; }
    uint8_t& small(int32_t kind, int64_t group, int which) { return scales[scale_at(kind, group) + which * PANEL + lane]; }
};

// Calls back for each 64 bytes of panel `panel` of an I8 weight with the mask of numbers other than 0, and the bytes. Padding
// counts as 0.
template <class Each>
void each_mask(const Layout& at, int64_t rows, int64_t inner, const uint8_t* packed, int64_t panel, Each each) {
    const int64_t lanes = rows - panel * PANEL < PANEL ? rows - panel * PANEL : PANEL;
    for (int64_t k = 0; k < at.groups * GROUP; k += 4) {
        const uint8_t* tile = packed + panel * at.code_bytes + k * PANEL;
        uint64_t mask = 0;
        for (int64_t i = 0; i < 4 * lanes; i++) mask |= (uint64_t)(tile[i] != 128 && k + i % 4 < inner) << i;
        each(mask, tile);
    }
}

uint16_t to_bf16(float f) {
    uint32_t x;
    memcpy(&x, &f, 4);
    return (uint16_t)((x + ((x >> 16) & 1) + 0x7fff) >> 16);
}

}  // namespace

void pack_dense(int32_t kind, int64_t rows, int64_t inner, uint8_t* packed, const void* values, bool bf16, int64_t stride,
                int64_t count, int64_t row0, const int32_t* to) {
    const Layout at(kind, rows, inner);
    for (int64_t i = 0; i < count; i++) {
        Place place(at, packed, to ? to[i] : row0 + i);
        const float* f = (const float*)values + i * stride;
        const uint16_t* h = (const uint16_t*)values + i * stride;
        auto value = [&](int64_t k) { return bf16 ? widen_bf16(h[k]) : f[k]; };
        if (kind == KIND_F32) {
            for (int64_t k = 0; k < inner; k++) ((float*)place.codes)[k * PANEL + place.lane] = value(k);
        } else if (kind == KIND_BF16) {
            for (int64_t k = 0; k < inner; k++)
                ((uint16_t*)place.codes)[k / 2 * 32 + place.lane * 2 + k % 2] = bf16 ? h[k] : to_bf16(f[k]);
        } else if (kind == KIND_Q4M || kind == KIND_W4M) {
            const int64_t each = groups_a_scale(kind) * GROUP;
            float numbers[Round4::MOST];
            Round4 rounded;
            for (int64_t k = 0; k < inner; k += each) {
                for (int64_t j = 0; j < each; j++) numbers[j] = value(k + j);
                if (each == 32) rounded.of_32(numbers, true);
                else rounded.of_128(numbers, false);
                for (int64_t g = k / GROUP; g < (k + each) / GROUP; g++) {
                    place.put(4, g, rounded.codes + g * GROUP - k);
                    if (kind == KIND_Q4M) {
                        place.half(place.scales, g) = to_half(rounded.scale), place.half(place.mins, g) = to_half(rounded.minimum);
                    } else {
                        place.single(kind, place.scales, g) = rounded.scale, place.single(kind, place.mins, g) = rounded.minimum;
                    }
                }
            }
        } else {
            float most = 0.0f;
            for (int64_t k = 0; k < inner; k++) {  // not std::fmax: gcc 12 for ARM dies of it
                const float size = std::fabs(value(k));
                most = size > most ? size : most;
            }
            const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
            for (int64_t k = 0; k < inner; k++) place.byte(k) = (uint8_t)(std::lrintf(value(k) * inverse) + 128);
            ((float*)place.scales)[place.lane] = most / 127.0f;
        }
    }
}

void pack_codes(int64_t rows, int64_t inner, uint8_t* packed, const int8_t* codes, const float* scales, int64_t count, int64_t row0,
                const int32_t* to) {
    const Layout at(KIND_I8, rows, inner);
    for (int64_t i = 0; i < count; i++) {
        Place place(at, packed, to ? to[i] : row0 + i);
        for (int64_t k = 0; k < inner; k++) place.byte(k) = (uint8_t)(codes[i * inner + k] + 128);
        ((float*)place.scales)[place.lane] = scales[i];
    }
}

static uint16_t exact_half(float f) {  // f is a float16 number
    uint32_t x;
    memcpy(&x, &f, 4);
    const uint16_t sign = (uint16_t)(x >> 16 & 0x8000);
    if (std::fabs(f) < 0x1p-14f) return (uint16_t)(sign | (uint16_t)(std::fabs(f) * 0x1p24f));
    return (uint16_t)(sign | (((x >> 23 & 255) - 112) << 10) | (x >> 13 & 1023));
}

static uint8_t half_of_power(float f) {  // the exponent of f / 2, f a power of two: MX_NUMBERS are twice the codes' values
    uint32_t x;
    memcpy(&x, &f, 4);
    const uint32_t exponent = x >> 23 & 255;
    return (uint8_t)(exponent ? exponent - 1 : 0);
}

void pack_codes4(int32_t kind, int64_t rows, int64_t inner, uint8_t* packed, const uint8_t* codes, const float* scales,
                 const float* minima, int64_t count, int64_t row0, const int32_t* to) {
    const Layout at(kind, rows, inner);
    const int64_t each = groups_a_scale(kind), num_scales = (at.groups + each - 1) / each;
    for (int64_t i = 0; i < count; i++) {
        Place place(at, packed, to ? to[i] : row0 + i);
        for (int64_t g = 0; g < at.groups; g++) {
            const float scale = scales[i * num_scales + g / each];
            place.put(4, g, codes + i * inner + g * GROUP);
            if (kind == KIND_Q4) place.half(place.scales, g) = exact_half(scale);
            else if (kind == KIND_MX) place.exponent(g) = half_of_power(scale);
            else place.single(kind, place.scales, g) = scale;
            if (has_mins(kind)) place.single(kind, place.mins, g) = minima[i * num_scales + g / each];
        }
    }
}

// One of GGUF's blocks of 32.
static void pack_block(int32_t kind, Place& place, int64_t g, const uint8_t* block) {
    if (kind == KIND_MX) {
        place.exponent(g) = block[0] ? block[0] - 1 : 0;
        block += 1;
    } else {
        memcpy(&place.half(place.scales, g), block, 2);
        block += 2;
    }
    if (has_mins(kind)) memcpy(&place.half(place.mins, g), block, 2), block += 2;
    uint32_t four;
    if (kind == KIND_Q8) {
        for (int64_t k = 0; k < 32; k += 4) {
            memcpy(&four, block + k, 4);
            store4(&place.byte(g * GROUP + k), four ^ 0x80808080u);
        }
        return;
    }
    if (code_bits(kind) == 4) {  // the file packs two codes into a byte in the same order
        for (int64_t t = 0; t < 4; t++) {
            memcpy(&four, block + 4 * t, 4);
            store4(place.codes + g * 256 + 64 * t + place.lane * 4, four);
        }
        return;
    }
    uint32_t fifth;
    memcpy(&fifth, block, 4), block += 4;
    uint8_t codes[GROUP];
    for (int64_t k = 0; k < 16; k++) {
        codes[k] = (uint8_t)((block[k] & 15) | (fifth >> k & 1) << 4);
        codes[k + 16] = (uint8_t)(block[k] >> 4 | (fifth >> (k + 16) & 1) << 4);
    }
    place.put(5, g, codes);
}

// A block of Q2_K or Q3_K: 16 numbers share a scale and, in Q2_K, a minimum.
static void pack_small(int32_t kind, Place& place, int64_t g, const uint8_t* block) {
    const bool three = kind == KIND_Q3K;
    const uint8_t *third = block, *scales = three ? block + 96 : block, *twos = block + (three ? 32 : 16), *super = block + (three ? 108 : 80);
    memcpy(&place.super(kind, g, 0), super, 2);
    if (!three) {
        uint16_t e;
        memcpy(&e, super + 2, 2);
        place.super(kind, g, 1) = e ^ 0x8000;  // minima are taken off in the file
    }
    uint8_t codes[GROUP];
    for (int64_t j = 0; j < SUPER; j++) {
        for (int64_t k = 0; k < 32; k++) {
            codes[k] = twos[j / 4 * 32 + k] >> 2 * (j % 4) & 3;
            if (three) codes[k] |= (uint8_t)((third[k] >> j & 1) << 2);
        }
        place.put(code_bits(kind), g + j, codes);
        for (int64_t i = 2 * j; i < 2 * j + 2; i++) {
            uint8_t scale = scales[i % (three ? 8 : 16)];
            if (three) {  // a scale has six bits: a nibble in the first eight bytes, and two bits in the last four; 32 means 0
                scale = (uint8_t)((scale >> (i / 8 * 4) & 15) | (scales[8 + i % 4] >> 2 * (i / 4) & 3) << 4);
                scale = (uint8_t)(scale - 32);
            }
            place.small(kind, g + j, (int)(i % 2)) = scale;
        }
    }
}

// One of GGUF's blocks of 256: groups g … g + 7.
static void pack_super(int32_t kind, Place& place, int64_t g, const uint8_t* block) {
    if (code_bits(kind) < 4) return pack_small(kind, place, g, block);
    uint8_t codes[GROUP];
    if (kind == KIND_Q6K) {  // nibbles, pairs of bits, 16 scales, d
        memcpy(&place.super(kind, g, 0), block + 208, 2);
        for (int64_t j = 0; j < SUPER; j++) {
            const uint8_t *low = block + j / 4 * 64 + j % 2 * 32, *high = block + 128 + j / 4 * 32;
            for (int64_t k = 0; k < 32; k++)
                codes[k] = (uint8_t)((low[k] >> (j % 4 / 2 * 4) & 15) | (high[k] >> 2 * (j % 4) & 3) << 4);
            place.put(6, g + j, codes);
            for (int half = 0; half < 2; half++) place.small(kind, g + j, half) = block[192 + 2 * j + half];
        }
        return;
    }
    uint16_t e;
    memcpy(&place.super(kind, g, 0), block, 2);
    memcpy(&e, block + 2, 2);
    place.super(kind, g, 1) = e ^ 0x8000;  // minima are taken off in the file
    const uint8_t *six = block + 4, *fifth = block + 16, *nibbles = fifth + (kind == KIND_Q5K ? 32 : 0);
    for (int64_t j = 0; j < SUPER; j++) {
        for (int64_t k = 0; k < 32; k++) {
            codes[k] = nibbles[j / 2 * 32 + k] >> (j % 2 * 4) & 15;
            if (kind == KIND_Q5K) codes[k] |= (uint8_t)((fifth[k] >> j & 1) << 4);
        }
        place.put(code_bits(kind), g + j, codes);
        // Scales and minima have six bits. The first four groups' are whole bytes' lower bits; the others' are nibbles, with two
        // bits more in the first ones' upper bits.
        const int64_t i = j % 4;
        place.small(kind, g + j, 0) = (uint8_t)(j < 4 ? six[i] & 63 : (six[8 + i] & 15) | six[i] >> 6 << 4);
        place.small(kind, g + j, 1) = (uint8_t)(j < 4 ? six[4 + i] & 63 : six[8 + i] >> 4 | six[4 + i] >> 6 << 4);
    }
}

int64_t block_bytes(int32_t kind) {
    switch (kind) {
        case KIND_Q8: return 34;
        case KIND_Q4: return 18;
        case KIND_Q4M: return 20;
        case KIND_Q5: return 22;
        case KIND_Q5M: return 24;
        case KIND_Q4K: return 144;
        case KIND_Q5K: return 176;
        case KIND_MX: return 17;
        case KIND_Q2K: return 84;
        case KIND_Q3K: return 110;
        default: return 210;
    }
}

void pack_blocks(int32_t kind, int64_t rows, int64_t inner, uint8_t* packed, const uint8_t* blocks, int64_t count, int64_t row0,
                 const int32_t* to) {
    const Layout at(kind, rows, inner);
    for (int64_t i = 0; i < count; i++) {
        Place place(at, packed, to ? to[i] : row0 + i);
        for (int64_t g = 0; g < at.groups; g += is_k(kind) ? SUPER : 1, blocks += block_bytes(kind)) {
            if (is_k(kind)) pack_super(kind, place, g, blocks);
            else pack_block(kind, place, g, blocks);
        }
    }
}

int64_t num_zeros(int64_t rows, int64_t inner, const uint8_t* packed) {
    const Layout at(KIND_I8, rows, inner);
    int64_t count = 0;
    for (int64_t i = 0; i < at.scales_at; i++) count += packed[i] == 128;  // padding is 0
    return count;
}

int64_t sparse_bytes(int64_t rows, int64_t inner, const uint8_t* packed) {
    const Layout from(KIND_I8, rows, inner), to(KIND_S8, rows, inner);
    int64_t bytes = to.bytes;
    for (int64_t p = 0; p < to.panels; p++) {
        int64_t kept = 0;
        each_mask(from, rows, inner, packed, p, [&](uint64_t mask, const uint8_t*) { kept += __builtin_popcountll(mask); });
        bytes += round_up(to.code_bytes + kept, 64);
    }
    return bytes + 64;
}

void pack_sparse(int64_t rows, int64_t inner, const uint8_t* packed, uint8_t* sparse) {
    const Layout from(KIND_I8, rows, inner), to(KIND_S8, rows, inner);
    memcpy(sparse + to.scales_at, packed + from.scales_at, to.panels * to.scale_bytes);
    int64_t place = to.bytes;
    for (int64_t p = 0; p < to.panels; p++) {
        memcpy(sparse + 8 * p, &place, 8);
        uint8_t *masks = sparse + place, *kept = masks + to.code_bytes;
        each_mask(from, rows, inner, packed, p, [&](uint64_t mask, const uint8_t* tile) {
            memcpy(masks, &mask, 8), masks += 8;
            for (; mask; mask &= mask - 1) *kept++ = tile[__builtin_ctzll(mask)];
        });
        place = round_up(kept - sparse, 64);
    }
    memcpy(sparse + 8 * to.panels, &place, 8);
}

void unpack_sparse(int64_t rows, int64_t inner, const uint8_t* sparse, uint8_t* packed) {
    const Layout from(KIND_S8, rows, inner), to(KIND_I8, rows, inner);
    memcpy(packed + to.scales_at, sparse + from.scales_at, from.panels * from.scale_bytes);
    for (int64_t p = 0; p < from.panels; p++) {
        const uint8_t *masks = sparse + sparse_panel(sparse, p), *kept = masks + from.code_bytes;
        uint8_t* codes = packed + p * to.code_bytes;
        for (int64_t i = 0; i < from.code_bytes; i += 8, codes += 64) {
            uint64_t mask;
            memcpy(&mask, masks + i, 8);
            memset(codes, 128, 64);
            for (; mask; mask &= mask - 1) codes[__builtin_ctzll(mask)] = *kept++;
        }
    }
}

static void unpack_sparse_row(int64_t rows, int64_t inner, const uint8_t* packed, int64_t row, float* out) {
    const Layout at(KIND_S8, rows, inner);
    const uint8_t* masks = packed + sparse_panel(packed, row / PANEL);
    const uint8_t* kept = masks + at.code_bytes;
    float scale;
    memcpy(&scale, packed + at.scales_at + 4 * row, 4);
    for (int64_t k = 0; k < inner; k += 4, masks += 8) {
        uint64_t mask;
        memcpy(&mask, masks, 8);
        for (int64_t i = 0; i < 4 && k + i < inner; i++) {
            const int64_t bit = row % PANEL * 4 + i;
            const uint64_t before = mask & ((1ull << bit) - 1);
            out[k + i] = mask >> bit & 1 ? (float)(kept[__builtin_popcountll(before)] - 128) * scale : 0.0f;
        }
        kept += __builtin_popcountll(mask);
    }
}

void unpack_row(int32_t kind, int64_t rows, int64_t inner, const uint8_t* packed, int64_t row, float* out) {
    if (kind == ROWS_F32) {
        memcpy(out, packed + row * inner * 4, inner * 4);
        return;
    }
    if (kind == ROWS_BF16) {
        for (int64_t k = 0; k < inner; k++) out[k] = widen_bf16(((const uint16_t*)packed)[row * inner + k]);
        return;
    }
    if (kind == KIND_S8) return unpack_sparse_row(rows, inner, packed, row, out);
    const Layout at(kind, rows, inner);
    Place place(at, (uint8_t*)packed, row);
    if (kind == KIND_F32) {
        for (int64_t k = 0; k < inner; k++) out[k] = ((float*)place.codes)[k * PANEL + place.lane];
    } else if (kind == KIND_BF16) {
        for (int64_t k = 0; k < inner; k++) out[k] = widen_bf16(((uint16_t*)place.codes)[k / 2 * 32 + place.lane * 2 + k % 2]);
    } else if (kind == KIND_I8) {
        const float scale = ((float*)place.scales)[place.lane];
        for (int64_t k = 0; k < inner; k++) out[k] = (float)(place.byte(k) - 128) * scale;
    } else {
        for (int64_t k = 0; k < inner; k++) {
            const int64_t g = k / GROUP;
            const int half = by_halves(kind) ? (int)(k % GROUP / 16) : 0;
            float scale, low = 0.0f;
            if (kind == KIND_MX) {
                const uint32_t bits = (uint32_t)place.exponent(g) << 23;
                memcpy(&scale, &bits, 4);
                out[k] = (float)(MX_NUMBERS[place.code(4, k)] - code_from(kind)) * scale;
                continue;
            }
            if (kind == KIND_Q2K) {
                const uint8_t both = place.small(kind, g, half);
                scale = (float)(both & 15) * half_to_float(place.super(kind, g, 0));
                low = (float)(both >> 4) * half_to_float(place.super(kind, g, 1));
                out[k] = (float)place.code(2, k) * scale + low;
                continue;
            }
            if (is_w4(kind)) scale = place.single(kind, place.scales, g);
            else if (is_k(kind)) scale = (float)(int8_t)place.small(kind, g, half) * half_to_float(place.super(kind, g, 0));
            else scale = half_to_float(place.half(place.scales, g));
            if (is_w4(kind) && has_mins(kind)) low = place.single(kind, place.mins, g);
            else if (has_mins(kind)) low = half_to_float(place.half(place.mins, g));
            else if (kind == KIND_Q4K || kind == KIND_Q5K) low = (float)place.small(kind, g, 1) * half_to_float(place.super(kind, g, 1));
            out[k] = (float)(place.code(code_bits(kind), k) - code_from(kind)) * scale + low;
        }
    }
}
