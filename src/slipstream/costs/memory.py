"""The memory ledger: where a device's bytes go, computed in one place for engine, planner and
reports. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul

from slipstream.config import DTYPE_BYTES, EngineConfig
from slipstream.config.forms import DraftSettings, HeadDrafts, MTPDrafts, TensorParallel
from slipstream.config.sections import SLOTS_TO_FIT
from slipstream.errors import OutOfMemoryError
from slipstream.spec.adapter_slots import ALONE, SlotLayout
from slipstream.spec.cache import SLOT_KINDS, CacheGroup, SlotKind, blocks_of_sequence, slot_sizes
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import ModelSpec, MoESpec
from slipstream.spec.parallel import COPIED_SUMS_FROM, Shard
from slipstream.spec.parameters import Shape, keeps_float32, parameters
from slipstream.spec.scheme import Scheme, WeightForm, WeightFormat
from slipstream.spec.stored.native_formats import native_group_size


def part_of(name: str) -> str:
    """Part of a model to which a parameter belongs, as counted by the ledger and `info`."""
    if name.startswith("media."):
        return "media encoder"
    if name.startswith("layer_inputs."):
        return "layer inputs"
    of_layer = name.removeprefix("encoder.").removeprefix("layers.")
    first, _, rest = of_layer.partition(".")
    first = rest.partition(".")[0] if first.isdigit() else first
    if first in (
        "embed",
        "embed_in",
        "embed_out",
        "positions",
        "token_types",
        "distances",
        "audio",
    ):
        return "embeddings"
    if first in ("attention", "cross", "recurrent"):
        return "attention"
    of_experts = (
        *("experts_in", "experts_out"),
        *("router", "correction", "expert_scales", "experts", "shared", "shared_weight"),
    )
    if first in ("mlp", "own_input", *of_experts):
        return "mlp"
    return "output head" if first in ("head", "classifier") else "norms"


def weights_bytes(
    spec: ModelSpec,
    dtype_bytes: int,
    scheme: Scheme | None = None,
    *,
    on_cpu: bool = False,
    shapes: Mapping[str, Shape] | None = None,
) -> dict[str, int]:
    """Bytes of the parameters by part.

    Linear layers are stored in `scheme`, and the head too if the scheme includes it. `on_cpu`
    counts the C++ kernels' formats, without the savings for sparse weights, which are known only
    after loading. `shapes` are the parameters' shapes if `spec` is a rank's part (`spec.parallel`).
    """
    found = dict.fromkeys(("embeddings", "attention", "mlp", "output head", "norms"), 0)
    shapes = parameters(spec) if shapes is None else shapes
    if spec.media is not None:
        found["media encoder"] = 0
    if spec.layer_inputs is not None:
        found["layer inputs"] = 0
    for name, shape in shapes.items():
        found[part_of(name)] += math.prod(shape) * (4 if keeps_float32(name) else dtype_bytes)
    if scheme is None:
        return found

    def round_product(part: str, rows: int, inner: int, *, beside: bool = False) -> None:
        found[part] += scheme.weight_bytes(rows, inner, on_cpu=on_cpu) - (
            0 if beside else rows * inner * dtype_bytes
        )

    encoder = () if spec.encoder is None else spec.encoder.layers
    for layer in (*encoder, *(spec.layers[i] for i in spec.local_layers)):
        for product in layer.weight_shapes(spec.hidden_size):
            if scheme.experts_only and product.copies == 1:
                continue
            round_product(product.part, product.copies * product.rows, product.inner)
    if scheme.head and spec.has_last:
        round_product(
            "output head", shapes["embed.weight"][0], spec.embed_width, beside=spec.tied_embeddings
        )
    return found


def native_weights_bytes(
    spec: ModelSpec,
    dtype_bytes: int,
    formats: Mapping[str, WeightFormat],
    *,
    on_cpu: bool = False,
    shapes: Mapping[str, Shape] | None = None,
) -> dict[str, int]:
    """Bytes by part of a checkpoint with a quantization format for each weight.

    `formats` are those of the weights that keep their stored format
    (`ModelDescription.native_formats`). The others are expanded.
    """
    shapes = parameters(spec) if shapes is None else shapes
    found = weights_bytes(spec, dtype_bytes, shapes=shapes)
    for name, fmt in formats.items():
        if name not in shapes:
            continue
        rows, inner = shapes[name]
        part = part_of(name)
        if fmt.inputs is not None:
            held = rows * inner + 4 * fmt.num_scales(rows, inner)  # scales in float32
        else:
            size = native_group_size(fmt, rows, inner) or inner
            scale_bytes = 4 if on_cpu and size == 128 else 2
            held = rows * inner // 2 + rows * (inner // size) * scale_bytes * (
                1 if fmt.symmetric else 2
            )
        found[part] += held - rows * inner * dtype_bytes
    return found


def block_bytes(spec: ModelSpec, block_size: int, dtype_bytes: float) -> int:
    """Bytes of one KV block over the layers of a group.

    It is 2 · layers · kv_heads · head_dim · bytes · block_size. With latent attention it is layers
    · (kv_rank + rotary_dim) · bytes · block_size.
    """
    return spec.block_bytes_per_token(dtype_bytes) * block_size


EXPERT_NUMBER_BYTES = 2  # int16


def returned_expert_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Host bytes for the chosen experts of one block's tokens; 0 if they are not returned."""
    if not config.model.routed_experts:
        return 0
    chosen = [x.mlp.num_experts_per_token for x in spec.layers if isinstance(x.mlp, MoESpec)]
    return EXPERT_NUMBER_BYTES * len(chosen) * max(chosen) * config.cache.block_size


MAX_BLOCKS = 2**22
"""Maximum number of blocks, because each costs the host about 100 bytes. Only a toy model on a
large device could have more: 67 million tokens."""


def plan_kv(*, budget_bytes: int, block_bytes: int) -> int:
    """Number of whole blocks that fit in `budget_bytes`, including the null block, at most
    MAX_BLOCKS. It is 0 if the budget is already spent."""
    return min(MAX_BLOCKS, max(0, budget_bytes) // block_bytes)


def scratch_blocks(config: EngineConfig) -> int:
    """Number of blocks that an encoder uses, including the null block. The blocks of one step
    suffice, because steps run one after another."""
    size, scheduling = config.cache.block_size, config.scheduling
    return -(-scheduling.max_num_batched_tokens // size) + scheduling.max_num_seqs + 1


MAX_HOST_CACHE_BYTES = 4 * 2**30
"""Maximum default bytes of a KV cache in host memory."""

HOST_CACHE_SHARE = 0.4
"""Maximum fraction of the free host memory for the KV cache by default."""


def host_cache_budget(*, free_bytes: int, wanted_bytes: int) -> int:
    """Bytes for a KV cache in host memory, which other programs need too. `wanted_bytes` would be
    enough for all sequences."""
    return min(MAX_HOST_CACHE_BYTES, int(free_bytes * HOST_CACHE_SHARE), wanted_bytes)


def kv_budget(
    config: EngineConfig,
    block: int,
    *,
    total_bytes: int,
    free_bytes: int,
    taken_bytes: int,
    slots: int = 0,
) -> tuple[int, int]:
    """Returns (bytes that the engine may use, bytes for the KV cache and `slots` bytes of slots).

    The device has `free_bytes` of `total_bytes` left, of which the engine takes `taken_bytes` for
    other things. A block has `block` bytes. OutOfMemoryError if `kv_cache_bytes` is more than what
    is left.
    """
    left = free_bytes - taken_bytes
    if config.device.info.is_cuda:
        allowed = int(total_bytes * config.cache.gpu_memory_utilization)
        budget = allowed - (total_bytes - free_bytes) - taken_bytes
    else:
        allowed = total_bytes
        # Blocks released by windows count too, because they stay in the prefix cache. One is the
        # null block.
        per_seq = len(config.cache.groups) * config.max_blocks_per_seq
        full = (config.scheduling.max_num_seqs * per_seq + 1) * block + slots
        budget = host_cache_budget(free_bytes=left, wanted_bytes=full)
    given = config.cache.kv_cache_bytes
    if given is not None and given > left:
        raise OutOfMemoryError(
            f"kv_cache_bytes={given} is more than the {left} bytes that are free next to the model; lower it",
            field="kv_cache_bytes",
        )
    return allowed, budget if given is None else given


SLOTS_PER_SEQUENCE = 16
"""Maximum number of slots of a kind for each running sequence, by default."""


def size_slots(
    config: EngineConfig, kind: SlotKind, wanted: int, slot_bytes: int, budget_bytes: int
) -> int:
    """Number of slots of a kind, including the null slot; 0 if none are `wanted`.

    Running sequences have two each, and one for each draft, of which there is at least one if their number is chosen
    (`drafts_with_slots`). Half of `budget_bytes` is for these and for checkpoints that later prompts continue from. A
    pipeline's stage without such layers has slots of 0 bytes. OutOfMemoryError if not even the running sequences' fit.
    """
    if not wanted:
        return 0
    seqs, drafts = config.scheduling.seqs_of_rank, config.speculation
    fits_memory = wanted == SLOTS_TO_FIT
    each = 2
    if isinstance(drafts, DraftSettings):
        each += drafts.num_speculative_tokens or 1
    least = seqs * each + 2
    if fits_memory:
        fits = budget_bytes // 2 // max(1, slot_bytes)
        wanted = max(least, min(fits, SLOTS_PER_SEQUENCE * seqs))
    if wanted < least:
        raise OutOfMemoryError(
            f"{kind.setting}={wanted}: {seqs} sequences need {least}; raise it or lower max_num_seqs",
            field=kind.setting,
        )
    if wanted * slot_bytes > budget_bytes * 0.9:
        field = "max_num_seqs" if fits_memory else kind.setting
        raise OutOfMemoryError(
            f"{wanted} {kind.contents} take {wanted * slot_bytes / 2**30:.2f} of the "
            f"{budget_bytes / 2**30:.2f} GiB that are left; lower {field}",
            field=field,
        )
    return wanted


def keyed_blocks(config: EngineConfig) -> int:
    """Number of blocks of a model without attention. They are empty; their keys serve to find recurrent states."""
    return min(MAX_BLOCKS, 8 * config.scheduling.max_num_seqs * config.max_blocks_per_seq + 1)


STAGED_BYTES = 128 * 2**20
"""Device bytes of the staging buffer for blocks copied between the cache and host memory."""


def staged_blocks(config: EngineConfig, block: int) -> int:
    """Number of blocks of `block` bytes in the buffer in which a GPU gathers blocks for host memory
    or other engines. For another kind, `block` is the bytes of a slot; 0: there are none."""
    hands_over = config.device.info.is_cuda and config.cache.handover is not None
    if (config.cache.host_bytes is None and not hands_over) or not block:
        return 0
    return max(1, min(64, STAGED_BYTES // block))


def host_slots(config: EngineConfig, sizes: Sequence[int]) -> list[int]:
    """Number of slots of each kind in a rank's part of the host tier; blocks and each `SlotKind`
    with `sizes` get equal fractions."""
    total = (config.cache.host_bytes or 0) // config.parallel.num_ranks
    share = total // max(1, sum(map(bool, sizes)))
    return [size and share // size for size in sizes]


def adapter_bytes(config: EngineConfig, description: ModelDescription, shard: Shard = ALONE) -> int:
    """Bytes of the adapter slots on a device that has the `shard` of the model."""
    if config.lora is None:
        return 0
    slot = SlotLayout(description, config.lora.max_lora_rank, shard).size
    return config.lora.max_loras * slot * DTYPE_BYTES[config.model.dtype]


def peer_copy_tokens(config: EngineConfig, spec: ModelSpec) -> int:
    """Maximum tokens, padding included, of a step in which two GPUs can copy partial sums to each
    other. 0 if they never do. With `deterministic` they don't, because sums must be added in one
    order in steps of all lengths."""
    how = config.parallel.stage
    is_pair = isinstance(how, TensorParallel) and how.size == 2 and not how.sequence
    # A draft head reads sums, each once.
    reads_sums = isinstance(config.speculation, HeadDrafts | MTPDrafts)
    device = config.device
    if not device.info.is_cuda or not is_pair or reads_sums or device.deterministic:
        return 0
    tokens = config.scheduling.max_num_batched_tokens + config.scheduling.max_num_seqs
    return tokens if tokens >= COPIED_SUMS_FROM and any(x.is_plain for x in spec.all_layers) else 0


def peer_copy_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes on each of the two GPUs of two buffers for the rows of that step."""
    return 2 * peer_copy_tokens(config, spec) * spec.hidden_size * DTYPE_BYTES[config.model.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Breakdown of the memory of `device`. `allowed_bytes` is what the engine may use.

    `activation_bytes` and `graph_bytes` are measured. `other_bytes` counts the sequences' rows (tokens and
    block tables), `adapter_bytes` the adapter slots, and `peer_copy_bytes` the buffers for partial sums from
    another GPU. `num_blocks` includes the null block, which holds no tokens of a sequence. `forms` describes
    the loaded weights of linear layers; it is empty in an estimate. A sequence has blocks in each of
    `groups`; with windows their number depends on `max_step_tokens`. The tiers' bytes are upper bounds in
    host memory and on disk, not on the device.
    """

    device: str
    total_bytes: int
    allowed_bytes: int
    weights_bytes: int
    activation_bytes: int
    graph_bytes: int
    kv_bytes: int
    other_bytes: int
    block_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    forms: tuple[WeightForm, ...] = ()
    groups: tuple[CacheGroup, ...] = (CacheGroup(kind="full"),)
    max_step_tokens: int = 0
    adapter_bytes: int = 0
    peer_copy_bytes: int = 0
    image_cache_bytes: int = 0  # upper bound
    host_tier_bytes: int = 0
    disk_tier_bytes: int = 0
    handover_bytes: int = 0  # of host memory, for blocks fetched by other engines
    state_bytes: int = 0
    num_slots: tuple[int, ...] = ()  # of each kind; `state_bytes` has them all
    slot_sizes: tuple[int, ...] = ()
    host_expert_bytes: int = 0  # in the host's memory, next to a GPU
    returned_expert_bytes: int = 0  # of host memory, for all tokens in the cache
    # number of ranks with their own requests, each with a cache of `num_blocks`
    num_caches: int = 1

    @property
    def used_bytes(self) -> int:
        parts = (
            self.weights_bytes
            + self.activation_bytes
            + self.graph_bytes
            + self.kv_bytes
            + self.other_bytes
        )
        parts += self.adapter_bytes + self.peer_copy_bytes + self.image_cache_bytes
        return parts + self.state_bytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of a block, and of a slot of each kind."""
        return self.block_bytes, *self.slot_sizes

    @property
    def num_states(self) -> int:
        """Number of slots of recurrent states."""
        return self.num_slots[0] if self.num_slots else 0

    @property
    def left_bytes(self) -> int:
        return self.allowed_bytes - self.used_bytes

    @property
    def blocks_per_sequence(self) -> int:
        """Maximum number of blocks of a sequence of `max_model_len` tokens."""
        return blocks_of_sequence(
            self.groups, self.max_model_len, self.block_size, self.max_step_tokens
        )

    @property
    def num_kv_tokens(self) -> int:
        """Number of tokens that the caches hold in sequences of maximum length, including prompts
        read by an encoder."""
        own = -(-self.max_model_len // self.block_size)
        cross = [g for g in self.groups if g.kind == "cross"]
        tables = own + sum(g.max_blocks(self.max_model_len, self.block_size, 0) for g in cross)
        blocks = self.num_caches * max(0, self.num_blocks - 1)
        return blocks * self.block_size * tables // self.blocks_per_sequence

    @property
    def num_full_sequences(self) -> int:
        """Number of sequences of maximum length that the KV caches hold at once. Each sequence is
        in one cache."""
        return self.num_caches * (max(0, self.num_blocks - 1) // self.blocks_per_sequence)

    @property
    def has_cross(self) -> bool:
        """Whether a prompt of up to `max_model_len` tokens has its own blocks, apart from the
        answer's (cross attention)."""
        return any(group.kind == "cross" for group in self.groups)

    def describe(self) -> list[str]:
        """Lines for people: each part in bytes and GiB, and the cache's capacity."""
        parts = {
            "weights": self.weights_bytes,
            "activations": self.activation_bytes,
            "graphs": self.graph_bytes,
            "KV cache": self.kv_bytes,
            "rows": self.other_bytes,
        }
        more = {
            "states": self.state_bytes,
            "adapters": self.adapter_bytes,
            "peer copies": self.peer_copy_bytes,
            "pictures": self.image_cache_bytes,
        }
        parts |= {name: size for name, size in more.items() if size}
        parts["left"] = self.left_bytes
        lines = [
            f"{name:<12}{size:>18,} B {size / 2**30:>9.2f} GiB" for name, size in parts.items()
        ]
        lines.append(
            f"{'of':<12}{self.allowed_bytes:>18,} B {self.allowed_bytes / 2**30:>9.2f} GiB on {self.device}"
        )
        if self.left_bytes < 0:
            lines.append(f"does not fit: {-self.left_bytes / 2**30:.2f} GiB are missing")
        else:
            lines.append(f"the cache holds {self.describe_capacity()}")
        for where, size in (
            ("the host's memory", self.host_tier_bytes),
            ("a disk", self.disk_tier_bytes),
        ):
            if size:
                tokens = size // self.block_bytes * self.block_size // len(self.groups)
                lines.append(f"below it: {size / 2**30:.2f} GiB of {where}, {tokens:,} tokens")
        if self.handover_bytes:
            lines.append(
                f"next to it: {self.handover_bytes / 2**30:.2f} GiB of the host's memory, for other engines"
            )
        if self.host_expert_bytes:
            lines.append(
                f"experts: {self.host_expert_bytes / 2**30:.2f} GiB of the host's memory, computed there"
            )
        if self.returned_expert_bytes:
            lines.append(
                f"tokens' experts: {self.returned_expert_bytes / 2**30:.2f} GiB of the host's memory"
            )
        if self.forms:
            lines.append(f"weights of products: {self.describe_forms()}")
        return lines

    def describe_capacity(self) -> str:
        read = next((g.num_read for g in self.groups if g.num_read), None)
        each = ", prompt and answer each" if self.has_cross else ""
        each = each if read is None else f", and {read:,} states of audio each"
        ranks = f", on all {self.num_caches} ranks together" if self.num_caches > 1 else ""
        return f"{self.num_kv_tokens:,} tokens: {self.num_full_sequences} sequences of {self.max_model_len:,}{each}{ranks}"

    def describe_forms(self) -> str:
        return ", ".join(f"{f.num_products} {f.name} ({f.num_bytes:,} B)" for f in self.forms)


def size_cache(
    config: EngineConfig,
    spec: ModelSpec,
    block: int,
    *,
    total_bytes: int,
    free_bytes: int,
    weights_bytes: int,
    activation_bytes: int,
    graph_bytes: int,
    rows_bytes: int,
    taken_bytes: int,
    adapter_bytes: int = 0,
    peer_copy_bytes: int = 0,
    forms: tuple[WeightForm, ...] = (),
    agree: Callable[[int], int] = lambda num_blocks: num_blocks,
) -> tuple[EngineConfig, MemoryLedger]:
    """Returns the settings, with the context length that the KV cache allows, and the ledger.

    `block` is the size of a KV block in bytes. `taken_bytes` is the part of `free_bytes` that the
    engine will use for other things. Several ranks on a CPU share the free memory. All ranks need
    the same number of blocks: `agree` takes one rank's number and returns the minimum.
    OutOfMemoryError names the setting to lower.
    """
    name = config.device.info.name
    if (ranks := config.parallel.num_ranks) > 1 and not config.device.info.is_cuda:
        free_bytes, total_bytes = free_bytes // ranks, total_bytes // ranks
        name = f"{name}, shared by {ranks} ranks"
    media = 0 if config.media is None else config.media.cache_bytes
    taken_bytes += media
    sizes = slot_sizes(spec, DTYPE_BYTES[config.model.dtype])
    allowed, budget = kv_budget(
        config,
        block,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        taken_bytes=taken_bytes,
        slots=2 * SLOTS_PER_SEQUENCE * config.scheduling.max_num_seqs * sum(sizes),
    )
    num_slots, slot_bytes = list[int](), 0
    for kind, wanted, size in zip(SLOT_KINDS, config.cache.slots, sizes, strict=True):
        num = size_slots(config, kind, wanted, size, budget - slot_bytes)
        num_slots.append(agree(num) if wanted else 0)
        slot_bytes += num_slots[-1] * size
    budget -= slot_bytes
    experts = returned_expert_bytes(config, spec)
    on_host = config.cache.kv_cache_bytes is None and not config.device.info.is_cuda
    each = block + experts if on_host else block
    num_blocks = plan_kv(budget_bytes=budget, block_bytes=each) if block else keyed_blocks(config)
    if spec.is_encoder:
        num_blocks = min(num_blocks, scratch_blocks(config))
    num_blocks = agree(num_blocks)
    slots = host_slots(config, (block, *sizes))
    if config.cache.host_bytes is not None:
        slots = [agree(count) for count in slots]
    try:
        # block 0 is the null block
        config = config.with_memory_limits(num_blocks - 1, block, num_slots)
    except OutOfMemoryError:
        if num_blocks > 1 or config.origins["kv_cache_bytes"].source == "user":
            raise
        steps, seqs = config.scheduling.max_num_batched_tokens, config.scheduling.max_num_seqs
        follows = (
            config.origins["max_num_batched_tokens"].source != "user"
            and config.origins["max_num_seqs"].source == "user"
        )
        parts = [
            (weights_bytes, "weights", ""),
            (
                activation_bytes + graph_bytes,
                f"steps (max_num_batched_tokens={steps})",
                "max_num_batched_tokens",
            ),
            (rows_bytes, f"rows of sequences (max_num_seqs={seqs})", "max_num_seqs"),
        ]
        if config.lora is not None:
            parts.append(
                (adapter_bytes, f"adapters (max_loras={config.lora.max_loras})", "max_loras")
            )
        field = max(parts)[2]
        if not field:
            raise
        field = "max_num_seqs" if follows and field == "max_num_batched_tokens" else field
        told = ", ".join(f"{size / 2**30:.2f} GiB for {what}" for size, what, _ in parts)
        message = f"no memory is left for the KV cache: of {allowed / 2**30:.2f} GiB there are {told}; lower {field}"
        raise OutOfMemoryError(message, field=field) from None
    return config, MemoryLedger(
        device=name,
        total_bytes=total_bytes,
        allowed_bytes=allowed,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        graph_bytes=graph_bytes,
        kv_bytes=num_blocks * block,
        other_bytes=rows_bytes,
        block_bytes=block,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        max_model_len=config.model.max_model_len,
        groups=config.cache.groups,
        max_step_tokens=config.scheduling.max_num_batched_tokens,
        forms=forms,
        adapter_bytes=adapter_bytes,
        peer_copy_bytes=peer_copy_bytes,
        image_cache_bytes=media,
        state_bytes=slot_bytes,
        num_slots=tuple(num_slots),
        slot_sizes=tuple(sizes),
        host_tier_bytes=sum(map(mul, slots, (block, *sizes))),
        handover_bytes=0 if config.cache.handover is None else config.cache.handover.limit_bytes,
        disk_tier_bytes=(config.cache.disk_bytes or 0) // config.parallel.num_ranks,
        returned_expert_bytes=num_blocks * experts,
        num_caches=config.parallel.stage.num_caches,
    )
