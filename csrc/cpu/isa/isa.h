// The kernels for the instruction set that the including file is compiled for. `ISA` names a namespace of its own for each, so
// that the linker does not merge functions of different instruction sets.
#include "attention_decode.h"
#include "attention_vectors.h"
#include "ceiling.h"
#include "linear.h"
#include "pointwise.h"
#include "draw.h"
#include "recurrent.h"

#define SLIPSTREAM_KERNELS(function, label)                                                                             \
    const Kernels* function() {                                                                                         \
        static const Kernels table = {label, ISA::linear, ISA::gated, ISA::norm, ISA::activation, ISA::convert,         \
                                      ISA::rope_and_cache, ISA::latent_row, ISA::decode, ISA::join_ranges,              \
                                      ISA::prefill, ISA::largest, ISA::argmax, ISA::summarize, ISA::draw, ISA::ceiling, \
                                      ISA::ceiling_macs, ISA::decode_scratch,                                           \
                                      ISA::prefill_scratch, nullptr, ISA::conv, ISA::delta, ISA::ssd, ISA::scan,        \
                                      ISA::gated_norm, ISA::conv_scratch, ISA::delta_scratch, ISA::ssd_scratch,         \
                                      ISA::scan_scratch, ISA::index_scores};                                            \
        return &table;                                                                                                  \
    }
