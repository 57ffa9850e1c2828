// Packs weights in the layout of formats.h, and reads a row back. Plain C++, since it runs once, at load.
#pragma once
#include <cstdint>

#include "formats.h"

// Writes rows [0, count) of `values` (float32 or bfloat16, `stride` elements apart) to rows to[0 … count) of the weight `packed`,
// or without `to` to rows row0 + i. I8 is rounded here: the largest magnitude of a row becomes 127. So are Q4M and W4M (round4.h).
void pack_dense(int32_t kind, int64_t rows, int64_t inner, uint8_t* packed, const void* values, bool bf16, int64_t stride,
                int64_t count, int64_t row0, const int32_t* to);
// Writes int8 codes unchanged. Each row has a scale.
void pack_codes(int64_t rows, int64_t inner, uint8_t* packed, const int8_t* codes, const float* scales, int64_t count, int64_t row0,
                const int32_t* to);
// Writes GGUF's blocks. Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and MXFP4 have 32 numbers a block and become Q8, Q4, Q4M, Q5, Q5M and MX.
// Q2_K to Q6_K have 256, and `inner` is a multiple of that. Nothing is rounded, except that a scale of MX below 2⁻¹²⁵ becomes 0.
int64_t block_bytes(int32_t kind);  // of one such block
void pack_blocks(int32_t kind, int64_t rows, int64_t inner, uint8_t* packed, const uint8_t* blocks, int64_t count, int64_t row0,
                 const int32_t* to);
// Writes codes 0 … 15, [count, inner], of the kinds Q4, W4, W4M, W4M32 and MX. Each group of inputs has a scale and, in the kinds
// that have them, a minimum: float32 [count, groups]. Scales of Q4 must be float16 numbers, those of MX powers of two.
void pack_codes4(int32_t kind, int64_t rows, int64_t inner, uint8_t* packed, const uint8_t* codes, const float* scales,
                 const float* minima, int64_t count, int64_t row0, const int32_t* to);
// From a packed weight of the kind I8: the number of zeros, its bytes as S8, and the S8 weight.
int64_t num_zeros(int64_t rows, int64_t inner, const uint8_t* packed);
int64_t sparse_bytes(int64_t rows, int64_t inner, const uint8_t* packed);
void pack_sparse(int64_t rows, int64_t inner, const uint8_t* packed, uint8_t* sparse);
void unpack_sparse(int64_t rows, int64_t inner, const uint8_t* sparse, uint8_t* packed);  // the way back
// The numbers of row `row` of a packed weight or a table.
void unpack_row(int32_t kind, int64_t rows, int64_t inner, const uint8_t* packed, int64_t row, float* out);
