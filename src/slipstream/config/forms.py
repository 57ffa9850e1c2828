"""Forms of speculation, offloading and parallelism, each a union of classes.

A user's flags may contradict one another. `resolve` raises an error for those, and turns the others into one
value of each union, so code tests a form by its class, and no value has settings of two forms.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, cast

from slipstream.spec.drafts.heads import FileMethod
from slipstream.spec.parallel import ONE_UNIT, Shard, SplitUnits

# --- Speculation ---------------------------------------------------------------------

MAX_STEP_DRAFTS = 512
"""Maximum number of draft tokens in a step, over all requests. Each has logits: 512 of a vocabulary
of 128k take 400 MB, and no step needs more."""

MAX_DRAFTS = 16
"""Maximum number of drafts of a request in a step, if the engine chooses the number."""


@dataclass(frozen=True, slots=True)
class NoDrafts:
    limit: ClassVar[int] = 0


NO_DRAFTS = NoDrafts()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Settings of all speculation methods. With `num_speculative_tokens` None, the engine chooses
    at each step the number of drafts that is fastest."""

    num_speculative_tokens: int | None = None
    most_drafts: int = MAX_DRAFTS  # per request and step; a head may have fewer

    @property
    def limit(self) -> int:
        """Maximum number of drafts of a request in a step."""
        return self.num_speculative_tokens or self.most_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramDrafts(DraftSettings):
    """Settings of n-gram speculation: drafts are the tokens that followed the same run of tokens
    earlier in the request."""

    method: ClassVar[str] = "ngram"
    prompt_lookup_min: int = 2  # lengths of the n-grams that are looked up
    prompt_lookup_max: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixDrafts(DraftSettings):
    """Settings of suffix speculation: drafts continue runs of tokens found in the request and in
    recent answers."""

    method: ClassVar[str] = "suffix"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedDrafts(DraftSettings):
    """Settings of all methods with a draft model or head. `quantization`: the scheme to which the
    weights are quantized at load; "none": a head's are not quantized."""

    quantization: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafts(LearnedDrafts):
    """Settings of speculation with a smaller draft model."""

    method: ClassVar[str] = "draft"
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDrafts(LearnedDrafts):
    """Settings of speculation with a draft head, which reads the model's hidden states and has a
    checkpoint of its own."""

    method: FileMethod
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPDrafts(LearnedDrafts):
    """Settings of speculation with the model's own layers for multi-token prediction, which are in
    its checkpoint."""

    method: ClassVar[Literal["mtp"]] = "mtp"


SpeculationConfig: TypeAlias = (
    NoDrafts | NgramDrafts | SuffixDrafts | ModelDrafts | HeadDrafts | MTPDrafts
)

# --- Offloading ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InMemory:
    """Offload setting for no offloading: all weights are in the device's memory."""


@dataclass(frozen=True, slots=True)
class StreamedLayers:
    """Offload setting for streamed layers: weights beyond `weights_bytes` are not stored in the
    device's memory but read in each step."""

    weights_bytes: int


@dataclass(frozen=True, slots=True)
class HostExperts:
    """Offload setting for experts on the host: those of the first `mixtures` MoE layers are in host
    memory. `hot_bytes` of GPU memory hold copies of some."""

    mixtures: int
    hot_bytes: int = 0


Offload: TypeAlias = InMemory | StreamedLayers | HostExperts

# --- Parallelism ---------------------------------------------------------------------


class _Form:
    """Base of the forms of parallelism. A form determines how many processes compute the model, and
    the part of each."""

    __slots__ = ()

    @property
    def stage(self) -> Stage:
        """Form in which the ranks of one pipeline stage divide its layers. Without a pipeline it is
        the form itself."""
        return cast("Stage", self)  # overridden by forms of several stages

    @property
    def stages(self) -> tuple[int, ...]:
        """Number of layers of each pipeline stage; empty without a pipeline."""
        return ()

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stages))

    @property
    def num_ranks(self) -> int:
        return self.stage.size * self.num_stages

    @property
    def num_shares(self) -> int:
        """Number of parts into which the weights are divided."""
        return self.num_ranks

    def shard(self, rank: int) -> Shard:
        """A rank's part of the model. Each stage has an equal number of consecutive ranks."""
        number, own = divmod(rank, self.stage.size)
        shard = self.stage.share(own)
        if not self.stages:
            return shard
        layers = sum(self.stages[:number]), sum(self.stages[: number + 1])
        return dataclasses.replace(shard, layers=layers)


@dataclass(frozen=True, slots=True)
class OneDevice(_Form):
    size: ClassVar[int] = 1
    num_caches: ClassVar[int] = 1

    def share(self, rank: int) -> Shard:
        return Shard(rank, 1, tensor=False)


@dataclass(frozen=True, slots=True)
class TensorParallel(_Form):
    """Tensor parallelism: all ranks compute the same requests, and each a part of every layer."""

    size: int
    whole_experts: bool = False  # each rank has whole experts, instead of a part of each
    sequence: bool = False  # the residual of long steps is split by tokens
    units: SplitUnits = ONE_UNIT
    context: int = 1  # ranks with the same kv head, each with the keys of some tokens
    num_caches: ClassVar[int] = 1

    def share(self, rank: int) -> Shard:
        return Shard(rank, self.size, experts=self.whole_experts, units=self.units)


@dataclass(frozen=True, slots=True)
class DealtRequests(_Form):
    """Data parallelism with expert parallelism: each rank has its own requests and KV cache, and
    the experts are divided among the ranks."""

    size: int

    @property
    def num_caches(self) -> int:
        return self.size

    def share(self, rank: int) -> Shard:
        return Shard(rank, self.size, tensor=False, experts=True)


@dataclass(frozen=True, slots=True)
class ContextParallel(_Form):
    """Context parallelism: each rank has all weights, but only some tokens' keys and values of each
    request."""

    size: int
    num_caches: ClassVar[int] = 1
    num_shares: ClassVar[int] = 1

    def share(self, rank: int) -> Shard:
        return Shard(0, 1, tensor=False)


Stage: TypeAlias = OneDevice | TensorParallel | DealtRequests | ContextParallel


@dataclass(frozen=True, slots=True)
class Pipeline(_Form):
    """Pipeline stages, each with some of the layers. The devices of each stage divide it in one
    form. With `embeds` the last one also has the embeddings, for a draft head."""

    inner: Stage
    layers: tuple[int, ...]
    embeds: bool = False

    @property
    def stage(self) -> Stage:
        return self.inner

    @property
    def stages(self) -> tuple[int, ...]:
        return self.layers

    def shard(self, rank: int) -> Shard:
        shard = _Form.shard(self, rank)
        is_last = rank // self.stage.size == self.num_stages - 1
        return dataclasses.replace(shard, embeds=self.embeds and is_last)


@dataclass(frozen=True, slots=True)
class HostAndGpu(_Form):
    """Pipeline of the host's CPU, with the first layers, and a GPU with the others."""

    on_host: int
    on_gpu: int

    @property
    def stage(self) -> OneDevice:
        return OneDevice()

    @property
    def stages(self) -> tuple[int, int]:
        return self.on_host, self.on_gpu


ParallelConfig: TypeAlias = Stage | Pipeline | HostAndGpu


def one_or_tensor(size: int) -> OneDevice | TensorParallel:
    return OneDevice() if size == 1 else TensorParallel(size)


def with_tensor_size(form: ParallelConfig, size: int) -> ParallelConfig:
    """Copy of `form` with another tensor parallel size."""
    match form:
        case Pipeline(inner):
            return dataclasses.replace(form, inner=cast("Stage", with_tensor_size(inner, size)))
        case TensorParallel():
            return dataclasses.replace(form, size=size)
        case _:
            return TensorParallel(size, isinstance(form, DealtRequests))
