#define ISA isa_avx512
#include "vec_avx512.h"
// first: the lanes
#include "isa.h"

SLIPSTREAM_KERNELS(kernels_avx512, "avx512")
