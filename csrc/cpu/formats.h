// How weights and activations lie in memory. Shared by every instruction set: one packing serves them all.
//
// A weight [rows, inner] is cut into panels of 16 rows; a panel holds, for 64 bytes at a time, 16 rows side by side:
//   F32         1 input  × 16 rows × 4 bytes
//   BF16        2 inputs × 16 rows × 2 bytes
//   I8 Q8       4 inputs × 16 rows × 1 byte: number + 128
//   Q4 Q4M      8 inputs × 16 rows: inputs j … j+3 in the low nibbles, j+16 … j+19 in the high ones, j = 0, 4, 8, 12 of each 32
// After all panels' codes come the scales, a panel's together: one float32 a row (I8), or for every 32 inputs 16 float16
// (Q8, Q4, Q4M); then, laid out like them, Q4M's minima. A number is code · scale + minimum, with codes counted from −128
// (I8, Q8), −8 (Q4) or 0 (Q4M). Inputs are padded with zeros to a multiple of 32, rows to one of 16.
//
// Activations are float32 between operators. What a product reads is one of three forms: float32, bfloat16, or 8 bits with a
// scale for every 32 (`QGroup`).
#pragma once
#include <stdint.h>

enum Kind : int32_t { KIND_F32 = 0, KIND_BF16 = 1, KIND_I8 = 2, KIND_Q8 = 3, KIND_Q4 = 4, KIND_Q4M = 5, NUM_KINDS = 6 };
// Tables that are only looked up keep their rows as torch has them.
enum Table : int32_t { ROWS_F32 = -1, ROWS_BF16 = -2 };
enum Form : int32_t { FORM_F32 = 0, FORM_BF16 = 1, FORM_Q = 2 };
enum Activation : int32_t { ACT_SILU = 0, ACT_GELU = 1, ACT_GELU_TANH = 2, ACT_RELU = 3, ACT_RELU2 = 4 };
enum Ceiling : int32_t { CEILING_READ = 0, CEILING_INT8 = 1, CEILING_BF16 = 2, CEILING_F32 = 3 };
enum Cache : int32_t { CACHE_F32 = 0, CACHE_BF16 = 1, CACHE_I8 = 2 };

constexpr int64_t PANEL = 16;  // rows
constexpr int64_t GROUP = 32;  // inputs

struct QGroup {  // of 32 activations: value = code · scale
    float scale;
    float sum;  // of the values
    int32_t minus8, minus128;  // −8 and −128 times the sum of the codes: what codes that don't count from 0 add
};

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t padded(int64_t inner) { return round_up(inner, GROUP); }
static inline Form form_of(int32_t kind) { return kind == KIND_F32 ? FORM_F32 : kind == KIND_BF16 ? FORM_BF16 : FORM_Q; }
static inline int64_t form_bytes(int32_t form, int64_t inner) {  // of a row; a multiple of 16
    const int64_t n = padded(inner);
    return form == FORM_F32 ? 4 * n : form == FORM_BF16 ? 2 * n : n + n / GROUP * (int64_t)sizeof(QGroup);
}

struct Layout {
    int64_t panels, groups;
    int64_t code_bytes;   // of a panel
    int64_t scale_bytes;  // of a panel
    int64_t scales_at, mins_at, bytes;

    Layout(int32_t kind, int64_t rows, int64_t inner) {
        const int64_t n = padded(inner);
        panels = (rows + PANEL - 1) / PANEL;
        groups = n / GROUP;
        code_bytes = PANEL * (kind == KIND_F32 ? 4 * n : kind == KIND_BF16 ? 2 * n : kind >= KIND_Q4 ? n / 2 : n);
        scale_bytes = kind == KIND_I8 ? PANEL * 4 : kind >= KIND_Q8 ? PANEL * 2 * groups : 0;
        scales_at = panels * code_bytes;
        mins_at = scales_at + panels * scale_bytes;
        bytes = mins_at + (kind == KIND_Q4M ? panels * scale_bytes : 0);
    }
};
