// Laying weights out in the kernels' order, and reading a row back. Plain C++: it runs once, at load.
#pragma once
#include <cstdint>

#include "formats.h"

// Rows [0, count) of `values` (float32 or bfloat16, `stride` elements apart) become rows to[0 … count) (row0 + i without `to`) of
// the weight `packed`. I8 is rounded here: the largest magnitude of a row falls on 127.
void pack_dense(int32_t kind, int64_t rows, int64_t inner, uint8_t* packed, const void* values, bool bf16, int64_t stride,
                int64_t count, int64_t row0, const int32_t* to);
// int8 codes as they are, with a scale a row.
void pack_codes(int64_t rows, int64_t inner, uint8_t* packed, const int8_t* codes, const float* scales, int64_t count, int64_t row0,
                const int32_t* to);
// GGUF's blocks: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, MXFP4 (of 32 numbers) for the kinds Q8, Q4, Q4M, Q5, Q5M, MX, and Q2_K to Q6_K (of
// 256, which `inner` is a multiple of); nothing is rounded, but a scale of MX below 2⁻¹²⁵, which is 0.
int64_t block_bytes(int32_t kind);  // of one block
void pack_blocks(int32_t kind, int64_t rows, int64_t inner, uint8_t* packed, const uint8_t* blocks, int64_t count, int64_t row0,
                 const int32_t* to);
// Codes 0 … 15, [count, inner], for the kinds Q4, W4, W4M, W4M32 and MX, with a scale (and, for those with minima, what is added)
// for each group of inputs: float32 [count, groups]. Of Q4, scales must be float16's, of MX powers of two.
void pack_codes4(int32_t kind, int64_t rows, int64_t inner, uint8_t* packed, const uint8_t* codes, const float* scales,
                 const float* minima, int64_t count, int64_t row0, const int32_t* to);
// Of a packed weight of the kind I8: how many of its numbers are 0, what it takes as S8, and that.
int64_t num_zeros(int64_t rows, int64_t inner, const uint8_t* packed);
int64_t sparse_bytes(int64_t rows, int64_t inner, const uint8_t* packed);
void pack_sparse(int64_t rows, int64_t inner, const uint8_t* packed, uint8_t* sparse);
// Row `row` of a packed weight or a table, as the numbers it stands for.
void unpack_row(int32_t kind, int64_t rows, int64_t inner, const uint8_t* packed, int64_t row, float* out);
