#define ISA isa_avxvnni
#include "vec_avx2.h"
// first: the lanes
#include "isa.h"

SLIPSTREAM_KERNELS(kernels_avxvnni, "avx2-vnni")
