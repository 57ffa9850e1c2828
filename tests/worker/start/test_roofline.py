"""The roofline's account: which operators, how many bytes and operations, against ceilings that are given."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream import LLM
from slipstream.errors import ConfigError
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.spec.scheme import SCHEMES
from slipstream.worker.start import roofline
from slipstream.worker.start.roofline import Ceilings, measure_ceilings, measure_roofline
from tests.support import tiny_models

pytestmark = pytest.mark.usefixtures("by_torch")

CEILINGS = Ceilings(read=1e9, int6=8e9, int8=4e9, bfloat16=2e9, float32=1e9)


@pytest.fixture
def given(monkeypatch):
    monkeypatch.setattr(roofline, "measure_ceilings", lambda engine: CEILINGS)


def test_ceilings_of_this_machine(monkeypatch):
    monkeypatch.setattr(roofline, "READ_BYTES", 2**20)
    monkeypatch.setattr(roofline, "MULTIPLY_ROUNDS", 1000)
    found = measure_ceilings(NativeOps(1).pool)
    assert min(dataclasses.asdict(found).values()) > 0


def test_the_account_of_a_step(tiny_model, given):
    with LLM(str(tiny_model), dtype="bfloat16", num_threads=1, max_model_len=64) as llm:
        found = measure_roofline(llm.core.executor.runner, batch_sizes=[3], prompt=16, context=32)
        spec = llm.core.executor.runner.model.spec
    decode, prefill = found.steps
    shapes = [(s.name, s.num_seqs, s.num_new, s.length) for s in found.steps]
    assert shapes == [("decode 3", 3, 1, 32), ("prefill 16", 1, 16, 16)]
    a = spec.layers[0].attention
    for step, pairs, cached in ((decode, 3 * 32, 3 * 32), (prefill, 16 * 17 // 2, 16)):
        by_name = {o.operator: o for o in step.operators}
        attention = by_name["attention"]
        assert attention.count == spec.num_layers
        assert attention.num_bytes == spec.num_layers * cached * 2 * a.kv_size * 2
        assert attention.operations == spec.num_layers * pairs * 4 * a.q_size
        products = [o for o in step.operators if "linear" in o.operator]
        head = step.num_seqs * spec.vocab_size * spec.hidden_size
        body = sum(
            p.rows * p.inner for layer in spec.layers for p in layer.weight_shapes(spec.hidden_size)
        )
        assert sum(o.operations for o in products) == 2 * (
            head + step.num_seqs * step.num_new * body
        )
        for o in step.operators:
            if o.floor_s is not None:
                assert o.floor_s == pytest.approx(
                    max(o.num_bytes / CEILINGS.read, o.operations / CEILINGS.bfloat16)
                )
                assert o.bound in ("read", "bfloat16")
        assert by_name["norm"].floor_s is None
        assert step.floor_s > 0
        assert step.seconds > 0


@pytest.mark.parametrize(
    ("scheme", "kind"), [("int8", "int8"), ("int4", "int6"), (None, "float32")]
)
def test_the_ceiling_of_a_weight(scheme, kind):
    scheme = SCHEMES[scheme] if scheme else None
    (part,) = NativeOps(1).quantize_weight(torch.randn(16, 128), None, scheme).parts
    assert roofline._type(part) == kind


def test_sparse_weights_of_one_shape_are_one_row():
    each = [(0.5, 10**8, 10**8), (1.5, 3 * 10**8, 10**8)]
    share = roofline._share("linear 16 × 16, sparse int8", "int8", each, CEILINGS)
    assert (share.count, share.seconds, share.num_bytes, share.operations) == (
        2,
        2.0,
        4 * 10**8,
        2 * 10**8,
    )
    assert (share.bound, share.share) == ("read", pytest.approx(0.2))


def test_what_has_no_program_is_refused(tiny_model, given):
    with (
        LLM(str(tiny_model), kernels="torch", max_model_len=64) as llm,
        pytest.raises(ConfigError, match="kernels"),
    ):
        measure_roofline(llm.core.executor.runner, batch_sizes=[1], prompt=4, context=4)
    with (
        LLM(str(tiny_model), max_model_len=64) as llm,
        pytest.raises(ConfigError, match="max_model_len"),
    ):
        measure_roofline(llm.core.executor.runner, batch_sizes=[1], prompt=65, context=4)


def test_an_encoder_is_refused(tmp_path, given):
    tiny_models.build_encoder(tmp_path)
    with (
        LLM(str(tmp_path), skip_tokenizer_init=True) as llm,
        pytest.raises(ConfigError, match="encoder"),
    ):
        measure_roofline(llm.core.executor.runner, batch_sizes=[1], prompt=4, context=4)


def test_the_account_of_latents(tmp_path, given):
    """A cached row is read once, as key and as value; what is multiplied head by head is read whole."""
    tiny_models.write(tmp_path, "deepseek_v2")
    with LLM(
        str(tmp_path), dtype="bfloat16", num_threads=1, max_model_len=64, skip_tokenizer_init=True
    ) as llm:
        (decode, _) = measure_roofline(
            llm.core.executor.runner, batch_sizes=[3], prompt=16, context=32
        ).steps
        spec = llm.core.executor.runner.model.spec
    a, by_name = spec.layers[0].attention, {o.operator: o for o in decode.operators}
    attention = by_name["attention"]
    assert attention.num_bytes == spec.num_layers * 3 * 32 * a.head_dim * 2
    assert attention.operations == spec.num_layers * 3 * 32 * 2 * a.num_heads * (
        a.head_dim + a.kv_rank
    )
    heads = [o for o in decode.operators if o.operator.startswith("head_linear")]
    each = a.num_heads * a.kv_rank * (a.nope_dim + a.value_dim)
    assert sum(o.operations for o in heads) == spec.num_layers * 3 * 2 * each
    assert all(o.bound is not None for o in heads)
