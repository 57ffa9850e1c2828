"""The memory ledger's bytes of keys, values and recurrent states equal the allocated ones."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream import LLM
from tests.support import mtp_layers, tiny_models

SETTINGS = dict(
    device="cpu",
    dtype="bfloat16",
    num_threads=1,
    skip_tokenizer_init=True,
    block_size=4,
    max_model_len=64,
    max_num_seqs=3,
)
DRAFTS = {"method": "mtp", "num_speculative_tokens": 2}
CASES = {
    **{family: {} for family in tiny_models.RECURRENT},
    **{
        f"{family}-drafts": {"speculative_config": DRAFTS}
        for family in ("qwen3_next", "nemotron_h")
    },
    "jamba-few": {"state_slots": 14},
    "lfm2-torch": {"kernels": "torch"},
    "mamba2-torch": {"kernels": "torch"},
}


def arrays(value, found):
    """All arrays within `value`, by the address of the memory that they are views of."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            arrays(getattr(value, field.name), found)
    elif isinstance(value, (list, tuple)):
        for one in value:
            arrays(one, found)
    elif hasattr(value, "nbytes"):
        while value.base is not None and hasattr(value.base, "nbytes"):
            value = value.base
        found[id(value)] = value.nbytes
    return found


@pytest.mark.parametrize("case", CASES)
def test_ledger_equals_the_bytes_of_cache_and_states(case, tmp_path):
    family, _, how = case.partition("-")
    (mtp_layers if how == "drafts" else tiny_models).build(tmp_path, family)
    disk = dict(kv_disk_bytes=2**22, kv_disk_path=str(tmp_path / "tier"))
    with LLM(str(tmp_path), **SETTINGS, **disk, **CASES[case]) as llm:
        ledger, executor = llm.core.ledger, llm.core.executor
        draft = executor.runner.draft
        kv = [executor.runner.kv, draft and (draft.kv, draft.states.kept)]
        states = sum(arrays([layer.state for layer in executor.runner.kv], {}).values())
        assert states == ledger.state_bytes > 0
        assert states == ledger.num_states * executor.stores[0].sizes[1]  # a checkpoint's on a disk
        sizes = arrays(
            kv, {}
        ).values()  # without what stands for the keys of layers without attention
        assert sum(n for n in sizes if n > 2) - states == ledger.kv_bytes
