"""Hugging Face transformers: `generate` on static batches, first come first served, padded on the
left.

The model has the same dtype as ours and uses its own attention kernels; greedy, without an
end-of-sequence check, on batches in the order of arrival. A batch runs until its longest answer is
done. Tokens beyond a request's own length are not counted. A token's time is recorded when it is
computed, as a server that streams from `generate` could deliver it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.bench.adapters import EngineSetup, OnPhase, path_of
from slipstream.bench.workload import BenchRequest
from slipstream.costs.metrics import RequestTiming
from slipstream.errors import ConfigError, install_command


def load_gguf(path: Path, dtype: str) -> Any:
    """transformers' model of a GGUF file, with dense weights in `dtype`, dequantized by its own
    reader.

    From 5.23 on, transformers keeps them packed by default and dequantizes them in every linear
    layer, which is not what we compare."""
    try:
        import torch
        import transformers

        # earlier versions always unpack
        config = getattr(transformers, "GgufConfig", None)
        dense = {} if config is None else {"quantization_config": config(dequantize=True)}
        auto: Any = transformers.AutoModelForCausalLM
        return auto.from_pretrained(
            path.parent, gguf_file=path.name, dtype=getattr(torch, dtype), **dense
        )
    except (ImportError, ValueError) as error:
        raise ConfigError(_refusal(path, error), field="engine") from error


def _refusal(path: Path, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"to compare with transformers {error.name} is missing: {install_command('dev')}"
    # transformers does not say what to install for GGUF; for packages missing in `dev`, such as
    # compressed-tensors, it does.
    is_gguf = isinstance(error, ImportError) and "gguf" in str(error).lower()
    remedy = f": {install_command('dev')}" if is_gguf else ""
    return f"transformers can't load {path.name}: {str(error).strip().removesuffix('.')}{remedy}"


AUTO = {
    "a decoder": "AutoModelForCausalLM",
    "a decoder without a head": "AutoModel",
    "an encoder": "AutoModel",
    "a classifier": "AutoModelForSequenceClassification",
    "an encoder-decoder": "AutoModelForSeq2SeqLM",
}
"""transformers' class for each `ModelSpec.kind`."""


def load_folder(path: Path, dtype: str, kind: str = "a decoder") -> Any:
    """transformers' model of a folder with a config.json, or of a GGUF file. A checkpoint's own
    code is not run."""
    files = (
        sorted(path.glob("*.gguf"))
        if path.is_dir() and not (path / "config.json").is_file()
        else [path]
    )
    if files[0].is_file():
        return load_gguf(files[0], dtype)
    try:
        import torch
        import transformers

        named = (path / "config.json").read_text(encoding="utf-8")
        sees = kind == "a decoder" and '"vision_config"' in named
        auto: Any = getattr(transformers, "AutoModelForImageTextToText" if sees else AUTO[kind])
        return auto.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    except (
        ImportError,
        ValueError,
        KeyError,
        OSError,
        RuntimeError,
    ) as error:  # the last one is for shapes that differ from the config's
        raise ConfigError(_refusal(path, error), field="model") from error


class StepClock:
    """A transformers streamer that only records when each step's tokens arrived. The first call is
    for the prompt."""

    def __init__(self, synchronize: Any) -> None:
        self.times: list[float] = []
        self._prompt_seen = False
        self._synchronize = synchronize

    def put(self, value: Any) -> None:
        if self._prompt_seen:
            self._synchronize()
            self.times.append(time.monotonic())
        self._prompt_seen = True

    def end(self) -> None:
        pass


class OfflineTransformers:
    def __init__(
        self,
        path: Path,
        *,
        batch_size: int,
        dtype: str,
        device: str,
        num_threads: int | None,
        dummy: bool,
        seed: int = 0,
    ) -> None:
        try:
            import transformers
        except ImportError:
            raise ConfigError(
                "engine='transformers' needs it: pip install transformers", field="engine"
            ) from None
        import torch

        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self.batch_size, self.dtype = batch_size, dtype
        self.device = (
            ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        )
        self._torch = torch
        torch_dtype = getattr(torch, dtype)
        auto: Any = transformers.AutoModelForCausalLM  # parts of it are untyped
        begin = time.monotonic()
        if dummy:
            torch.manual_seed(seed)
            with torch.device(self.device):
                config = transformers.AutoConfig.from_pretrained(path)
                model = auto.from_config(config, dtype=torch_dtype)
        elif path.is_file():
            model = load_gguf(path, dtype)
        else:
            model = auto.from_pretrained(path, dtype=torch_dtype)
        self.model = model.to(self.device).eval()
        self.model.generation_config.eos_token_id = None
        self.load_s = time.monotonic() - begin

    def run(self, requests: Sequence[BenchRequest]) -> list[RequestTiming]:
        """Send all requests at once. Returns a record of each."""
        sent = time.monotonic()
        records: list[RequestTiming] = []
        for i in range(0, len(requests), self.batch_size):
            records += self._batch(requests[i : i + self.batch_size], sent)
        return records

    def _batch(self, requests: Sequence[BenchRequest], sent: float) -> list[RequestTiming]:
        torch = self._torch
        width = max(len(r.prompt_token_ids) for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            count = len(request.prompt_token_ids)
            ids[row, width - count :] = torch.tensor(request.prompt_token_ids)
            mask[row, width - count :] = 1
        clock = StepClock(
            torch.cuda.synchronize if self.device.startswith("cuda") else lambda: None
        )
        steps = max(r.output_tokens for r in requests)
        with torch.inference_mode():
            self.model.generate(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                max_new_tokens=steps,
                do_sample=False,
                pad_token_id=0,
                streamer=clock,
            )
        if len(clock.times) != steps:
            raise RuntimeError(f"transformers made {len(clock.times)} steps instead of {steps}")
        return [
            RequestTiming.of(len(r.prompt_token_ids), sent, clock.times[: r.output_tokens])
            for r in requests
        ]

    def describe(self) -> dict[str, Any]:
        return {
            "name": "transformers",
            "config": {
                "batch_size": self.batch_size,
                "dtype": self.dtype,
                "device": self.device,
                "num_threads": self._torch.get_num_threads(),
                "attention": self.model.config._attn_implementation,
            },
            "start_phases_s": {"load": self.load_s},
        }

    def close(self) -> None:
        del self.model


def make(setup: EngineSetup, on_phase: OnPhase) -> OfflineTransformers:
    dtype = setup.setting("dtype", "auto")
    if dtype == "auto":
        raise ConfigError(
            "engine='transformers' needs a dtype, the one that it is compared in", field="dtype"
        )
    load_format = setup.setting("load_format", "auto")
    if load_format not in ("auto", "dummy"):
        raise ConfigError(
            "transformers finds out the format by itself: leave load_format out, or give 'dummy'",
            field="load_format",
        )
    on_phase("weights")
    return OfflineTransformers(
        path_of(setup),
        batch_size=setup.batch_size,
        dtype=dtype,
        device=setup.setting("device", "auto"),
        num_threads=setup.setting("num_threads"),
        dummy=load_format == "dummy",
        seed=setup.setting("seed", 0),
    )
