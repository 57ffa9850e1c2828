// What isa_amx.cpp computes, on any machine: for tests.
#define ISA isa_portable_amx
#define BASE kernels_portable
#include "vec_portable.h"
// first: the lanes
#include "tile_portable.h"
// then the tiles
#include "isa_tiles.h"

SLIPSTREAM_TILES(tiles_portable, "portable-amx")
