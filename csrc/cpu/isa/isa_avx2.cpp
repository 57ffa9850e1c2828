#define ISA isa_avx2
#include "vec_avx2.h"
// first: the lanes
#include "isa.h"

SLIPSTREAM_KERNELS(kernels_avx2, "avx2")
