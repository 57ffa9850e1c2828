"""Encoders and encoder-decoders on the Triton op set, in its interpreter, against the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream.kernels.triton import TritonOps
from slipstream.model.loader import load_model
from tests import tiny_models
from tests.model.harness import CPU, caches, load, states, whole
from tests.model.test_encoders import error

TEXTS = [[(7 * i + n) % 250 + 5 for i in range(n)] for n in (5, 1, 21)]


def with_triton(path):
    return load_model(path, ops=TritonOps(), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("num_first", [None, [2, 1, 9]], ids=["texts", "pairs"])
def test_an_encoder(tmp_path, num_first):
    tiny_models.build_encoder(tmp_path)
    expected = states(load(tmp_path), TEXTS, num_first)
    for ours, theirs in zip(states(with_triton(tmp_path), TEXTS, num_first), expected, strict=True):
        assert error(ours, theirs) <= 1e-4


@pytest.mark.parametrize("family", ["modernbert", "mpnet", "gte"])
def test_windows_distances_and_turns(tmp_path, family):
    """Of an encoder: to both sides."""
    tiny_models.build_encoder(tmp_path, family, num_hidden_layers=2)
    texts = [*TEXTS, [(11 * i) % 250 + 5 for i in range(70)]]
    for ours, theirs in zip(states(with_triton(tmp_path), texts), states(load(tmp_path), texts), strict=True):
        assert error(ours, theirs) <= 1e-4


@torch.inference_mode()
def t5_logits(model):
    answers = [[0], [0, 7, 9], [0, *TEXTS[2][:18]]]
    read, next_block = whole(TEXTS)
    step, num_blocks = whole(answers, next_block)
    step = dataclasses.replace(step, num_decodes=1)
    cross = dataclasses.replace(
        step, seq_lens=read.seq_lens, block_table=read.block_table, max_seq_len=read.max_seq_len
    )
    torch.manual_seed(0)
    kv = [caches(model, num_blocks) for _ in range(3)]
    model.decoder.encode(torch.tensor([t for text in TEXTS for t in text], dtype=torch.int32), kv, read)
    tokens = torch.tensor([t for a in answers for t in a], dtype=torch.int32)
    return model.decoder.logits(model.decoder.forward(tokens, kv, dataclasses.replace(step, cross=cross)))


def test_an_encoder_decoder(tmp_path):
    tiny_models.build_t5(tmp_path)
    assert error(t5_logits(with_triton(tmp_path)), t5_logits(load(tmp_path))) <= 1e-4
