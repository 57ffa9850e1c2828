// A chunk's tokens as tiles, for the products by tile registers.
#pragma once
#include "linear_codes.h"

namespace ISA {

constexpr int TILE = 16;  // tokens, at most

struct Tile {  // of tokens
    int64_t token;
    int skip;  // tokens at its beginning that are done already
    float* y;  // the first result of its first token
};

// Tokens `begin` … `end` − 1 as tiles of one height. The last one begins before the one ahead of it ends, where they do not come
// out even.
struct Cut {
    int64_t begin, end, tiles;
    int rows;

    Cut(int64_t begin, int64_t end) : begin(begin), end(end), tiles((end - begin + TILE - 1) / TILE), rows((int)((end - begin + tiles - 1) / tiles)) {}
    int64_t first(int64_t tile) const { return tile + 1 < tiles ? begin + tile * rows : end - rows; }
    // Up to `most` tiles from tile i on. Returns how many.
    int some(int64_t i, int most, Tile* to) const {
        const int n = (int)(tiles - i < most ? tiles - i : most);
        for (int j = 0; j < n; j++) to[j] = {first(i + j), (int)(begin + (i + j) * rows - first(i + j)), nullptr};
        return n;
    }
};

static void put_sums(const LinearArgs& a, int64_t panel, const float* sums, const Tile& tile, int rows, int64_t y_stride) {
    const int64_t row = panel * PANEL;
    const int n = (int)(a.rows - row < PANEL ? a.rows - row : PANEL);
    const F bias = a.bias ? load_n(a.bias + row, n) : zero(), scale = a.row_scales ? load(a.row_scales + row) : zero();
    for (int t = tile.skip; t < rows; t++) {
        F v = load(sums + t * PANEL);
        if (a.row_scales) v = v * scale;
        v = v + bias;
        float* to = tile.y + t * y_stride;
        if (a.accumulate) v = v + load_n(to, n);
        store_n(to, v, n);
    }
}

}  // namespace ISA
