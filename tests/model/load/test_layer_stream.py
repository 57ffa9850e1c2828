"""Layers that are read from a file as they are needed: the same numbers, within the bound, and little memory at the start."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError
from slipstream.kernels.select import select_ops
from slipstream.model.load.loader import load_model
from slipstream.spec.offload import NUM_SLOTS, plan_offload
from slipstream.spec.scheme import SCHEMES
from tests.model.harness import CPU, load, run
from tests.support import tiny_models
from tests.support.waiting import PATIENCE_S

TOKENS = list(range(5, 25))
MIB = 2**20


def streamed(path, share, *, scheme=None):
    """The model with such a share of what it takes, beside embeddings and head."""
    how = dict(
        ops=select_ops(CPU, "cpu"),
        device=CPU,
        dtype=torch.float32,
        scheme=scheme,
        weights_folder=path / "kept",
    )
    whole = load_model(path, **{**how, "weights_folder": None})
    return whole, load_model(path, weights_bytes=int(share * whole.weights_bytes), **how)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "deepseek_v3", "gpt2", "gptj"])
@pytest.mark.parametrize("num_layers", [5, 6])
def test_the_numbers_are_the_same(tmp_path, family, num_layers):
    sizes = (
        {"n_layer": num_layers} if family in ("gpt2", "gptj") else {"num_hidden_layers": num_layers}
    )
    tiny_models.write(tmp_path, family, **sizes)
    wanted = run(load(tmp_path, kernels="cpu"), TOKENS)
    whole, model = streamed(tmp_path, 0.8)
    assert model.decoder.stream is not None
    assert model.weights_bytes <= 0.8 * whole.weights_bytes
    for _ in range(2):  # layers are read anew in each step
        torch.testing.assert_close(
            run(model, TOKENS, [7, 1, 4]), wanted, rtol=0, atol=2e-5 * float(wanted.abs().max())
        )
    assert not list((tmp_path / "kept").iterdir())  # the file has no name


def test_weights_that_are_rounded_at_load(tmp_path):
    tiny_models.write(
        tmp_path, "llama", num_hidden_layers=5, hidden_size=128, intermediate_size=256
    )
    whole, model = streamed(tmp_path, 0.9, scheme=SCHEMES["int8"])
    torch.testing.assert_close(run(model, TOKENS), run(whole, TOKENS), rtol=0, atol=1e-4)


def test_a_bound_that_holds_all_changes_nothing(tmp_path):
    tiny_models.write(tmp_path, "llama")
    assert streamed(tmp_path, 1.5)[1].decoder.stream is None


def test_an_engine_answers_as_with_all_weights(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path, num_hidden_layers=6, max_position_embeddings=256)
    how = dict(device="cpu", dtype="float32", kernels="cpu", max_model_len=128, kv_cache_bytes=MIB)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = ["The capital of France is", "hello", "in the hour " * 9]
    found = []
    with LLM(str(tmp_path), **how) as llm:
        total = llm.core.ledger.weights_bytes
        found.append(
            [o.outputs[0].token_ids for o in llm.generate(prompts, greedy, progress=False)]
        )
    for load_format in ("auto", "dummy"):
        with LLM(
            str(tmp_path), weights_bytes=int(0.8 * total), load_format=load_format, **how
        ) as llm:
            stream = llm.core.executor.runner.model.decoder.stream
            assert stream is not None
            assert llm.core.ledger.weights_bytes < total
            answers = [
                o.outputs[0].token_ids for o in llm.generate(prompts, greedy, progress=False)
            ]
            assert stream.read_bytes > 0
            assert load_format == "dummy" or answers == found[0]


def test_a_start_holds_one_layer_beside_what_stays(tmp_path):
    """The peak of a process that loads 270 MiB with a bound of 80 MiB is far below what it loads."""
    sizes = dict(
        hidden_size=768,
        intermediate_size=2048,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
    )
    tiny_models.write(tmp_path, "llama", num_hidden_layers=10, **sizes)
    program = (  # two forks of a process that has imported all, and has no threads yet
        "import os, sys, torch\nfrom slipstream import LLM, SamplingParams\nfrom slipstream.platform import platform_of\n"
        "how = dict(device='cpu', dtype='float32', skip_tokenizer_init=True, max_model_len=64)\n"
        "import slipstream.worker.torch_loading\n"
        "for bound in sys.argv[2:]:\n"
        "    if pid := os.fork():\n"
        "        assert os.waitpid(pid, 0)[1] == 0\n"
        "        continue\n"
        "    host = platform_of(torch.device('cpu'))\n    before = host.start_peak()\n"
        "    how |= dict(weights_bytes=int(bound) or None, kv_cache_bytes=2**24, max_num_batched_tokens=64)\n"
        "    llm = LLM(sys.argv[1], **how)\n"
        "    llm.generate([{'prompt_token_ids': [5, 6]}], SamplingParams(max_tokens=2), progress=False)\n"
        "    print(host.peak() - before, llm.core.ledger.weights_bytes, flush=True)\n"
        "    os._exit(0)\n"
    )
    bound = 80 * MIB
    command = [sys.executable, "-c", program, str(tmp_path), "0", str(bound)]
    text = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    ).stdout
    (all_peak, all_weights), (own_peak, own_weights) = (
        map(int, line.split()) for line in text.splitlines()
    )
    assert all_weights > 240 * MIB
    assert own_weights <= bound
    assert all_peak > all_weights
    assert own_peak < all_weights - 40 * MIB


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=40),
    st.integers(0, 100),
    st.integers(1, 3000),
)
def test_the_plan_keeps_to_the_bound(sizes, other, budget):
    try:
        plan = plan_offload(sizes, other, budget)
    except ConfigError:
        assert budget < other + NUM_SLOTS * max(sizes)
        return
    if plan is None:
        assert other + sum(sizes) <= budget
        return
    kept = (
        other
        + sum(size for i, size in enumerate(sizes) if i not in plan.streamed)
        + plan.slot_bytes
    )
    assert kept == plan.resident_bytes <= budget
    assert plan.read_bytes == sum(sizes[i] for i in plan.streamed)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (dict(weights_bytes=0), "above 0"),
        (dict(weights_bytes=1000), "less than the bytes of embeddings, head and 2 layers"),
        (dict(weights_bytes=MIB, kernels="reference"), "C\\+\\+ kernels"),
        (dict(weights_bytes=MIB, tensor_parallel_size=2), "one device; leave tensor_parallel_size"),
        (dict(weights_bytes=MIB, enable_lora=True), "leave out enable_lora"),
    ],
    ids=str,
)
def test_what_it_does_not_go_with_is_refused(tiny_model, settings, says):
    with pytest.raises(ConfigError, match=says) as error:
        LLM(str(tiny_model), device="cpu", **settings)
    assert error.value.field == "weights_bytes"
