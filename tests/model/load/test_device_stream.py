"""Layers that are copied to a device ahead of use: the same code as on a GPU, with the host as the device."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from slipstream.kernels.select import select_ops
from slipstream.model import device_stream
from slipstream.model.device_stream import DeviceStream, layer_bytes, with_tensors
from slipstream.model.load import device_loader
from slipstream.model.load.loader import load_model
from slipstream.platform.cpu import CpuPlatform
from slipstream.spec.scheme import SCHEMES
from tests.model.formats import test_cache_scales, test_compressed
from tests.model.harness import CPU, run
from tests.support import tiny_models

TOKENS = list(range(5, 25))
LAYERS = {"gpt2": "n_layer", "gptj": "n_layer"}


def build(path, family, num_layers, *, wide=False):
    sizes = {}
    if wide:
        sizes = (
            {"n_embd": 128} if family in LAYERS else dict(hidden_size=128, intermediate_size=256)
        )
    tiny_models.write(
        path, family, **{LAYERS.get(family, "num_hidden_layers"): num_layers}, **sizes
    )


def pair(path, share=0.85, **more):
    """The model with all weights, and with such a share of what it takes."""
    how = dict(ops=select_ops(CPU, "reference"), device=CPU, dtype=torch.float32, **more)
    whole = load_model(path, **how)
    model = load_model(path, weights_bytes=int(share * whole.weights_bytes), **how)
    assert isinstance(model.decoder.stream, DeviceStream)
    assert model.weights_bytes <= share * whole.weights_bytes
    return whole, model


def check(whole, model):
    for chunks in ((), (7, 1, 4), ()):  # layers are copied anew in each step
        assert torch.equal(run(model, TOKENS, chunks), run(whole, TOKENS, chunks))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "deepseek_v3", "gpt2", "gptj"])
@pytest.mark.parametrize("num_layers", [5, 6])
def test_the_numbers_are_the_same(tmp_path, family, num_layers):
    build(tmp_path, family, num_layers)
    check(*pair(tmp_path))


@pytest.mark.parametrize("scheme", ["fp8", "int8-head", "int4-g32"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_that_are_rounded_at_load(tmp_path, scheme, load_format):
    build(tmp_path, "llama", 5, wide=True)
    check(*pair(tmp_path, scheme=SCHEMES[scheme], load_format=load_format))


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4-g32"])
def test_a_checkpoint_that_is_rounded(tmp_path, kind):
    build(tmp_path, "qwen3_moe" if kind == "int8" else "llama", 5, wide=True)
    test_compressed.compress(tmp_path, kind)
    check(*pair(tmp_path))


@pytest.mark.parametrize(
    "names", [("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale")]
)
def test_a_checkpoint_that_has_scales_for_the_cache(tmp_path, monkeypatch, names):
    monkeypatch.setattr(test_cache_scales, "NUM_LAYERS", 5)
    build(tmp_path, "llama", 5)
    test_cache_scales.configure(tmp_path, kv_cache_scheme=test_cache_scales.SCHEME)
    test_cache_scales.put(tmp_path, test_cache_scales.scales(*names, dtype=torch.float32))
    whole, model = pair(tmp_path)
    check(whole, model)
    pairs = zip(whole.cache_scales.layers(), model.cache_scales.layers(), strict=True)
    assert all(
        np.array_equal(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)
    )


def test_a_bound_that_holds_all_changes_nothing(tmp_path):
    build(tmp_path, "llama", 3)
    how = dict(ops=select_ops(CPU, "reference"), device=CPU, dtype=torch.float32)
    whole = load_model(tmp_path, **how)
    model = load_model(tmp_path, weights_bytes=2 * whole.weights_bytes, **how)
    assert model.decoder.stream is None
    assert model.weights_bytes == whole.weights_bytes
    assert torch.equal(run(model, TOKENS), run(whole, TOKENS))


def test_a_step_that_was_broken_off(tmp_path):
    build(tmp_path, "llama", 7)
    whole, model = pair(tmp_path, 0.7)
    stream = model.decoder.stream
    for last in range(8):
        for layer in range(last):
            stream.before(layer)
        check(whole, model)


@pytest.mark.parametrize(
    ("family", "share", "alike"), [("llama", 0.85, True), ("deepseek_v3", 0.5, False)]
)
def test_steps_whose_numbers_no_one_reads(tmp_path, family, share, alike):
    """Such steps copy nothing, unless the layers differ in shape."""
    build(tmp_path, family, 6)
    whole, model = pair(tmp_path, share)
    if (
        not alike
    ):  # the least that it runs with: the first layer, which has no experts, is copied too
        model = pair(tmp_path, (model.weights_bytes - 1) / whole.weights_bytes)[1]
        assert model.decoder.stream._order[0] == 0
    stream = model.decoder.stream
    run(model, TOKENS)
    before = stream.read_bytes
    with stream.idle():
        run(model, TOKENS)
    assert (stream.read_bytes == before) == alike
    check(whole, model)
    assert stream.read_bytes > before


class Noting(CpuPlatform):
    """Notes the order of copies and waits."""

    def __init__(self):
        super().__init__(CPU)
        self.log = []

    def copy_queue(self):
        return self

    @contextmanager
    def behind(self):
        self.log.append("copy")
        yield

    def record(self):
        event = len(self.log)
        self.log.append(("arrived", event))
        return event

    def run_after(self, event):
        self.log.append(("wait", event))


def test_a_layer_waits_for_its_copy_and_a_copy_for_the_layer_before(tmp_path, monkeypatch):
    build(tmp_path, "llama", 6)
    platform = Noting()
    monkeypatch.setattr(device_loader, "platform_of", lambda device: platform)
    _, model = pair(tmp_path)
    stream, order = model.decoder.stream, model.decoder.stream._order
    for _ in range(3):
        for layer in range(len(model.decoder.layers) + 1):
            arrived = stream._arrivals.get(layer)
            before = len(platform.log)
            stream.before(layer)
            new = platform.log[before:]
            if layer in order:
                assert new[-1] == ("wait", arrived)  # it was on its way already
            if layer - 1 in order:  # its place gets the next that has it
                assert new[:2] == ["copy", ("arrived", before + 1)]
            assert len(new) == (layer in order) + 2 * (layer - 1 in order)
    assert len([x for x in platform.log if x == "copy"]) == 2 + 3 * len(
        order
    )  # two before the first step


def test_a_copy_is_cut_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(device_stream, "PIECE", 4096)
    build(tmp_path, "llama", 5)
    whole, model = pair(tmp_path)
    stream = model.decoder.stream
    assert all(len(piece) <= 4096 for pieces in stream._host.values() for piece in pieces)
    assert {sum(map(len, pieces)) for pieces in stream._host.values()} == {
        layer_bytes(whole.decoder.layers[1])
    }
    check(whole, model)


def test_weights_keep_their_order_in_memory(tmp_path):
    """Rows that lie behind one another, columns that do, and parts of a larger tensor."""
    build(tmp_path, "llama", 3)
    whole = load_model(tmp_path, ops=select_ops(CPU, "reference"), device=CPU, dtype=torch.float32)
    forms = iter(
        [
            lambda x: x.T.contiguous().T,
            lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]],
            lambda x: x,
        ]
        * 9
    )
    layers = [
        with_tensors(layer, lambda x: next(forms)(x) if x.dim() == 2 else x)
        for layer in whole.decoder.layers
    ]
    stream = DeviceStream(CpuPlatform(CPU))
    stream.expect({i: layer_bytes(layer) for i, layer in enumerate(layers)})
    kept = [stream.keep(i, layer) for i, layer in enumerate(layers)]
    stream.open()
    for i, (layer, was) in enumerate(zip(kept, layers, strict=True)):
        stream.before(i)
        found, given = [], []
        with_tensors(stream.placed(i, layer), lambda x, to=found: to.append(x) or x)
        with_tensors(was, lambda x, to=given: to.append(x) or x)
        assert len(found) > 3
        for a, b in zip(found, given, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride() or b.stride(0) > b.shape[1]
