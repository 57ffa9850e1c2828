"""The llama.cpp adapter's batches, against a library that stands in for llama.cpp and keeps what it is given."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slipstream.bench.adapters import EngineSetup, make_engine
from slipstream.bench.workload import BenchRequest

VOCAB = 16


class Library:
    """Answers every row with its token + 1, and keeps the rows of each call: (token, position, sequence, logits wanted)."""

    __version__ = "0"

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int, int, bool]]] = []
        self.cells: dict[int, list[int]] = {}  # sequence → positions that it holds

    def __getattr__(self, name: str) -> Any:
        if name == "llama_context_default_params" or name == "llama_model_default_params":
            return SimpleNamespace
        if name == "llama_log_callback":
            return lambda call: call
        return lambda *_: 1

    def llama_vocab_n_tokens(self, _: object) -> int:
        return VOCAB

    def llama_batch_init(self, size: int, *_: int) -> SimpleNamespace:
        arrays = {name: [0] * size for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(size)], **arrays)

    def llama_decode(self, _: object, batch: Any) -> int:
        rows = zip(
            batch.token, batch.pos, (ids[0] for ids in batch.seq_id), batch.logits, strict=True
        )
        self.calls.append([(t, p, s, bool(w)) for t, p, s, w in rows][: batch.n_tokens])
        for _, position, sequence, _ in self.calls[-1]:
            held = self.cells.setdefault(sequence, [])
            assert position == len(held), "a sequence's positions follow each other"
            held.append(position)
        return 0

    def llama_get_logits_ith(self, _: object, row: int) -> Any:
        token, _, _, wanted = self.calls[-1][row]
        assert wanted, "logits of a row that did not ask for them"
        logits = np.zeros(VOCAB, np.float32)
        logits[(token + 1) % VOCAB] = 3.0
        self.keep = logits
        return logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def llama_memory_seq_rm(self, _: object, sequence: int, *range_: int) -> None:
        self.cells.pop(sequence)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setitem(sys.modules, "llama_cpp", made)  # type: ignore[arg-type]
    return made


def engine_of(tmp_path: Any, batch_size: int) -> Any:
    return make_engine(
        EngineSetup(
            engine="llamacpp",
            model="m",
            path=tmp_path,
            batch_size=batch_size,
            max_model_len=64,
            settings={"num_threads": 1},
        )
    )


def test_a_call_holds_every_running_sequence_once_in_the_order_of_ids(library, tmp_path):
    """llama.cpp joins only sequences of increasing ids. Answers of different lengths free slots in another order than they were
    taken, and waiting requests take them."""
    lengths = [(3, 9), (5, 2), (4, 6), (2, 4), (6, 3), (1, 8), (3, 1)]
    requests = [
        BenchRequest(prompt_token_ids=tuple([i] * n), output_tokens=out)
        for i, (n, out) in enumerate(lengths)
    ]
    records = engine_of(tmp_path, 3).run(requests)
    assert [r.output_tokens for r in records] == [out for _, out in lengths]
    for call in library.calls:
        in_order = list(dict.fromkeys(sequence for _, _, sequence, _ in call))
        assert in_order == sorted(in_order)
        assert [s for _, _, s, wanted in call if wanted] == in_order  # one chosen token of each
    # As many at once as there are slots, from the first call on.
    assert [len({s for _, _, s, _ in call}) for call in library.calls[:2]] == [3, 3]
    assert any(len(call) > 3 for call in library.calls[1:])  # a prompt and decodes in one call
    assert not library.cells


def test_log_probabilities_of_a_text(library, tmp_path):
    engine = engine_of(tmp_path, 1)
    likely, other = (math.log(math.exp(x) / (math.exp(3) + VOCAB - 1)) for x in (3, 0))
    for _ in range(2):  # the cache is free again
        assert engine.token_logprobs([4, 5, 6, 2]) == pytest.approx([likely, likely, other])
