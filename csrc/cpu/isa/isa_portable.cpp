#define ISA isa_portable
#include "vec_portable.h"
// first: the lanes
#include "isa.h"

SLIPSTREAM_KERNELS(kernels_portable, "portable")
