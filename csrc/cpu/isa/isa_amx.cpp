#define ISA isa_amx
#define BASE kernels_avx512bf16
#include "vec_avx512.h"
// first: the lanes
#include "tile_amx.h"
// then the tiles
#include "isa_tiles.h"

SLIPSTREAM_TILES(tiles_amx, "amx")
