#define ISA isa_neon
#include "vec_neon.h"
// first: the lanes
#include "isa.h"

SLIPSTREAM_KERNELS(kernels_neon, "neon")
