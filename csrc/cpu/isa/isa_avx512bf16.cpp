#define ISA isa_avx512bf16
#include "vec_avx512.h"
// first: the lanes
#include "isa.h"

SLIPSTREAM_KERNELS(kernels_avx512bf16, "avx512-bf16")
