#define ISA isa_neoni8mm
#include "vec_neon.h"
// first: the lanes
#include "isa.h"

SLIPSTREAM_KERNELS(kernels_neoni8mm, "neon-i8mm")
