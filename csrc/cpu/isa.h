// The kernels once more, for the instruction set that the including file was compiled for. `ISA` is a name of its own for each:
// the linker must not merge functions of different ones.
#include "attention.h"
#include "ceiling.h"
#include "linear.h"
#include "pointwise.h"

#define SLIPSTREAM_KERNELS(function, label)                                                                             \
    const Kernels* function() {                                                                                         \
        static const Kernels table = {label, ISA::linear, ISA::gated, ISA::norm, ISA::activation, ISA::convert,         \
                                      ISA::rope_and_cache, ISA::latent_row, ISA::decode, ISA::prefill, ISA::largest,    \
                                      ISA::argmax, ISA::ceiling, ISA::ceiling_macs, ISA::decode_scratch,                \
                                      ISA::prefill_scratch};                                                            \
        return &table;                                                                                                  \
    }
