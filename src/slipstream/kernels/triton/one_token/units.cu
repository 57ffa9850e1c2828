// Part of `kernel.cu`: products with weights in GGUF's types, as `gguf_packing.py` lays them out (`CodedLinear`).
//
// A unit is 8 groups of GROUP_SIZE inputs of a row. Word j of a unit has number j of each group: nibble g of group g, or for codes of
// 8 bits byte g % 4 of two words. Integer tensor cores multiply bytes:
//
// 1. Inputs are integers of 16 bits times a scale for each 256, as two digits of a byte (`store_digits`). Sums are exact.
// 2. A word's bytes are four groups, so a mask of its low or its high nibbles is an operand. High nibbles are 16 times too large.
// 3. Columns 0 to 3 of the inputs' operand are the four groups, with the high digit, and 4 to 7 the same with the low one: a
//    column has a digit in the byte of its own group, and zeros. So each sum is of one group, and no lane repeats another's work.
// 4. Bits above the low four are an operand of their own, wherever they lie in their bytes: a group's factor says where.
// 5. Codes begin at 0, not at the code of 0, and have minima: both are a group's number times the sum of its inputs.

constexpr int CODED = 6;  // the form of a model in such types
enum { Q4_K = 8, Q5_K, Q6_K, Q4_0, Q5_0, Q8_0, END_OF_CODED };  // in the order of `CODED` in coded.py
__device__ constexpr bool is_coded(int form) { return form >= Q4_K && form < END_OF_CODED; }
constexpr int UNITS_IN_STAGE = 8;  // of each row

template <int FORM_> struct Units {
    static constexpr int BITS = FORM_ == Q4_K || FORM_ == Q4_0 ? 4 : FORM_ == Q6_K ? 6 : FORM_ == Q8_0 ? 8 : 5;
    static constexpr int GROUP_SIZE = FORM_ == Q6_K ? 16 : 32, INPUTS = 8 * GROUP_SIZE, IN_STAGE = UNITS_IN_STAGE;
    static constexpr bool HALVES = FORM_ == Q4_0 || FORM_ == Q5_0 || FORM_ == Q8_0;  // scales are float16
    static constexpr bool MINS = FORM_ == Q4_K || FORM_ == Q5_K;
    static constexpr int ZERO = FORM_ == Q4_0 ? 8 : FORM_ == Q5_0 ? 16 : FORM_ == Q6_K ? 32 : 0;  // codes of 8 bits are signed
    static constexpr int ROW = GROUP_SIZE * 4, CODES = 8 * ROW * (BITS == 8 ? 2 : 1);  // bytes, of a row and of 8 rows
    static constexpr int HIGH = BITS == 6 ? 16 * GROUP_SIZE : BITS == 5 ? 8 * GROUP_SIZE : 0;
    static constexpr int FACTORS = HALVES ? 128 : MINS ? 160 : 96;
    static constexpr int HIGH_AT = IN_STAGE * CODES, FACTORS_AT_ = HIGH_AT + IN_STAGE * HIGH;
    static constexpr int SLAB = (FACTORS_AT_ + IN_STAGE * FACTORS + 127) / 128 * 128 + 64;  // the two slabs in different banks
    static constexpr float MAGIC = 12582912.0f;  // 1.5 · 2^23: small integers added to its bits are its mantissa's
    static constexpr int MAGIC_BITS = 0x4B400000;

    static DEVICE u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
    // Byte i of a word, 0 … 255.
    static DEVICE float byte_of(u32 w, int i) { return __uint_as_float(permute(w, 0x4B000000u, 0x7440 | i)) - 8388608.0f; }
    // The bits above the low nibbles of word i, for groups of one parity. `v`: those of a lane's four words.
    static DEVICE u32 high_of(const uint2& v, int i, int parity) {
        if (BITS == 6) return permute(i < 2 ? v.x : v.y, 0, i % 2 ? 0x3322 : 0x1100) & (parity ? 0xc00cc00cu : 0x30033003u);
        return permute(v.x, 0, 0x1111 * i) & (parity ? 0x80200802u : 0x40100401u);
    }
    // What such sums of a parity are multiplied by, beside those of low nibbles, in column 2 · half + i.
    static DEVICE float high_factor(int half, int i, int parity) {
        if (BITS == 6) return (i ? 1.0f : 16.0f) * (parity ? 4.0f : 1.0f);
        return (parity ? 128.0f : 16.0f) * (i ? 0.25f : 1.0f) * (half ? 0.0625f : 1.0f);
    }

    // Multiply this warp's units of a stage, which has `units` from `first` on. Row r of a warp's operand is row r / 2 of slab
    // r % 2, and r + 8 row 4 + r / 2. `input`: the digits; `sums`: those of the groups, [2, stride]; `scales`: of 256 inputs.
    static DEVICE void multiply(float (&sum)[4], const u8* stage, const u8* input, int plane, const float* sums, int sums_stride,
                                const float* scales, int first, int units) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
        const int t = r % 4, half = q % 2, digit = q / 2;
        const u8* slab = stage + r % 2 * SLAB;
        const u32 no_byte = 0x4444u & ~(15u << 4 * t);
        u32 place[4];  // selectors that put a byte into column r's own
#pragma unroll
        for (int i = 0; i < 4; i++) place[i] = no_byte | (u32)i << 4 * t;
        const u8* own_input = input + r / 4 * plane + t * (BITS == 8 ? GROUP_SIZE : 2 * GROUP_SIZE) + q * 4;
        const float digit_factor = digit ? 1.0f : 256.0f;
        for (int unit = warp; unit < units; unit += WARPS) {
            constexpr int PARTS = GROUP_SIZE / 16;  // a lane's words of a row: four of each 16
            const int at = first + unit;
            const u8* codes = slab + unit * CODES + r / 2 * ROW + q * 16;
            u32 x[2][PARTS];
#pragma unroll
            for (int parity = 0; parity < 2; parity++)
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    x[parity][part] =
                        *(const u32*)(own_input + at * INPUTS + parity * (BITS == 8 ? 4 * GROUP_SIZE : GROUP_SIZE) + part * 16);
            int c[2][4], above[2][4];
            uint4 w[2][PARTS];
            uint2 high[2][PARTS];
#pragma unroll
            for (int parity = 0; parity < 2; parity++) {
                if (parity == 0 || BITS == 8) {
#pragma unroll
                    for (int row = 0; row < 2; row++)
#pragma unroll
                        for (int part = 0; part < PARTS; part++) {
                            w[row][part] = *(const uint4*)(codes + parity * 8 * ROW + row * 4 * ROW + part * 64);
                            const u8* bits = slab + HIGH_AT + unit * HIGH + (r / 2 + 4 * row) * (HIGH / 8);
                            if (BITS == 6) high[row][part] = *(const uint2*)(bits + part * 32 + q * 8);
                            if (BITS == 5) high[row][part].x = *(const u32*)(bits + part * 16 + q * 4);
                        }
                }
#pragma unroll
                for (int i = 0; i < 4; i++) c[parity][i] = above[parity][i] = MAGIC_BITS;
                const u32 mask = BITS == 8 ? ~0u : parity ? 0xf0f0f0f0u : 0x0f0f0f0fu;
#pragma unroll
                for (int i = 0; i < 4; i += 2 / PARTS) {  // the operand's two halves: two parts, or two words of one
                    const int p = PARTS - 1, j = i + 2 - PARTS;
                    const u32 b0 = permute(x[parity][0], 0, place[i]), b1 = permute(x[parity][p], 0, place[j]);
                    mma_bytes<BITS == 8>(c[parity], word(w[0][0], i) & mask, word(w[1][0], i) & mask, word(w[0][p], j) & mask,
                                         word(w[1][p], j) & mask, b0, b1);
                    if (HIGH)
                        mma_bytes<false>(above[parity], high_of(high[0][0], i, parity), high_of(high[1][0], i, parity),
                                         high_of(high[0][p], j, parity), high_of(high[1][p], j, parity), b0, b1);
                }
            }
            const float* own_sums = sums + digit * sums_stride + at * 8 + half * 4;  // of groups 4 · half + 2 · i + parity
            float s[4] = {};
            if (ZERO || MINS) {
                const uint4 v = *(const uint4*)own_sums;
#pragma unroll
                for (int i = 0; i < 4; i++) s[i] = __uint_as_float(word(v, i));
            }
            const float factor = scales[at * INPUTS / 256] * digit_factor;
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const u8* factors = slab + FACTORS_AT_ + unit * FACTORS;
                const int n = r / 2 + 4 * row;
                uint2 v = {};
                if (HALVES) {  // group 2 · word + a half of it
                    const u32* halves = (const u32*)(factors + n * 16);
                    v = BITS == 8 ? uint2{halves[half], halves[2 + half]} : uint2{halves[2 * half], halves[2 * half + 1]};
                } else if (MINS) v = *(const uint2*)(factors + n * 16 + half * 8);
                else v.x = *(const u32*)(factors + n * 8 + half * 4);
                float scale[4], minimum = 0.0f, y = 0.0f;  // by group, 2 · i + parity; of 8 bits: 2 · parity + i
                if (HALVES) unpack_half2(v.x, scale[0], scale[1]), unpack_half2(v.y, scale[2], scale[3]);
#pragma unroll
                for (int g = 0; g < 4; g++) {
                    const int i = BITS == 8 ? g % 2 : g / 2, parity = BITS == 8 ? g / 2 : g % 2;
                    float z = __int_as_float(c[parity][2 * row + i]) - MAGIC;
                    if (HIGH) z += (__int_as_float(above[parity][2 * row + i]) - MAGIC) * high_factor(half, i, parity);
                    if (BITS != 8 && parity) z *= 0.0625f;
                    if (ZERO) z -= (float)ZERO * s[g];
                    y += z * (HALVES ? scale[g] : byte_of(v.x, g) - (MINS ? 0.0f : 128.0f));
                    if (MINS) minimum += byte_of(v.y, g) * s[g];
                }
                if (!HALVES) {
                    float d, d_of_mins;
                    unpack_half2(*(const u32*)(factors + (MINS ? 128 : 64) + n * 4), d, d_of_mins);
                    y = y * d - (MINS ? d_of_mins * minimum : 0.0f);
                }
                sum[2 * row] += factor * y;
            }
        }
    }
};
// Call with the form that is bit `form` of FORMS, as a type.
template <int FORM_> struct FormOf { static constexpr int value = FORM_; };
template <int FORMS, int FORM_ = Q4_K, typename Call> DEVICE void with_form(int form, Call call) {
    if constexpr (FORM != CODED) call(FormOf<FORM>());
    else if constexpr (FORM_ < END_OF_CODED) {
        if constexpr (FORMS >> (FORM_ - Q4_K) & 1) {
            if ((FORMS >> (FORM_ - Q4_K)) == 1 || form == FORM_ - Q4_K) {  // the last needs no test
                call(FormOf<FORM_>());
                return;
            }
        }
        with_form<FORMS, FORM_ + 1>(form, call);
    }
}
