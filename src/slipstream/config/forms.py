"""Forms of speculation, of offloading and of parallelism, each a union of classes.

A user's flags may contradict one another. `resolve` refuses those, and makes one value of each union of
the others, so code asks for a form by its type, and no value has settings of two forms.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, cast

from slipstream.spec.drafts.heads import FileMethod
from slipstream.spec.parallel import ONE_UNIT, Shard, SplitUnits

# --- Speculation ---------------------------------------------------------------------

MAX_STEP_DRAFTS = 512
"""Most draft tokens of a step. Each has logits: 512 of a vocabulary of 128k take 400 MB, and no
step wants more."""

MAX_DRAFTS = 16
"""Most drafts of a request in a step, if the number is chosen."""


@dataclass(frozen=True, slots=True)
class NoDrafts:
    limit: ClassVar[int] = 0


NO_DRAFTS = NoDrafts()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """Settings of all methods that draft. `num_speculative_tokens` None: as many as pay off, chosen
    at each step."""

    num_speculative_tokens: int | None = None
    most_drafts: int = MAX_DRAFTS  # of a request in a step; a head may have fewer

    @property
    def limit(self) -> int:
        """Most drafts of a request in a step."""
        return self.num_speculative_tokens or self.most_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramDrafts(DraftSettings):
    """Drafts that followed the same run of tokens earlier in the request."""

    method: ClassVar[str] = "ngram"
    prompt_lookup_min: int = 2  # lengths of the runs that are looked up
    prompt_lookup_max: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixDrafts(DraftSettings):
    """Drafts from the request and from recent answers."""

    method: ClassVar[str] = "suffix"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedDrafts(DraftSettings):
    """Settings of all methods whose drafts the worker computes. `quantization`: the scheme to which
    the weights are rounded at load; "none": a head's stay as they are."""

    quantization: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafts(LearnedDrafts):
    """Drafts of a smaller model."""

    method: ClassVar[str] = "draft"
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDrafts(LearnedDrafts):
    """Drafts of a head, which reads states of the model and has a checkpoint of its own."""

    method: FileMethod
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPDrafts(LearnedDrafts):
    """Drafts of the model's own layers for multi-token prediction, which its checkpoint has."""

    method: ClassVar[Literal["mtp"]] = "mtp"


SpeculationConfig: TypeAlias = (
    NoDrafts | NgramDrafts | SuffixDrafts | ModelDrafts | HeadDrafts | MTPDrafts
)

# --- Offloading ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InMemory:
    """All weights are in the device's memory."""


@dataclass(frozen=True, slots=True)
class StreamedLayers:
    """Layers beyond `weights_bytes` are read in each step, and not kept in the device's memory."""

    weights_bytes: int


@dataclass(frozen=True, slots=True)
class HostExperts:
    """The first `mixtures` have their experts in the host's memory, and `hot_bytes` of the GPU's are
    for copies of some."""

    mixtures: int
    hot_bytes: int = 0


Offload: TypeAlias = InMemory | StreamedLayers | HostExperts

# --- Parallelism ---------------------------------------------------------------------


class _Form:
    """A form of parallelism: how many processes compute the model, and what each of them computes."""

    __slots__ = ()

    @property
    def stage(self) -> Stage:
        """The form in which the ranks of a pipeline stage share it; without a pipeline, the whole
        model."""
        return cast("Stage", self)  # but for forms of several stages

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers of each stage of a pipeline; empty without one."""
        return ()

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stages))

    @property
    def num_ranks(self) -> int:
        return self.stage.size * self.num_stages

    @property
    def num_shares(self) -> int:
        """Number of parts into which the weights are cut."""
        return self.num_ranks

    def shard(self, rank: int) -> Shard:
        """A rank's part of the model. Each stage has an equal number of consecutive ranks."""
        number, own = divmod(rank, self.stage.size)
        shard = self.stage.share(own)
        if not self.stages:
            return shard
        layers = sum(self.stages[:number]), sum(self.stages[: number + 1])
        embeds = isinstance(self, Pipeline) and self.embeds and layers[1] == sum(self.stages)
        return dataclasses.replace(shard, layers=layers, embeds=embeds)


@dataclass(frozen=True, slots=True)
class OneDevice(_Form):
    size: ClassVar[int] = 1
    num_caches: ClassVar[int] = 1

    def share(self, rank: int) -> Shard:
        return Shard(rank, 1, tensor=False)


@dataclass(frozen=True, slots=True)
class TensorParallel(_Form):
    """Ranks that share each layer, of the same requests."""

    size: int
    whole_experts: bool = False  # each rank has some of the experts, and not a part of each
    sequence: bool = False  # the residual of long steps is split by tokens
    units: SplitUnits = ONE_UNIT
    context: int = 1  # ranks with the same kv head, each of which has some tokens' keys
    num_caches: ClassVar[int] = 1

    def share(self, rank: int) -> Shard:
        return Shard(rank, self.size, experts=self.whole_experts, units=self.units)


@dataclass(frozen=True, slots=True)
class DealtRequests(_Form):
    """Ranks that have requests and a KV cache of their own each, and divide the experts among
    them."""

    size: int

    @property
    def num_caches(self) -> int:
        return self.size

    def share(self, rank: int) -> Shard:
        return Shard(rank, self.size, tensor=False, experts=True)


@dataclass(frozen=True, slots=True)
class ContextParallel(_Form):
    """Ranks that hold some of the tokens' keys and values of each request, and all weights."""

    size: int
    num_caches: ClassVar[int] = 1
    num_shares: ClassVar[int] = 1

    def share(self, rank: int) -> Shard:
        return Shard(0, 1, tensor=False)


Stage: TypeAlias = OneDevice | TensorParallel | DealtRequests | ContextParallel


@dataclass(frozen=True, slots=True)
class Pipeline(_Form):
    """Pipeline stages, each with some of the layers. The devices of each stage share it in one
    form. With `embeds` the last one has the embeddings, too, for a draft head."""

    inner: Stage
    layers: tuple[int, ...]
    embeds: bool = False

    @property
    def stage(self) -> Stage:
        return self.inner

    @property
    def stages(self) -> tuple[int, ...]:
        return self.layers


@dataclass(frozen=True, slots=True)
class HostAndGpu(_Form):
    """A pipeline of the host's CPU, with the first layers, and a GPU with the others."""

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
    """Returns `form` with its tensor parallel size replaced by `size`."""
    match form:
        case Pipeline(inner):
            return dataclasses.replace(form, inner=cast("Stage", with_tensor_size(inner, size)))
        case TensorParallel():
            return dataclasses.replace(form, size=size)
        case _:
            return TensorParallel(size, isinstance(form, DealtRequests))
