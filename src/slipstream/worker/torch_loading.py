"""Loads a model whose values are torch tensors, on a GPU or a CPU."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slipstream.config import EngineConfig
from slipstream.config.forms import HostExperts, StreamedLayers
from slipstream.costs.graph_sizes import GRAPH_BYTES, graph_bytes
from slipstream.errors import AdapterError, ConfigError
from slipstream.kernels.arrays import to_tensor
from slipstream.kernels.build import remedy
from slipstream.kernels.select import select_ops
from slipstream.model.decoder import Decoder
from slipstream.model.device_stream import DeviceStream
from slipstream.model.draft_heads import LoadedHead
from slipstream.model.layers.layer import Partition
from slipstream.model.load.draft_loader import load_head
from slipstream.model.load.loaded import LoadedModel
from slipstream.model.load.loader import load_model, part_weights
from slipstream.model.load.pulled import Weights
from slipstream.model.stored.parts import Stored
from slipstream.platform import platform_of
from slipstream.platform.cuda import hash_triton
from slipstream.spec.adapter_slots import ALONE
from slipstream.spec.description import ModelDescription
from slipstream.spec.devices.autotune_table import NO_TILES, TileTable
from slipstream.spec.drafts.heads import HeadDescription
from slipstream.spec.scheme import Scheme
from slipstream.worker.adapters import Adapters
from slipstream.worker.experts.host import LoadFollower, settle_experts, with_host_experts
from slipstream.worker.experts.load import ExpertLoad
from slipstream.worker.experts.places import ExpertPlaces
from slipstream.worker.forward.forwards import Forwards
from slipstream.worker.forward.media import MediaEncoder
from slipstream.worker.forward.table import ForwardTable
from slipstream.worker.forward.texts import TextGraphs, most_texts, text_ladder
from slipstream.worker.loaded_runner import LoadedRunner
from slipstream.worker.runner import Runner
from slipstream.worker.start.probe_steps import compile_kernels, measure_activations
from slipstream.worker.text_runner import TextRunner

if TYPE_CHECKING:
    from slipstream.worker.start.prepared_kernels import PreparedKernels

_logger = logging.getLogger("slipstream.engine")


class TorchLoaded(LoadedRunner):
    """A model loaded with torch, with its adapters, media encoder and expert placement."""

    forwards: Forwards

    def __init__(
        self,
        config: EngineConfig,
        description: ModelDescription,
        tiles: TileTable = NO_TILES,
        *,
        weights_folder: Path,
        partition: Partition | None = None,
        kernels: PreparedKernels | None = None,
    ) -> None:
        """Set up one rank of several if there is a `partition`. Quantized weights are cached in
        `weights_folder`. `kernels` are loaded after the weights."""
        super().__init__(config, partition)
        self.device = torch.device(config.device.info.device)
        self.platform = platform_of(self.device)
        self.platform.activate(config.device.num_threads)
        self.dtype = self.platform.values.dtype(config.model.dtype)
        self.ops = select_ops(
            self.device,
            config.device.kernels,
            tiles,
            num_threads=config.device.num_threads,
            isa=config.device.info.isa,
            deterministic=config.device.deterministic,
            dense_copies=config.device.dense_copies,
        )
        if config.device.kernels == "auto" and self.ops.name == "torch":
            _logger.warning(
                "the C++ kernels are not installed: torch's run instead, several times slower and without quantization; %s",
                remedy(),
            )
        self.ops = with_host_experts(config, self.ops, self.platform)
        offload: dict[str, Any] = {}
        match config.model.offload:
            case StreamedLayers(weights_bytes):
                offload = {"weights_bytes": weights_bytes}
            case HostExperts(mixtures):
                offload = {"host_experts": mixtures}
        with self.phase("weights"):
            self.model = load_model(
                description,
                ops=self.ops,
                device=self.device,
                dtype=self.dtype,
                partition=partition,
                **offload,
                **self._load_settings(weights_folder, config.model.quantization),
            )
            if self.model.decoder.stream is not None:
                # copying layers takes longer than the launches that a graph would save
                self.config = config = dataclasses.replace(
                    config, device=dataclasses.replace(config.device, enforce_eager=True)
                )
            self.forwards = Forwards(self.model.decoder, int4_cache=config.cache.dtype == "int4")
            self._take_adapters(description)
            if config.media is not None:
                if (tower := self.model.tower) is not None:
                    self.media = MediaEncoder(tower, config.media.cache_bytes)
                self.forwards.take_media(self.media)
            self.platform.synchronize()
            if self.ops.name == "triton":
                hash_triton()()  # started when the device was opened
        if kernels is not None:
            with self.phase("kernels"):
                kernels.finish()
        with self.phase("host experts"):
            self.model = settle_experts(config, self.model, self.platform)
        self._load_dense(description)
        self._load_kv_scales()
        self.experts: ExpertLoad = ExpertLoad(self.forwards.count_experts(), self.platform)
        self.follower = LoadFollower(self.ops, self.experts)
        if partition is not None and partition.shard.experts:
            self.places = ExpertPlaces(self.model.decoder, self.experts, partition)

    def _take_adapters(self, description: ModelDescription) -> None:
        if (lora := self.config.lora) is None:
            return
        shard = ALONE if self.partition is None else self.partition.shard
        if shard.deals_requests:
            self.model.decoder.route_own_tokens()
        self.adapters = Adapters(lora, description, self.model.decoder, shard)
        self.forwards.take_adapters(self.adapters)
        for request in lora.requests:
            try:
                self.adapters.load(request)
            except AdapterError as error:
                raise ConfigError(
                    f"lora_modules: {request.name}: {error}", field="lora_modules"
                ) from error

    def _load_head(
        self, description: HeadDescription, decoder: Decoder, **settings: Any
    ) -> LoadedHead:
        return load_head(description, decoder, dtype=self.dtype, **settings)

    def _load_draft(
        self, description: ModelDescription, settings: dict[str, Any]
    ) -> tuple[LoadedModel, ForwardTable]:
        model = load_model(
            description, ops=self.ops, device=self.device, dtype=self.dtype, **settings
        )
        return model, Forwards(model.decoder)

    def weights_of(
        self, description: ModelDescription, scheme: Scheme | None, given: Sequence[Stored] | None
    ) -> tuple[Weights, Scheme | None]:
        return part_weights(
            description,
            ops=self.ops,
            device=self.device,
            dtype=self.dtype,
            load_format="auto",
            seed=0,
            scheme=scheme,
            partition=self.partition,
            given=given,
        )

    def as_value(self, value: Any) -> torch.Tensor:
        return to_tensor(value) if isinstance(value, np.ndarray) else value

    def profile(self) -> int:
        with self.phase("profile"), torch.inference_mode(), self.without_copies():
            return measure_activations(self)

    def graph_reserve_bytes(self, activation_bytes: int) -> int:
        """Bytes to keep free for graphs.

        These are their hidden states or vectors, the largest graph's activations, and the driver's
        memory for the launches. The largest step runs once eagerly before it is captured.
        """
        spec, size = self.model.spec, self.dtype.itemsize
        if spec.is_encoder:
            sizes = text_ladder(self.config.scheduling.max_num_batched_tokens)
            of_tokens = self.model.description.text_task == "token_embed"
            rows = sum(n if of_tokens else most_texts(self.config, n) for n in sizes)
            numbers = rows * spec.hidden_size
            return 2 * activation_bytes + 4 * numbers + len(sizes) * GRAPH_BYTES
        drafts = 0 if self.draft is None else self.draft.graph_bytes(self.config)
        return graph_bytes(self.config, spec, size) + drafts

    def _compile_kernels(self, runner: Runner) -> None:
        with self.phase("warm-up"), self.without_copies():
            # text graphs have already run their largest and smallest steps
            if not (isinstance(runner, TextRunner) and isinstance(runner.texts, TextGraphs)):
                compile_kernels(runner)

    def without_copies(self) -> AbstractContextManager[None]:
        stream = self.model.decoder.stream
        return stream.idle() if isinstance(stream, DeviceStream) else nullcontext()
