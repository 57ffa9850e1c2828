"""OpenVINO GenAI in this process, with its continuous batching, on a GGUF file or an exported
folder.

It uses its own scheduler, kernels and precision hints; greedy, without an end-of-sequence check. A
token's time is recorded when its step returns."""

from __future__ import annotations

import os
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

BLOCK_SIZE = 32
"""Number of tokens in a cache block on a CPU."""


class OfflineOpenVINO:
    """OpenVINO with up to `batch_size` sequences at a time, of at most `max_model_len` tokens each."""

    def __init__(
        self, path: Path, *, batch_size: int, max_model_len: int, num_threads: int
    ) -> None:
        try:
            import openvino
            import openvino_genai
        except ImportError as error:
            raise ConfigError(
                f"engine='openvino': {error}; pip install openvino-genai", field="engine"
            ) from None
        self._openvino, self._genai = openvino, openvino_genai
        self.batch_size, self.num_threads = batch_size, num_threads
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = batch_size, 2048
        scheduler.num_kv_blocks = batch_size * (-(-max_model_len // BLOCK_SIZE) + 1)
        begin = time.monotonic()
        # OpenVINO's own pinning counts cores from the machine's first, and ignores this process's
        # affinity.
        properties = {
            "INFERENCE_NUM_THREADS": num_threads,
            "ENABLE_CPU_PINNING": available_cores() == os.cpu_count(),
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(path), scheduler, "CPU", properties
        )
        self.load_s = time.monotonic() - begin

    def run(self, requests: Sequence[BenchRequest]) -> list[RequestTiming]:
        """Send all requests at once. Returns a record of each."""
        sent = time.monotonic()
        handles: list[Any] = []
        times: list[list[float]] = [[] for _ in requests]
        for i, r in enumerate(requests):
            config = self._genai.GenerationConfig()
            config.max_new_tokens = r.output_tokens
            config.ignore_eos = True
            config.do_sample = False
            ids = self._openvino.Tensor(np.array([r.prompt_token_ids], dtype=np.int64))
            handles.append(self._pipeline.add_request(i, ids, config))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.monotonic()
            for handle, seen in zip(handles, times, strict=True):
                while handle.can_read():
                    seen += [now] * sum(len(o.generated_ids) for o in handle.read().values())
        for r, seen in zip(requests, times, strict=True):
            if len(seen) != r.output_tokens:
                raise RuntimeError(f"OpenVINO made {len(seen)} tokens instead of {r.output_tokens}")
        return [
            RequestTiming.of(len(r.prompt_token_ids), sent, t)
            for r, t in zip(requests, times, strict=True)
        ]

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Natural log-probability of each token but the first, given those before it."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = 1, True, False
        config.echo, config.logprobs = True, 1
        ids = self._openvino.Tensor(np.array([token_ids], dtype=np.int64))
        handle = self._pipeline.add_request(0, ids, config)
        found: list[float] = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            while handle.can_read():
                for output in handle.read().values():
                    found += output.generated_log_probs
        if len(found) != len(token_ids) + 1:
            raise RuntimeError(
                f"OpenVINO gave {len(found)} log-probabilities for {len(token_ids)} tokens and one more"
            )
        return found[1:-1]

    def describe(self) -> dict[str, Any]:
        return {
            "name": "openvino",
            "config": {
                "batch_size": self.batch_size,
                "num_threads": self.num_threads,
                "version": self._genai.get_version(),
            },
            "start_phases_s": {"load": self.load_s},
        }

    def close(self) -> None:
        del self._pipeline


def make(setup: EngineSetup, on_phase: OnPhase) -> OfflineOpenVINO:
    on_phase("weights")
    threads = setup.setting("num_threads") or available_cores()
    length = setup.max_model_len or 2048
    return OfflineOpenVINO(
        path_of(setup), batch_size=setup.batch_size, max_model_len=length, num_threads=threads
    )
