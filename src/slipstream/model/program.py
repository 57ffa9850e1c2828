"""The CPU's program of a decoder's step."""

from __future__ import annotations

from slipstream.model.decoder import Decoder
from slipstream.spec.reason import Reason

CpuProgram = Decoder


def compile_program(decoder: Decoder) -> CpuProgram | Reason:
    return Reason("no program", notable=False) if decoder.compiled is None else decoder
