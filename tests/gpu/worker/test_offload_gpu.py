"""Layers that are copied to a GPU in each step: the same bits as with all weights there, for every scheme.

Run: pytest -m gpu tests/gpu/worker/test_offload_gpu.py.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.errors import OutOfMemoryError
from slipstream.kernels.cache.tensors import cache_tensors
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.select import select_ops
from slipstream.model.device_stream import layer_bytes
from slipstream.model.load.loader import load_model
from slipstream.platform import platform_of
from slipstream.spec.scheme import SCHEMES
from slipstream.worker.start.dummy_steps import dummy_prefill
from tests.support import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA = torch.device("cuda:0")
BLOCK, LENGTH, NUM_SEQS = 16, 32, 4
SHAPE = dict(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=7,
)


def load(path, scheme=None, **more):
    how = dict(
        device=CUDA,
        dtype=torch.bfloat16,
        max_model_len=64,
        scheme=SCHEMES[scheme] if scheme else None,
    )
    return load_model(path, ops=select_ops(CUDA), **how, **more)


class Steps:
    """Four sequences in a cache of their own: a prompt each, then token by token, without a wait between the steps."""

    def __init__(self, model) -> None:
        self.model, per_seq = model, 4
        self.tables = torch.arange(1, 1 + NUM_SEQS * per_seq, dtype=torch.int32, device=CUDA).view(
            NUM_SEQS, per_seq
        )
        ops = model.decoder.ops
        self.kv = []
        for layer in model.spec.layers:
            new = lambda shape: torch.zeros(shape, dtype=torch.bfloat16, device=CUDA)
            by_dim = ops.values_by_dim(torch.bfloat16)
            self.kv.append(
                LayerKV(
                    *cache_tensors(
                        layer.attention, 1 + NUM_SEQS * per_seq, BLOCK, new, values_by_dim=by_dim
                    )
                )
            )

    @torch.inference_mode()
    def run(self, count=4):
        """The logits of all positions, [T, V] of each step."""
        generator = torch.Generator(CUDA).manual_seed(0)
        found = []
        for length in (LENGTH, *range(LENGTH + 1, LENGTH + 1 + count)):
            own = length if length == LENGTH else 1
            meta, _ = dummy_prefill(NUM_SEQS * own, own, BLOCK, CUDA)
            positions = meta.positions + (length - own)
            rows = torch.arange(NUM_SEQS, device=CUDA).repeat_interleave(own)
            slots = self.tables[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK
            meta = dataclasses.replace(
                meta,
                block_table=self.tables,
                positions=positions,
                slot_mapping=slots,
                seq_lens=torch.full_like(meta.seq_lens, length),
                num_decodes=NUM_SEQS if own == 1 else 0,
                max_seq_len=length,
                from_start=own == length,
            )
            shape = (NUM_SEQS * own,)
            tokens = torch.randint(
                4, 250, shape, dtype=torch.int32, device=CUDA, generator=generator
            )
            found.append(
                self.model.decoder.logits(self.model.decoder.forward(tokens, self.kv, meta))
            )
        return found


def check(path, scheme=None, share=0.85, **more):
    whole = load(path, scheme, **more)
    wanted = Steps(whole).run()
    for ours, theirs in zip(Steps(whole).run(), wanted, strict=True):
        assert torch.equal(ours, theirs)  # or there would be nothing to compare
    model = load(path, scheme, weights_bytes=int(share * whole.weights_bytes), **more)
    stream = model.decoder.stream
    assert stream is not None
    assert model.weights_bytes <= share * whole.weights_bytes
    for _ in range(3):
        for ours, theirs in zip(Steps(model).run(), wanted, strict=True):
            assert torch.equal(ours, theirs)
    return stream


@pytest.mark.parametrize(
    "scheme", [None, "fp8", "fp8-head", "fp8-block", "int8", "int8-head", "int4", "int4-g32"]
)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_same_bits_in_every_scheme(tmp_path, scheme, load_format):
    tiny_models.write(tmp_path, "llama", **SHAPE)
    check(tmp_path, scheme, load_format=load_format)


@pytest.mark.parametrize("family", ["gemma3_text", "gptj", "gpt2", "qwen3_moe", "deepseek_v2"])
def test_the_same_bits_in_every_kind_of_layer(tmp_path, family):
    shapes = {
        "gemma3_text": dict(
            head_dim=64, hidden_size=64, num_hidden_layers=6, layer_types=["sliding_attention"] * 6
        ),
        "gptj": dict(n_embd=128, n_head=2, rotary_dim=16, n_layer=6),
        "gpt2": dict(n_embd=128, n_head=2, n_layer=6),
        "qwen3_moe": dict(num_hidden_layers=6),
        "deepseek_v2": dict(num_hidden_layers=6),
    }
    tiny_models.write(tmp_path, family, **shapes[family])
    check(tmp_path)


def write_wide(folder, num_layers):
    """A config of layers of 150 MB."""
    sizes = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=16)
    config = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=512,
        max_position_embeddings=256,
    )
    rest = dict(rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False)
    (folder / "config.json").write_text(
        json.dumps({**config, **SHAPE, **sizes, "num_hidden_layers": num_layers, **rest})
    )


def test_copies_that_take_longer_than_computing(tmp_path):
    """150 MB a layer: a step that did not wait for a copy, or a copy that did not wait for a step, would be found."""
    write_wide(tmp_path, 6)
    stream = check(tmp_path, share=0.7, load_format="dummy")
    assert stream.step_bytes > 400e6


def test_a_checkpoint_that_is_rounded(tmp_path):
    from tests.model.formats.test_compressed import compress

    tiny_models.write(tmp_path, "llama", **SHAPE)
    compress(tmp_path, "fp8")
    check(tmp_path)


def test_the_start_holds_one_layer_beside_what_stays(tmp_path):
    write_wide(tmp_path, 8)
    platform = platform_of(CUDA)
    whole = load(tmp_path, load_format="dummy")
    one, total = layer_bytes(whole.decoder.layers[0]), whole.weights_bytes
    del whole
    before = platform.start_peak()
    bound = int(0.6 * total)
    model = load(tmp_path, load_format="dummy", weights_bytes=bound)
    # What is made of random numbers passes through float32 or a second copy here and there, never through two layers.
    assert platform.peak() - before <= bound + 2 * one
    assert model.decoder.stream is not None


@pytest.mark.parametrize("quantization", [None, "fp8", "int4-g32"])
def test_an_engine_answers_as_with_all_weights(tmp_path, quantization):
    tiny_models.write(tmp_path, "llama", initializer_range=0.1, **SHAPE)
    prompts = [
        {"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]}
        for n in (1, 5, 16, 45, 100, 17, 33, 64)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    how = dict(
        max_model_len=192,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_bytes=2**26,
        skip_tokenizer_init=True,
    )
    how |= dict(quantization=quantization, enforce_eager=True, deterministic=True)
    if quantization == "int4-g32":
        how["dense_copies"] = (
            False  # streamed layers have none, so that they would fit the bound below
        )
    found = []
    bound = None
    for _ in range(2):
        with LLM(str(tmp_path), weights_bytes=bound, **how) as llm:
            stream = llm.core.executor.runner.model.decoder.stream
            assert (stream is None) == (bound is None)
            bound = int(0.85 * llm.ledger.weights_bytes)
            outputs = [o.outputs[0] for o in llm.generate(prompts, greedy, progress=False)]
            found.append([(o.token_ids, [t.chosen.logprob for t in o.logprobs]) for o in outputs])
    assert found[0] == found[1]


def test_a_host_without_the_memory_is_refused_before_loading(tmp_path, monkeypatch):
    from slipstream.costs import fit

    tiny_models.write(tmp_path, "llama", **SHAPE)
    monkeypatch.setattr(fit, "host_memory", lambda: (2**20, 2**18))
    with pytest.raises(OutOfMemoryError, match="of the host's memory") as error:
        LLM(str(tmp_path), weights_bytes=2**22, skip_tokenizer_init=True, kv_cache_bytes=2**26)
    assert error.value.field == "weights_bytes"
