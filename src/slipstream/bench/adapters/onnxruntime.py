"""ONNX Runtime GenAI in this process, on a folder made by its model builder.

Its generator has no batch that requests can join. Requests with equal lengths of prompts and
answers run as one full batch; others run one batch after another. Greedy, without an
end-of-sequence check. A token's time is recorded when its step has ended."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.bench.adapters import EngineSetup, OnPhase, path_of
from slipstream.bench.workload import BenchRequest
from slipstream.costs.hardware import available_cores
from slipstream.costs.metrics import RequestTiming
from slipstream.errors import ConfigError


class OfflineOnnxRuntime:
    """ONNX Runtime with `batch_size` sequences at a time."""

    def __init__(self, path: Path, *, batch_size: int, num_threads: int) -> None:
        try:
            import onnxruntime_genai
        except ImportError as error:
            raise ConfigError(
                f"engine='onnxruntime': {error}; pip install onnxruntime-genai", field="engine"
            ) from None
        self._genai: Any = onnxruntime_genai
        self.batch_size, self.num_threads = batch_size, num_threads
        begin = time.monotonic()
        config = onnxruntime_genai.Config(str(path))
        config.overlay(
            json.dumps(
                {"model": {"decoder": {"session_options": {"intra_op_num_threads": num_threads}}}}
            )
        )
        self._model = onnxruntime_genai.Model(config)
        self.load_s = time.monotonic() - begin

    def run(self, requests: Sequence[BenchRequest]) -> list[RequestTiming]:
        """Send all requests at once. Returns a record of each."""
        sent = time.monotonic()
        times: list[list[float]] = [[] for _ in requests]
        alike: dict[tuple[int, int], list[int]] = {}
        for i, r in enumerate(requests):
            alike.setdefault((len(r.prompt_token_ids), r.output_tokens), []).append(i)
        for (n_in, n_out), indices in alike.items():
            for at in range(0, len(indices), self.batch_size):
                batch = indices[at : at + self.batch_size]
                generator = self._generator(len(batch), n_in + n_out)
                generator.append_tokens(
                    np.array([requests[i].prompt_token_ids for i in batch], dtype=np.int32)
                )
                for _ in range(n_out):
                    generator.generate_next_token()
                    now = time.monotonic()
                    for i in batch:
                        times[i].append(now)
        return [
            RequestTiming.of(len(r.prompt_token_ids), sent, t)
            for r, t in zip(requests, times, strict=True)
        ]

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Natural log-probability of each token but the first, given those before it. One step
        each, because a model may be built to give the logits of a prompt's last token only."""
        generator = self._generator(1, len(token_ids))
        found = []
        for token, following in itertools.pairwise(token_ids):
            generator.append_tokens(np.array([[token]], dtype=np.int32))
            logits = np.asarray(generator.get_output("logits"), dtype=np.float64).reshape(-1)
            found.append(float(logits[following] - np.logaddexp.reduce(logits)))
        return found

    def _generator(self, num_seqs: int, length: int) -> Any:
        params = self._genai.GeneratorParams(self._model)
        # The minimum length equals the maximum: the end-of-sequence token is never chosen.
        params.set_search_options(
            batch_size=num_seqs, max_length=length, min_length=length, do_sample=False
        )
        return self._genai.Generator(self._model, params)

    def describe(self) -> dict[str, Any]:
        return {
            "name": "onnxruntime",
            "config": {
                "batch_size": self.batch_size,
                "num_threads": self.num_threads,
                "version": self._genai.__version__,
            },
            "start_phases_s": {"load": self.load_s},
        }

    def close(self) -> None:
        del self._model


def make(setup: EngineSetup, on_phase: OnPhase) -> OfflineOnnxRuntime:
    on_phase("weights")
    threads = setup.setting("num_threads") or available_cores()
    return OfflineOnnxRuntime(path_of(setup), batch_size=setup.batch_size, num_threads=threads)
