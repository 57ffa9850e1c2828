#include "pack.h"

#include <cmath>
#include <cstring>

#define ISA isa_pack
#include "vec_portable.h"

using isa_pack::half_to_float;
using isa_pack::widen_bf16;

namespace {

struct Place {  // one row of a packed weight
    uint8_t *codes, *scales, *mins;
    int64_t lane;

    Place(const Layout& at, uint8_t* packed, int64_t row)
        : codes(packed + row / PANEL * at.code_bytes),
          scales(packed + at.scales_at + row / PANEL * at.scale_bytes),
          mins(packed + at.mins_at + row / PANEL * at.scale_bytes),
          lane(row % PANEL) {}

    uint8_t& byte(int64_t k) { return codes[k / 4 * 64 + lane * 4 + k % 4]; }
    uint8_t& nibbles(int64_t k) {  // k and k + 16 share a byte, k % 32 below 16
        return codes[k / GROUP * 256 + k % GROUP / 4 * 64 + lane * 4 + k % 4];
    }
    uint16_t& half(uint8_t* of, int64_t group) { return ((uint16_t*)of)[group * PANEL + lane]; }
};

// For each 64 bytes of panel `panel` of an I8 weight: which are numbers other than 0, and which 64 they are. Padding counts as 0.
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
        } else {
            float most = 0.0f;
            for (int64_t k = 0; k < inner; k++) most = std::fmax(most, std::fabs(value(k)));
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

void pack_blocks(int32_t kind, int64_t rows, int64_t inner, uint8_t* packed, const uint8_t* blocks, int64_t count, int64_t row0,
                 const int32_t* to) {
    const Layout at(kind, rows, inner);
    const int64_t head = kind == KIND_Q4M ? 4 : 2, bytes = head + (kind == KIND_Q8 ? 32 : 16);
    for (int64_t i = 0; i < count; i++) {
        Place place(at, packed, to ? to[i] : row0 + i);
        for (int64_t g = 0; g < at.groups; g++) {
            const uint8_t *block = blocks + (i * at.groups + g) * bytes, *codes = block + head;
            memcpy(&place.half(place.scales, g), block, 2);
            if (kind == KIND_Q4M) memcpy(&place.half(place.mins, g), block + 2, 2);
            if (kind == KIND_Q8)
                for (int64_t k = 0; k < 32; k++) place.byte(g * GROUP + k) = (uint8_t)(codes[k] ^ 0x80);
            else
                for (int64_t k = 0; k < 16; k++) place.nibbles(g * GROUP + k) = codes[k];
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
        for (int64_t g = 0; g < at.groups; g++) {
            const float scale = half_to_float(place.half(place.scales, g));
            const float low = kind == KIND_Q4M ? half_to_float(place.half(place.mins, g)) : 0.0f;
            const int zero = kind == KIND_Q8 ? 128 : kind == KIND_Q4 ? 8 : 0;
            for (int64_t k = 0; k < GROUP && g * GROUP + k < inner; k++) {
                int code;
                if (kind == KIND_Q8) code = place.byte(g * GROUP + k);
                else code = k < 16 ? place.nibbles(g * GROUP + k) & 15 : place.nibbles(g * GROUP + k - 16) >> 4;
                out[g * GROUP + k] = (float)(code - zero) * scale + low;
            }
        }
    }
}
