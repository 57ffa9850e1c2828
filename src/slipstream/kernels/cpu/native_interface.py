"""The C interface (csrc/cpu/slipstream_cpu.h) for ctypes: structures, and the functions' signatures
without `ss_`."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from typing import Any


class LayerPointers(ctypes.Structure):
    """The C struct `ss_layer_kv`: a layer's cache and states."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("k", "v", "k_scale", "v_scale", "conv", "recurrent", "index")
        ),
        ("conv_type", c_int32),
    )


class GroupInputs(ctypes.Structure):
    """The C struct `ss_group`: block tables and slots of one cache group."""

    _fields_ = (
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
        ("slots", c_void_p),
    )


class StepInputs(ctypes.Structure):
    """The C struct `ss_step`: the inputs of one step."""

    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_seqs", "num_decodes", "block_size")),
        ("cache", c_int32),
        *((name, c_void_p) for name in ("token_ids", "query_start_loc", "positions")),
        ("groups", ctypes.POINTER(GroupInputs)),
        ("layers", ctypes.POINTER(LayerPointers)),
        ("state_read", c_void_p),
        ("state_write", c_void_p),
    )


class Job(ctypes.Structure):
    """The C struct `ss_job`: a program and the step that it is to compute."""

    _fields_ = (("program", c_void_p), ("num_tokens", c_int64))


_I, _L, _F, _P = c_int32, c_int64, c_float, c_void_p
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "abi": (_I, []),
    "num_isas": (_I, []),
    "isa_name": (c_char_p, [_I]),
    "isa_usable": (_I, [_I]),
    "engine_create": (_P, [_I, _I]),
    "engine_destroy": (None, [_P]),
    "engine_use": (None, [_P, _I]),
    "engine_last_ns": (_L, [_P]),
    "packed_bytes": (_L, [_I, _L, _L]),
    "pack_dense": (None, [_P, _I, _L, _L, _P, _P, _I, _L, _L, _L, _P]),
    "pack_codes": (None, [_P, _L, _L, _P, _P, _P, _L, _L, _P]),
    "pack_blocks": (None, [_P, _I, _L, _L, _P, _P, _L, _L, _P]),
    "pack_codes4": (None, [_P, _I, _L, _L, _P, _P, _P, _P, _L, _L, _P]),
    "num_zeros": (_L, [_L, _L, _P]),
    "sparse_bytes": (_L, [_L, _L, _P]),
    "pack_sparse": (None, [_L, _L, _P, _P]),
    "unpack_sparse": (None, [_L, _L, _P, _P]),
    "unpack_rows": (None, [_I, _L, _L, _P, _P, _L, _P]),
    "program_create": (_P, [_P]),
    "program_destroy": (None, [_P]),
    "buffer": (_I, [_P, _L, _L]),
    "bind": (None, [_P, _I, _P, _L]),
    "form_bytes": (_L, [_I, _L]),
    "add_embed": (None, [_P, _I, _I, _L, _I, _L, _L, _P, _F, _I]),
    "add_sum": (None, [_P, _I, _I, _L, _F]),
    "add_layer_inputs": (None, [_P, _I, _I, _L, _L, _P, _F, _L, _P, _F, _F, _F]),
    "add_gated_by": (None, [_P, _I, _I, _I, _L, _I, _I, _F, _F, _L]),
    "add_norm": (None, [_P, _I, _I, _I, _I, _I, _L, _P, _P, _F, _F]),
    "add_norm_parts": (None, [_P, _I, _L, _L, _I, _L, _P, _P, _L, _F, _F]),
    "add_scale": (None, [_P, _I, _L, _F, _P, _F]),
    "add_convert": (None, [_P, _I, _I, _I, _L, _L]),
    "add_place": (None, [_P, _I, _L, _I, _L, _L]),
    "add_linear": (None, [_P, _I, _I, _L, _I, _L, _L, _P, _P, _I, _P, _L]),
    "add_head_linear": (None, [_P, _I, _I, _L, _L, _L, _I, _L, _L, _P, _L]),
    "add_gated_linear": (None, [_P, _I, _I, _I, _I, _F, _F, _I, _L, _L, _P, _P, _P, _L]),
    "add_activation": (None, [_P, _I, _I, _I, _I, _F, _F, _I, _L, _L]),
    "add_route": (None, [_P, _I, _L, _L, _I, _F, _I, _F, _P, _P, _L, _L, _I, _L, _L, _L]),
    "add_choice": (None, [_P, _I, _L, _L]),
    "add_gather": (None, [_P, _I, _I, _I, _L, _I, _I]),
    "add_expert_linear": (None, [_P, _I, _I, _L, _I, _I, _F, _F, _I, _L, _L, _P, _L, _P, _L]),
    "add_combine": (None, [_P, _I, _I, _L, _I, _I, _I, _I]),
    "add_rope_and_cache": (
        None,
        [_P, _I, _I, _I, _L, _L, _L, _P, _L, _I, _P, _P, _F, _F, _F, _I, _I, _I],
    ),
    "add_choose": (None, [_P, _I, _I, _I, _I, _L, _L, _L]),
    "add_sparse_attention": (None, [_P, _I, _I, _I, _I, _L, _L, _L, _L, _F]),
    "add_latent_queries": (None, [_P, _I, _I, _I, _I, _I, _I, _L, _L, _L, _P, _F, _P, _L, _I]),
    "add_attention": (None, [_P, _I, _I, _I, _I, _L, _L, _L, _L, _F, _L, _F, _P, _P, _P, _L, _I]),
    "add_conv": (None, [_P, _I, _L, _L, _L, _I, _I, _I, _L, _L, _P, _P, _I]),
    "add_delta": (None, [_P, _I, _I, _I, _L, _I, _I, _L, _L, _L, _L, _I, _F, _F, _P, _P]),
    "add_ssd": (None, [_P, _I, _L, _I, _L, _I, _I, _L, _L, _L, _L, _F, _F, _P, _P, _P]),
    "add_scan": (None, [_P, _I, _I, _I, _I, _I, _I, _L, _L, _P, _P, _P]),
    "add_gated_norm": (None, [_P, _I, _I, _L, _I, _I, _L, _L, _P, _F, _I, _I]),
    "add_argmax": (None, [_P, _I, _I, _L]),
    "add_draw": (None, [_P, _I, _I, _I, _L]),
    "add_linear_draw": (None, [_P, _I, _I, _I, _I, _I, _L, _L, _P, _P]),
    "add_linear_argmax": (None, [_P, _I, _I, _I, _L, _L, _P, _P]),
    "add_ceiling": (None, [_P, _I, _P, _L, _L]),
    "ceiling_macs": (_L, [_P, _I, _L]),
    "run": (None, [_P, _P, ctypes.POINTER(StepInputs)]),
    "begin": (None, [_P, _P, ctypes.POINTER(StepInputs)]),
    "wait": (None, [_P]),
    "run_job": (None, [_P]),
    "profile": (_I, [_P, _I, _P, _I]),
}
