"""llama.cpp in this process, through llama-cpp-python's low-level interface.

It uses its own kernels and cache, with prompts and decodes in one call as in its server; greedy,
without an end-of-sequence check. A token's time is recorded when it is sampled. llama.cpp computes
sequences together only if their ids increase within a call, so rows are passed in the order of
their sequences."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.bench.adapters import EngineSetup, OnPhase, path_of
from slipstream.bench.workload import BenchRequest
from slipstream.costs.hardware import available_cores
from slipstream.costs.metrics import RequestTiming
from slipstream.errors import ConfigError

BATCH_TOKENS = 2048


class OfflineLlamaCpp:
    """llama.cpp with up to `batch_size` sequences at a time, of at most `max_model_len` tokens
    each."""

    def __init__(
        self, path: Path, *, batch_size: int, max_model_len: int, num_threads: int
    ) -> None:
        try:
            import llama_cpp
        except ImportError as error:
            raise ConfigError(
                f"engine='llamacpp': {error}; pip install llama-cpp-python", field="engine"
            ) from None
        self.batch_size, self.num_threads = batch_size, num_threads
        self._lib: Any = llama_cpp
        begin = time.monotonic()
        # Stored in self, because the library calls it as long as a model exists.
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise ConfigError(f"llama.cpp can't load {path}", field="model")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = batch_size * max_model_len, batch_size
        params.n_batch = BATCH_TOKENS
        params.n_threads = num_threads
        params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.load_s = time.monotonic() - begin

    def run(self, requests: Sequence[BenchRequest]) -> list[RequestTiming]:
        """Send all requests at once. Returns a record of each."""
        sent = time.monotonic()
        waiting = deque(enumerate(requests))
        free = list(range(self.batch_size))
        # slot → (request, tokens so far, the last one)
        running: dict[int, tuple[int, int, int]] = {}
        times: list[list[float]] = [[] for _ in requests]
        while waiting or running:
            # slot → (request, its length after the call, tokens to compute in the call)
            given: dict[int, tuple[int, int, tuple[int, ...]]] = {
                slot: (index, length + 1, (token,))
                for slot, (index, length, token) in running.items()
            }
            num_rows = len(given)
            while (
                waiting and free and num_rows + len(waiting[0][1].prompt_token_ids) <= BATCH_TOKENS
            ):
                index, request = waiting.popleft()
                prompt = request.prompt_token_ids
                given[heapq.heappop(free)] = index, len(prompt), prompt
                num_rows += len(prompt)
            # (token, position, slot, whether its logits are needed)
            rows: list[tuple[int, int, int, bool]] = []
            for slot, (_, length, tokens) in sorted(given.items()):
                first = length - len(tokens)
                rows += [
                    (t, first + i, slot, first + i == length - 1) for i, t in enumerate(tokens)
                ]
            self._decode(rows)
            last_rows = [i for i, row in enumerate(rows) if row[3]]
            for (slot, (index, length, _)), row in zip(
                sorted(given.items()), last_rows, strict=True
            ):
                token = int(self._logits(row).argmax())
                times[index].append(time.monotonic())
                running[slot] = (index, length, token)
                if len(times[index]) == requests[index].output_tokens:
                    del running[slot]
                    heapq.heappush(free, slot)
                    self._lib.llama_memory_seq_rm(
                        self._lib.llama_get_memory(self._context), slot, -1, -1
                    )
        return [
            RequestTiming.of(len(r.prompt_token_ids), sent, t)
            for r, t in zip(requests, times, strict=True)
        ]

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Natural log-probability of each token but the first, given those before it. At most
        `BATCH_TOKENS` tokens."""
        last = len(token_ids) - 1
        self._decode([(token, i, 0, i < last) for i, token in enumerate(token_ids)])
        found = []
        for i, token in enumerate(token_ids[1:]):
            logits = self._logits(i).astype(np.float64)
            found.append(float(logits[token] - np.logaddexp.reduce(logits)))
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), 0, -1, -1)
        return found

    def _logits(self, row: int) -> np.ndarray:
        """float32 [V]: logits of a row of the last call."""
        return np.ctypeslib.as_array(
            self._lib.llama_get_logits_ith(self._context, row), shape=(self._vocab_size,)
        )

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, slot, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = slot
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp could not compute a batch")

    def describe(self) -> dict[str, Any]:
        return {
            "name": "llamacpp",
            "config": {
                "batch_size": self.batch_size,
                "num_threads": self.num_threads,
                "version": self._lib.__version__,
            },
            "system": self._lib.llama_print_system_info().decode(),
            "start_phases_s": {"load": self.load_s},
        }

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


def make(setup: EngineSetup, on_phase: OnPhase) -> OfflineLlamaCpp:
    on_phase("weights")
    threads = setup.setting("num_threads") or available_cores()
    length = setup.max_model_len or 2048
    return OfflineLlamaCpp(
        path_of(setup), batch_size=setup.batch_size, max_model_len=length, num_threads=threads
    )
