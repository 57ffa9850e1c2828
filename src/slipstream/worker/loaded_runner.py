"""A loaded model before its cache is sized: the first phase of a runner's life. No torch.

`LoadedRunner` → `allocate` → a runner that is ready to run steps (`model_runner.py`) → `release` →
the same `LoadedRunner`. Its two subclasses load with torch (`torch_loading.py`) and without
(`host_loading.py`).
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.config import EngineConfig
from slipstream.config.forms import LearnedDrafts
from slipstream.costs.graph_sizes import CHAIN_DEPTHS
from slipstream.errors import OutOfMemoryError
from slipstream.kernels.metadata import LayerKV
from slipstream.messages.stats import ExpertTokens
from slipstream.messages.weights import WeightState
from slipstream.model.decoder import Decoder
from slipstream.model.draft_heads import LoadedHead
from slipstream.model.encoder import Dense, TextHeads
from slipstream.model.load.dense import read_dense
from slipstream.model.load.loaded import LoadedModel
from slipstream.model.load.pulled import Weights
from slipstream.model.stored.parts import Stored
from slipstream.platform import Platform
from slipstream.spec.description import ModelDescription
from slipstream.spec.drafts.heads import HeadDescription
from slipstream.spec.drafts.models import check_draft_model
from slipstream.spec.model import LatentAttentionSpec
from slipstream.spec.pooling import DenseStep
from slipstream.spec.scheme import FORMAT_MAX, SCHEMES, Scheme
from slipstream.worker.device_cache import DeviceCache
from slipstream.worker.draft.drafter import Drafter
from slipstream.worker.draft.head_drafter import load_drafter
from slipstream.worker.draft.memory import DraftMemory
from slipstream.worker.draft.model import DraftModel
from slipstream.worker.draft.stages import ReceivedDrafts
from slipstream.worker.experts.routed import RoutedExpertsTap
from slipstream.worker.forward.table import ForwardTable
from slipstream.worker.model_runner import ModelRunner
from slipstream.worker.runner import Runner
from slipstream.worker.start.cache_scales import calibrated_scales
from slipstream.worker.text_runner import TextRunner

if TYPE_CHECKING:
    from slipstream.kernels.ops import OpSet
    from slipstream.model.layers.layer import Partition
    from slipstream.platform.collectives import Pipe
    from slipstream.worker.adapters import Adapters
    from slipstream.worker.experts.host import LoadFollower
    from slipstream.worker.experts.places import ExpertPlaces
    from slipstream.worker.forward.media import MediaEncoder
    from slipstream.worker.weights.update import WeightUpdates


class ExpertCounts(Protocol):
    """Tokens per expert since the start or the last `reset`, for each layer with experts."""

    def read(self) -> ExpertTokens: ...

    def reset(self) -> None: ...


class HostExpertCounts:
    """`ExpertCounts` whose counters are arrays of a CPU, which can be read at once."""

    def __init__(self, counts: Mapping[int, Any]) -> None:
        self.counts = counts

    def read(self) -> ExpertTokens:
        return tuple((layer, tuple(counts.tolist())) for layer, counts in self.counts.items())

    def reset(self) -> None:
        for counts in self.counts.values():
            counts[:] = 0


class LoadedRunner(ABC):
    """A loaded model with its kernels and forward paths, loaded when constructed."""

    platform: Platform
    ops: OpSet
    model: LoadedModel
    forwards: ForwardTable
    experts: ExpertCounts
    kv_scales: list[tuple[Any, ...]] | None = None
    """Scales of an 8-bit cache, float32 [K] for each layer's keys and for its values; or the fold of an int4 cache."""
    adapters: Adapters | None = None
    media: MediaEncoder | None = None
    follower: LoadFollower | None = None
    places: ExpertPlaces | None = None
    """Places of the experts, if they are distributed over ranks."""
    draft: Drafter | None = None
    tap: RoutedExpertsTap | None = None
    is_woken = False
    """True if the model has slept in this process, so that compiled kernels exist and requests are
    waiting."""

    def __init__(self, config: EngineConfig, partition: Partition | None = None) -> None:
        """Set up one rank of several if there is a `partition`."""
        self.config, self.partition = config, partition
        self.phases: dict[str, float] = {}
        self.weight_state = WeightState()

    # --- Drafters -----------------------------------------------------------------------------------------------------

    def load_head(self, description: HeadDescription, speculation: LearnedDrafts) -> None:
        """Load the head that proposes tokens."""
        with self.phase("draft head"):
            memory, model = self._draft_memory(), self.config.model
            load = partial(
                self._load_head,
                description,
                self.model.decoder,
                max_model_len=model.max_model_len,
                load_format="dummy" if model.load_format == "dummy" else "auto",
                seed=model.seed,
            )
            self.draft = head = load_drafter(self.config, speculation, description, memory, load)
            head.pipe = None if self.partition is None else self.partition.pipe
            self.forwards.keep_states(head.states, head.head.tap)
            most = description.spec.most_drafts
            if self.config.drafts_ahead:  # a longer chain would run op by op
                most = CHAIN_DEPTHS[-1] if most is None else min(most, CHAIN_DEPTHS[-1])
            self.config = self.config.with_most_drafts(most)

    def load_draft(
        self, description: ModelDescription, speculation: LearnedDrafts, weights_folder: Path
    ) -> None:
        """Load the model that proposes tokens."""
        with self.phase("draft model"):
            check_draft_model(description.spec, self.model.spec, self.config.model.max_model_len)
            settings = self._load_settings(weights_folder, speculation.quantization)
            if description.format == "gguf":
                settings["load_format"] = "auto"
            model, forwards = self._load_draft(description, settings)
            self.draft = DraftModel(self.config, self._draft_memory(), model, forwards)
            self.draft.pipe = None if self.partition is None else self.partition.pipe
            if self.config.drafts_ahead:  # the same limit as for a head
                self.config = self.config.with_most_drafts(CHAIN_DEPTHS[-1])

    def receive_drafts(self, pipe: Pipe) -> None:
        """Receive the drafts that a pipeline's last stage proposes."""
        self.draft = ReceivedDrafts(self.config, self._draft_memory(), pipe)

    def _load_dense(self, description: ModelDescription) -> None:
        """Load the Dense steps of sentence-transformers, which count as weights in the ledger."""
        upload, size, how = self.platform.upload, 0, description.pooling

        def made(step: DenseStep) -> Dense:
            nonlocal size
            weight, bias = read_dense(step, self.config.model.load_format)
            size += weight.nbytes + (0 if bias is None else bias.nbytes)
            return Dense(upload(weight), None if bias is None else upload(bias), step.activation)

        self.forwards.heads = TextHeads(
            tuple(map(made, how.dense)),
            tuple(map(made, how.token_dense)),
            None if how.lexical is None else made(how.lexical),
        )
        self.model = dataclasses.replace(self.model, weights_bytes=self.model.weights_bytes + size)

    def _load_kv_scales(self) -> None:
        """Read or measure the scales of an 8-bit cache, or measure an int4 cache's folds."""
        kind = self.config.cache.dtype
        if kind == "int4":
            from slipstream.worker.start.int4_folds import calibrated_folds

            with self.phase("calibrate"), self.platform.values.inference():
                self.kv_scales = calibrated_folds(
                    self.forwards,  # type: ignore[arg-type]  # only torch has this cache
                    self.new_cache(),
                    self.config.model,
                )
            return
        if kind not in FORMAT_MAX:
            return
        if self.model.cache_scales is not None:
            # `resolve` has checked that they fit the cache's dtype
            held, upload = self.model.spec.local_layers, self.platform.upload
            own = self.model.cache_scales.layers()[held.start : held.stop]
            self.kv_scales = [(upload(k), upload(v)) for k, v in own]
            return
        with self.phase("calibrate"), self.platform.values.inference():
            self.kv_scales = calibrated_scales(
                self.forwards, self.new_cache(), self.config.model, self.model.spec
            )

    def _draft_memory(self) -> DraftMemory:
        return DraftMemory(self.ops, self.platform, self.config.model.dtype)

    def _load_settings(self, weights_folder: Path, quantization: str | None) -> dict[str, Any]:
        """Keyword arguments of `load_model` and of `load_host_model`."""
        model = self.config.model
        return dict(
            max_model_len=model.max_model_len,
            load_format=model.load_format,
            seed=model.seed,
            scheme=None if quantization is None else SCHEMES[quantization],
            weights_folder=None if model.weights_cache == "off" else weights_folder,
        )

    @abstractmethod
    def _load_head(
        self, description: HeadDescription, decoder: Decoder, **settings: Any
    ) -> LoadedHead: ...

    @abstractmethod
    def _load_draft(
        self, description: ModelDescription, settings: dict[str, Any]
    ) -> tuple[LoadedModel, ForwardTable]: ...

    # --- Weights that change ----------------------------------------------------------------------------------------

    @cached_property
    def weight_updates(self) -> WeightUpdates:
        """Updates of the weights. Loaded late: few models' weights change."""
        from slipstream.worker.weights.update import WeightUpdates

        return WeightUpdates(self)

    @abstractmethod
    def weights_of(
        self, description: ModelDescription, scheme: Scheme | None, given: Sequence[Stored] | None
    ) -> tuple[Weights, Scheme | None]:
        """The weights of a checkpoint of this model (or of the tensors `given` instead), as a load
        would make them, and the scheme that quantizes the dense ones."""

    @abstractmethod
    def as_value(self, value: Any) -> Any:
        """Converts a tensor or an array to the kind that this loader uses, without copying."""

    def weights_written(self) -> None:
        """Rebuild a CPU's forward paths, which keep copies of small weights, after the weights were
        written in place."""
        if not self.platform.is_asynchronous:
            self.forwards.rebuild()
        self.platform.synchronize()

    # --- Memory -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def profile(self) -> int:
        """Bytes of activations in the largest step: a full prefill budget with every row sampled."""

    def graph_reserve_bytes(self, activation_bytes: int) -> int:
        """Bytes to keep free for graphs. `activation_bytes` is the result of `profile`."""
        return 0

    def allocate(self, config: EngineConfig, num_blocks: int) -> Runner:
        """Allocate the rows and the KV cache of `num_blocks` blocks, and capture graphs on a GPU.

        Block 0 is the null block. `config`: the engine's final configuration, whose context may
        have been reduced to fit.
        """
        self.config = config
        try:
            with self.phase("cache"):
                kv = self.make_cache(num_blocks)
                if self.draft is not None:
                    self.draft.allocate((num_blocks - 1) * self.model.spec.block_scales[0] + 1)
                if config.model.routed_experts:
                    most = config.scheduling.max_num_batched_tokens
                    at = None if self.places is None else self.places.expert_at
                    self.tap = RoutedExpertsTap(self.model.decoder, self.platform, most, at)
                    self.forwards.rebuild()
                runner = (TextRunner if self.model.spec.is_encoder else ModelRunner)(self, kv)
                self.platform.synchronize()
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(
                f"the KV cache of {num_blocks} blocks does not fit: {error}"
            ) from error
        before = self.platform.memory()[0]
        with self.platform.values.inference():
            if not config.device.enforce_eager:
                with self.phase("graphs"):
                    runner.capture()
                runner.graph_bytes = max(0, before - self.platform.memory()[0])
            if self.warms_up and not self.is_woken:
                self._compile_kernels(runner)
        return runner

    def _compile_kernels(self, runner: Runner) -> None:  # noqa: B027 (a CPU's are compiled)
        """Run small steps, so that the first request waits for no compilation."""

    def make_cache(self, num_blocks: int) -> list[LayerKV]:
        """Zeroed keys and values of the layers."""
        return self.new_cache().shared(num_blocks, self.kv_scales)

    def new_cache(self) -> DeviceCache:
        return DeviceCache(
            self.model.spec, self.ops, self.platform, self.config.cache, self.config.model.dtype
        )

    # --- Properties ---------------------------------------------------------------------------------------------------

    @property
    def has_latents(self) -> bool:
        return any(isinstance(x.attention, LatentAttentionSpec) for x in self.model.spec.layers)

    @property
    def warms_up(self) -> bool:
        """True if warm-up steps are needed.

        They are needed on a GPU, whose kernels compile, and on a CPU that sends a GPU its part of the
        steps.
        """
        pipe = None if self.partition is None else self.partition.pipe
        return self.platform.is_asynchronous or (pipe is not None and pipe.through_host)

    def without_copies(self) -> AbstractContextManager[None]:
        """Context for steps whose results are not read: streamed layers are not copied to the GPU."""
        return nullcontext()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager that measures a phase of the start."""
        begin = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - begin
