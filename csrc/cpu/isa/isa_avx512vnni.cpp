#define ISA isa_avx512vnni
#include "vec_avx512.h"
// first: the lanes
#include "isa.h"

SLIPSTREAM_KERNELS(kernels_avx512vnni, "avx512-vnni")
