"""Runs a model on one sequence at a time for its logits, with the decoder, op set, scheme and paged cache that the engine
uses.

All measurements on text use it. Logits are computed for a few rows at a time, because those of a long text with a large
vocabulary do not fit in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.config import KV_BYTES, EngineArgs
from slipstream.engine.folder import settled
from slipstream.engine.model_files import load_tokenizer
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import ConfigError, EngineError, UnsupportedModelError
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.uniform_steps import single_sequence
from slipstream.model.decoder import Decoder
from slipstream.platform import platform_of
from slipstream.spec.model import ModelSpec
from slipstream.worker.forward.forwards import Forwards
from slipstream.worker.start.canary import Canary, block_size, make_canary
from slipstream.worker.start.loading import load_runner
from slipstream.worker.torch_loading import TorchLoaded

STEP_TOKENS = 2048
"""Maximum number of tokens computed at once."""

LOGITS_BYTES = 64 * 2**20
"""Maximum bytes of float32 logits in memory at a time."""


@dataclasses.dataclass
class Scorer:
    """A loaded model that scores texts. `kv` holds `context` tokens from block 1 onwards.
    `settings` describe the run for reports. Not thread-safe."""

    forwards: Forwards
    kv: Sequence[LayerKV]
    tokenizer: Tokenizer
    _: dataclasses.KW_ONLY
    name: str
    context: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights_bytes: int = 0
    kv_bytes_per_token: int = 0

    @property
    def decoder(self) -> Decoder:
        return self.forwards.decoder

    @classmethod
    def load(cls, args: EngineArgs, *, context: int) -> Scorer:
        """Load the model of `args`, with a cache for `context` tokens. Arguments about an engine's size are ignored.
        UnsupportedModelError if it is not a decoder."""
        args = settled(args, one_device=True)
        description, loaded, _ = load_runner(
            dataclasses.replace(
                args, max_model_len=context, max_num_seqs=1, max_num_batched_tokens=None
            ),
            by_torch=True,
        )
        assert isinstance(loaded, TorchLoaded)
        if description.spec.kind != "a decoder":
            raise UnsupportedModelError(
                f"{description.name} is {description.spec.kind}; only decoders can be measured on text",
                field="model_type",
            )
        config = loaded.config
        tokenizer = load_tokenizer(args, description)
        if tokenizer is None:
            raise ConfigError(
                "measuring on text needs a tokenizer; leave skip_tokenizer_init out",
                field="skip_tokenizer_init",
            )
        return cls(
            loaded.forwards,
            loaded.make_cache(len(config.cache.groups) * config.max_blocks_per_seq + 1),
            tokenizer,
            name=args.model,
            context=context,
            settings={
                "dtype": config.model.dtype,
                "quantization": config.model.quantization,
                "kv_cache_dtype": config.cache.dtype,
                "kernels": loaded.ops.describe(),
                "device": config.device.info.name,
            },
            weights_bytes=loaded.model.weights_bytes,
            kv_bytes_per_token=description.spec.kv_bytes_per_token(KV_BYTES[config.cache.dtype]),
        )

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    def hidden(self, token_ids: Sequence[int], start: int = 0) -> Tensor:
        """Final hidden states [T, E] of tokens from position `start` onwards. Earlier positions must have been computed by
        previous calls."""
        if start + len(token_ids) > self.context:
            raise ConfigError(
                f"{start + len(token_ids)} tokens are more than the context of {self.context}; lower context",
                field="context",
            )
        return torch.cat(
            [
                self.forwards.hidden(
                    self.tensor(token_ids[i : i + STEP_TOKENS]), self.kv, self.step(start + i, num)
                )
                for i in range(0, len(token_ids), STEP_TOKENS)
                for num in [min(STEP_TOKENS, len(token_ids) - i)]
            ]
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [N, V] of hidden states [N, E]. EngineError if any is NaN or infinite."""
        logits = self.forwards.logits(hidden).float()
        if not torch.isfinite(logits.logsumexp(-1)).all():
            raise EngineError(
                f"{self.name} computes logits that are no numbers (NaN or infinity): it can't be measured"
            )
        return logits

    def rows(self, num_rows: int) -> Iterator[slice]:
        """Slices of `num_rows` whose logits take at most LOGITS_BYTES."""
        size = max(1, LOGITS_BYTES // (4 * self.spec.vocab_size))
        for i in range(0, num_rows, size):
            yield slice(i, min(i + size, num_rows))

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy continuation, up to the end token or the end of the context."""
        found: list[int] = []
        hidden = self.hidden(token_ids)[-1:]
        for position in range(len(token_ids), min(len(token_ids) + num_tokens, self.context)):
            token = int(self.logits(hidden).argmax())
            if token in self.tokenizer.eos_token_ids:
                break
            found.append(token)
            hidden = self.hidden([token], start=position)
        return found

    def canary(self, token_ids: Sequence[int], **more: Any) -> Canary:
        """Canary of this model on the first of `token_ids`."""
        return make_canary(self.forwards, self.kv, token_ids, made_with=self.settings, **more)

    def tensor(self, token_ids: Sequence[int]) -> Tensor:
        return torch.tensor(token_ids, dtype=torch.int32, device=self.decoder.device)

    def step(self, start: int, num_tokens: int) -> AttentionMetadata:
        """Attention metadata of `num_tokens` tokens from position `start` onwards."""
        size, scales = block_size(self.spec, self.kv), self.spec.block_scales
        device = self.decoder.device
        return single_sequence(
            start, num_tokens, block_size=size, platform=platform_of(device), scales=scales
        )
