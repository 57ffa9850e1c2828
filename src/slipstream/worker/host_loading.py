"""Loads a model whose step is one C++ program, without torch.

Values are NumPy arrays. `forward_paths.host_refusal` lists what this does not cover.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from slipstream.config import EngineConfig
from slipstream.kernels.cpu.host_ops import HostOps
from slipstream.kernels.cpu.native import without_tiles
from slipstream.model.decoder import Decoder
from slipstream.model.draft_heads import LoadedHead
from slipstream.model.load.host_head import load_host_head
from slipstream.model.load.host_model import load_host_model, part_arrays
from slipstream.model.load.loaded import LoadedModel
from slipstream.model.load.pulled import Weights
from slipstream.model.stored.parts import Stored
from slipstream.platform import platform_of
from slipstream.spec.description import ModelDescription
from slipstream.spec.drafts.heads import HeadDescription
from slipstream.spec.reason import NotCovered
from slipstream.spec.scheme import Scheme
from slipstream.worker.forward.forward_paths import load_refusal
from slipstream.worker.forward.host_forwards import HostForwards
from slipstream.worker.forward.table import ForwardTable
from slipstream.worker.loaded_runner import HostExpertCounts, LoadedRunner
from slipstream.worker.thread_governor import ThreadGovernor

if TYPE_CHECKING:
    from slipstream.kernels.ops import OpSet


class HostLoaded(LoadedRunner):
    """A model loaded without torch, with its program.

    NotCovered if the program lacks something that the model needs.
    """

    def __init__(
        self, config: EngineConfig, description: ModelDescription, *, weights_folder: Path
    ) -> None:
        """`weights_folder`: where packed quantized weights are stored for the next start."""
        super().__init__(config)
        device = config.device
        self.platform = platform_of(None)
        with self.phase("weights"):
            isa = without_tiles(device.info.isa) if device.deterministic else device.info.isa
            self.host_ops = HostOps(device.num_threads, isa, dense_copies=device.dense_copies)
            self.ops = cast("OpSet", self.host_ops)
            settings = self._load_settings(weights_folder, config.model.quantization)
            self.model = self._load(description, settings)
        with self.phase("program"):
            pool, fixed = self.host_ops.pool, device.fixed_threads or device.num_threads == 1
            self.forwards = table = HostForwards(
                self.model.decoder, pool, None if fixed else ThreadGovernor(pool)
            )
            self.experts = HostExpertCounts(table.count_experts())
        self._load_dense(description)
        self._load_kv_scales()
        self.experts.reset()

    def _load(self, description: ModelDescription, settings: dict[str, Any]) -> LoadedModel:
        return load_host_model(
            description, ops=self.host_ops, dtype=self.config.model.dtype, **settings
        )

    def _load_head(
        self, description: HeadDescription, decoder: Decoder, **settings: Any
    ) -> LoadedHead:
        return load_host_head(description, decoder, dtype=self.config.model.dtype, **settings)

    def _load_draft(
        self, description: ModelDescription, settings: dict[str, Any]
    ) -> tuple[LoadedModel, ForwardTable]:
        if (reason := load_refusal(description, self.config.model.load_format)) is not None:
            raise NotCovered(reason)
        model = self._load(description, settings)
        return model, HostForwards(model.decoder, self.host_ops.pool)

    def weights_of(
        self, description: ModelDescription, scheme: Scheme | None, given: Sequence[Stored] | None
    ) -> tuple[Weights, Scheme | None]:
        return part_arrays(
            description,
            ops=self.host_ops,
            dtype=self.config.model.dtype,
            load_format="auto",
            seed=0,
            scheme=scheme,
            given=given,
        )

    def as_value(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value
        from slipstream.kernels.arrays import to_array

        return to_array(value.cpu())

    def profile(self) -> int:
        """Bytes of activations in the largest step.

        They follow from the program's buffers, so nothing is run.
        """
        config, spec = self.config, self.model.spec
        num_tokens = config.scheduling.max_num_batched_tokens
        # logits and a copy, and the row being sampled
        sampled = (2 * config.max_num_sampled + 8) * spec.vocab_size
        if spec.is_encoder:
            sampled = 2 * num_tokens * spec.hidden_size  # embeddings while they are summed
        per_token = self.forwards.token_bytes or 0
        if self.draft is not None:
            per_token += self.draft.token_bytes
        return num_tokens * per_token + 4 * sampled
