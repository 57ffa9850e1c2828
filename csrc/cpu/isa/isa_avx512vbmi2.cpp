#define ISA isa_avx512vbmi2
#include "vec_avx512.h"
// first: the lanes
#include "isa.h"

SLIPSTREAM_KERNELS(kernels_avx512vbmi2, "avx512-vbmi2")
