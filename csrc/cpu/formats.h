// The layout of weights and activations in memory. It is the same for every instruction set.
//
// A weight [rows, inner] is cut into panels of 16 rows. A panel is a list of 64-byte lines, with some inputs of all 16 rows each:
//   F32         1 input  × 16 rows × 4 bytes
//   BF16        2 inputs × 16 rows × 2 bytes
//   I8 Q8       4 inputs × 16 rows × 1 byte
//   4 to 6 bits 8 inputs × 16 rows: inputs j … j+3 in the low nibbles, j+16 … j+19 in the high ones, j = 0, 4, 8, 12 of each 32.
//               5 bits have 64 bytes more for each 32 inputs: bit t of a byte belongs to inputs 4t … 4t+3. 6 bits have 128 more:
//               bits 2t and 2t+1 belong to inputs 4t … 4t+3 of the first 16, then of the last 16.
//   2, 3 bits   16 inputs × 16 rows: bits 2t and 2t+1 of a byte belong to inputs 4t … 4t+3 of these. 3 bits have 64 bytes more
//               after each 32 inputs, as 5 bits have.
// Inputs are padded with zeros to a multiple of 32, rows to a multiple of 16. A number is (code − from) · scale + minimum. Behind the
// codes of all panels come the scales, panel by panel. Q4M, Q5M, W4M and W4M32 have minima behind the scales, in the same
// layout. The K kinds have both in one record:
//   kind          bits from  scale and minimum, each for 16 rows side by side
//   I8            8    128   one float32 a row
//   Q8 Q4 Q5      8 4 5 128 8 16  a float16 for every 32 inputs
//   Q4M Q5M       4 5  0     the same, and a minimum
//   Q4K Q5K       4 5  0     for every 256 inputs two float16 d, e; then for each 32 of them two bytes s, m: s · d, m · e
//   Q6K           6    32    for every 256 inputs a float16 d; then for each 16 of them a signed byte s: s · d
//   Q3K           3    4     the same
//   Q2K           2    0     for every 256 inputs two float16 d, e; then for each 16 of them a byte of two nibbles s, m: s · d, m · e
//   W4 W4M        4    8 0   a float32 for every 128 inputs; W4M: a minimum too
//   W4M32         4    0     both for every 32
//   MX            4    12    for every 32 inputs a byte, the float32 exponent of the scale. Codes stand for `MX_NUMBERS`
//
// S8 is I8 without its zeros:
// 1. The offset of each panel, and of the end (int64, bytes from the start of the weight).
// 2. The scales, one float32 a row.
// 3. The panels. First a mask of 64 bits for each line of I8, bit i set if byte i is not a zero; then those bytes, in order. A panel
//    is padded to a multiple of 64 bytes, and the weight by 64 more, which may be read.
//
// Activations are float32 between operators. A product reads them in one of three forms: float32, bfloat16, or 8 bits with a scale
// for every 32 (`QGroup`).
#pragma once
#include <stdint.h>
#include <string.h>

enum Kind : int32_t {
    KIND_F32 = 0, KIND_BF16 = 1, KIND_I8 = 2, KIND_Q8 = 3, KIND_Q4 = 4, KIND_Q4M = 5, KIND_S8 = 6, KIND_Q5 = 7, KIND_Q5M = 8,
    KIND_Q4K = 9, KIND_Q5K = 10, KIND_Q6K = 11, KIND_W4 = 12, KIND_W4M = 13, KIND_W4M32 = 14, KIND_MX = 15, KIND_Q2K = 16,
    KIND_Q3K = 17
};
// Embedding tables keep torch's layout.
enum Table : int32_t { ROWS_F32 = -1, ROWS_BF16 = -2 };
enum Form : int32_t { FORM_F32 = 0, FORM_BF16 = 1, FORM_Q = 2 };
enum Activation : int32_t { ACT_SILU = 0, ACT_GELU = 1, ACT_GELU_TANH = 2, ACT_RELU = 3, ACT_RELU2 = 4, ACT_CLAMPED_SWIGLU = 5, ACT_XIELU = 6 };
enum Ceiling : int32_t { CEILING_READ = 0, CEILING_INT8 = 1, CEILING_BF16 = 2, CEILING_F32 = 3, CEILING_INT6 = 4 };
enum Cache : int32_t { CACHE_F32 = 0, CACHE_BF16 = 1, CACHE_I8 = 2 };

constexpr int64_t PANEL = 16;  // rows
constexpr int64_t GROUP = 32;  // inputs
constexpr int64_t SUPER = 8;   // groups of a K kind that share d and e

// The values of MX's codes, floats of 4 bits (e2m1): twice the value, plus 12.
alignas(16) static const uint8_t MX_NUMBERS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct QGroup {  // of 32 activations: value = code · scale
    float scale;
    float sum;          // of the values
    int16_t halves[2];  // sums of the first 16 codes and of the last
    int32_t minus128;   // −128 times the sum of the codes: the correction for weights stored as number + 128
};

constexpr bool by_halves(int32_t kind) { return kind == KIND_Q6K || kind == KIND_Q3K || kind == KIND_Q2K; }  // scales for 16
constexpr bool is_k(int32_t kind) { return by_halves(kind) || kind == KIND_Q4K || kind == KIND_Q5K; }
constexpr bool is_w4(int32_t kind) { return kind == KIND_W4 || kind == KIND_W4M || kind == KIND_W4M32; }
constexpr bool scaled_by_row(int32_t kind) { return kind == KIND_I8 || kind == KIND_S8; }
constexpr bool has_mins(int32_t kind) {  // minima that do not stand among the scales
    return kind == KIND_Q4M || kind == KIND_Q5M || kind == KIND_W4M || kind == KIND_W4M32;
}
constexpr int code_bits(int32_t kind) {
    switch (kind) {
        case KIND_F32: return 32;
        case KIND_BF16: return 16;
        case KIND_I8: case KIND_Q8: case KIND_S8: return 8;
        case KIND_Q5: case KIND_Q5M: case KIND_Q5K: return 5;
        case KIND_Q6K: return 6;
        case KIND_Q3K: return 3;
        case KIND_Q2K: return 2;
        default: return 4;
    }
}
constexpr int code_from(int32_t kind) {  // the code of number 0
    switch (kind) {
        case KIND_I8: case KIND_Q8: case KIND_S8: return 128;
        case KIND_Q6K: return 32;
        case KIND_Q5: return 16;
        case KIND_MX: return 12;
        case KIND_Q3K: return 4;
        case KIND_Q4: case KIND_W4: return 8;
        default: return 0;
    }
}
constexpr int64_t groups_a_scale(int32_t kind) { return kind == KIND_W4 || kind == KIND_W4M ? 4 : 1; }
// The place of a group's scales among a panel's, and in a K kind that of its d and e.
constexpr int64_t num_super(int32_t kind) { return kind == KIND_Q6K || kind == KIND_Q3K ? 1 : 2; }
constexpr int64_t super_bytes(int32_t kind) { return num_super(kind) * 2 * PANEL + SUPER * 2 * PANEL; }
constexpr int64_t super_at(int32_t kind, int64_t group) { return group / SUPER * super_bytes(kind); }
constexpr int64_t scale_at(int32_t kind, int64_t group) {
    if (is_k(kind)) return super_at(kind, group) + num_super(kind) * 2 * PANEL + group % SUPER * 2 * PANEL;
    if (kind == KIND_MX) return group * PANEL;
    return is_w4(kind) ? group / groups_a_scale(kind) * 4 * PANEL : group * 2 * PANEL;
}

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static inline int64_t padded(int64_t inner) { return round_up(inner, GROUP); }
static inline Form form_of(int32_t kind) { return kind == KIND_F32 ? FORM_F32 : kind == KIND_BF16 ? FORM_BF16 : FORM_Q; }
static inline int64_t form_bytes(int32_t form, int64_t inner) {  // of a row; a multiple of 16
    const int64_t n = padded(inner);
    return form == FORM_F32 ? 4 * n : form == FORM_BF16 ? 2 * n : n + n / GROUP * (int64_t)sizeof(QGroup);
}

struct Layout {
    int64_t panels, groups;
    int64_t code_bytes;   // of a panel; in S8 of its masks alone
    int64_t scale_bytes;  // of a panel
    int64_t scales_at, mins_at, bytes;  // bytes: in S8 those before the first panel

    Layout(int32_t kind, int64_t rows, int64_t inner) {
        panels = (rows + PANEL - 1) / PANEL;
        groups = padded(inner) / GROUP;
        code_bytes = groups * GROUP * PANEL * code_bits(kind) / 8;
        scale_bytes = 0;
        if (scaled_by_row(kind)) scale_bytes = PANEL * 4;
        else if (is_k(kind)) scale_bytes = super_at(kind, round_up(groups, SUPER));
        else if (kind >= KIND_Q8) scale_bytes = scale_at(kind, round_up(groups, groups_a_scale(kind)));
        scales_at = panels * code_bytes;
        if (kind == KIND_S8) {
            code_bytes = groups * GROUP * PANEL / 8;
            scales_at = round_up(8 * (panels + 1), 64);
        }
        mins_at = scales_at + panels * scale_bytes;
        bytes = mins_at + (has_mins(kind) ? panels * scale_bytes : 0);
    }
};

// Where a panel of S8 begins with its masks. Its numbers follow Layout::code_bytes later. Panel `panels` is the end.
static inline int64_t sparse_panel(const uint8_t* packed, int64_t panel) {
    int64_t at;
    memcpy(&at, packed + 8 * panel, 8);
    return at;
}
