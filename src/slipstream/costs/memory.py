"""The memory ledger: where a device's bytes go, computed in one place for engine, planner and reports. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slipstream.config import DTYPE_BYTES, EngineConfig
from slipstream.errors import OutOfMemoryError
from slipstream.spec.adapter_slots import ALONE, SlotLayout
from slipstream.spec.cache import CacheGroup, blocks_of_sequence
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import ModelSpec
from slipstream.spec.native_formats import native_group_size
from slipstream.spec.parallel import COPIED_SUMS_FROM, Shard
from slipstream.spec.parameters import Shape, parameters
from slipstream.spec.scheme import Scheme, WeightForm, WeightFormat


def part_of(name: str) -> str:
    """The part of a model that the parameter belongs to, as the ledger and `info` count it."""
    if name.startswith("vision."):
        return "image encoder"
    of_layer = name.removeprefix("encoder.").removeprefix("layers.")
    first, _, rest = of_layer.partition(".")
    first = rest.partition(".")[0] if first.isdigit() else first
    if first in ("embed", "embed_in", "embed_out", "positions", "token_types", "distances"):
        return "embeddings"
    if first in ("attention", "cross"):
        return "attention"
    if first in ("mlp", "router", "correction", "experts", "shared", "shared_weight"):
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
    """Bytes of the parameters by part, the layers' products (and the head, if it says so) held by `scheme`. `on_cpu`: as
    the C++ kernels hold them, but for what they save where a weight is full of zeros, which is known once it is loaded.
    `shapes`: those of the parameters, where `spec` is a rank's part (`spec.parallel`)."""
    found = dict.fromkeys(("embeddings", "attention", "mlp", "output head", "norms"), 0)
    shapes = parameters(spec) if shapes is None else shapes
    if spec.vision is not None:
        found["image encoder"] = 0
    for name, shape in shapes.items():
        found[part_of(name)] += math.prod(shape) * (
            4 if name.endswith(".correction.weight") else dtype_bytes
        )
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
    """`weights_bytes` of a checkpoint that says weight by weight how it is rounded: `formats` are those of the weights held as
    they are stored (`ModelDescription.native_formats`), the others are expanded."""
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


def block_bytes(spec: ModelSpec, block_size: int, dtype_bytes: int) -> int:
    """Bytes of one KV block over the layers of a group: 2 · layers · kv_heads · head_dim · bytes · block_size; of latent
    attention layers · (kv_rank + rotary_dim) · bytes · block_size."""
    return spec.block_bytes_per_token(dtype_bytes) * block_size


MOST_BLOCKS = 2**22
"""Each costs the host some 100 bytes. Only a toy of a model on a large device has room for more: 67 million tokens."""


def plan_kv(*, budget_bytes: int, block_bytes: int) -> int:
    """Whole blocks that fit in `budget_bytes`, the null block included, MOST_BLOCKS at most; 0 if the budget is spent
    already."""
    return min(MOST_BLOCKS, max(0, budget_bytes) // block_bytes)


def scratch_blocks(config: EngineConfig) -> int:
    """Blocks that an encoder uses, the null block included: those of one step, since steps run one after another."""
    size, scheduling = config.cache.block_size, config.scheduling
    return -(-scheduling.max_num_batched_tokens // size) + scheduling.max_num_seqs + 1


MAX_HOST_CACHE_BYTES = 4 * 2**30
"""The most host memory the KV cache takes unasked."""

HOST_CACHE_SHARE = 0.4
"""And the largest share of what is free."""


def host_cache_budget(*, free_bytes: int, wanted_bytes: int) -> int:
    """Bytes for a KV cache in host memory, where other programs live too; `wanted_bytes` would serve all sequences."""
    return min(MAX_HOST_CACHE_BYTES, int(free_bytes * HOST_CACHE_SHARE), wanted_bytes)


def kv_budget(
    config: EngineConfig, block: int, *, total_bytes: int, free_bytes: int, taken_bytes: int
) -> tuple[int, int]:
    """(bytes that the engine may use, bytes for the KV cache), with blocks of `block` bytes on a device that has
    `free_bytes` of `total_bytes` left, of which the engine will take `taken_bytes` for other things."""
    left = free_bytes - taken_bytes
    if config.device.info.is_cuda:
        allowed = int(total_bytes * config.cache.gpu_memory_utilization)
        budget = allowed - (total_bytes - free_bytes) - taken_bytes
    else:
        allowed = total_bytes
        # Blocks that windows have released count as well: they stay in the prefix cache. And the null block.
        per_seq = len(config.cache.groups) * config.max_blocks_per_seq
        full = (config.scheduling.max_num_seqs * per_seq + 1) * block
        budget = host_cache_budget(free_bytes=left, wanted_bytes=full)
    given = config.cache.kv_cache_bytes
    if given is not None and given > left:
        raise OutOfMemoryError(
            f"kv_cache_bytes={given} is more than the {left} bytes that are free beside the model; lower it",
            field="kv_cache_bytes",
        )
    return allowed, budget if given is None else given


STAGED_BYTES = 128 * 2**20
"""Of the device, for blocks between the cache and the host's memory."""


def staged_blocks(config: EngineConfig, block: int) -> int:
    """Blocks of the buffer in which a GPU brings together what it copies to the host's memory, of `block` bytes each."""
    return 0 if config.cache.host_bytes is None else max(1, min(64, STAGED_BYTES // block))


def adapter_bytes(config: EngineConfig, description: ModelDescription, shard: Shard = ALONE) -> int:
    """Bytes of the adapters' slots on a device that has the `shard`'s part of the model."""
    if config.lora is None:
        return 0
    slot = SlotLayout(description, config.lora.max_lora_rank, shard).size
    return config.lora.max_loras * slot * DTYPE_BYTES[config.model.dtype]


def peer_copy_tokens(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens of the largest step for which two GPUs have memory to copy their parts of sums to each other, padding included.
    0: they don't."""
    how, reads_sums = (
        config.parallel,
        config.speculation is not None and config.speculation.by_head,
    )  # and each is read once
    if (
        not config.device.info.is_cuda
        or how.tensor != 2
        or how.ranks_of_stage != 2
        or how.sequence
        or reads_sums
    ):
        return 0
    tokens = config.scheduling.max_num_batched_tokens + config.scheduling.max_num_seqs
    return tokens if tokens >= COPIED_SUMS_FROM and any(x.is_plain for x in spec.all_layers) else 0


def peer_copy_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes, on each of the two, of two places for the rows of that step."""
    return 2 * peer_copy_tokens(config, spec) * spec.hidden_size * DTYPE_BYTES[config.model.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Where the memory of `device` goes. `allowed_bytes` is the share of it that the engine may use.

    `activation_bytes` and `graph_bytes` are measured. `other_bytes` are the sequences' rows (tokens and block tables),
    `adapter_bytes` the adapters' slots, `peer_copy_bytes` what arrives from another GPU in sums beside products. One of
    `num_blocks` is the null block, which holds no sequence's tokens. `forms` are of the products among the weights, as loaded;
    empty in an estimate. A sequence has blocks in each of `groups`; with windows their number depends on `max_step_tokens`.
    The tiers' bytes are bounds of what lies below the cache, in the host's memory and on a disk; none of it is the device's.
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
    image_cache_bytes: int = 0  # at most
    host_tier_bytes: int = 0
    disk_tier_bytes: int = 0
    host_expert_bytes: int = 0  # of the host's memory, beside a GPU
    num_caches: int = 1  # ranks with requests of their own, each with a cache of `num_blocks`

    @property
    def used_bytes(self) -> int:
        parts = (
            self.weights_bytes
            + self.activation_bytes
            + self.graph_bytes
            + self.kv_bytes
            + self.other_bytes
        )
        return parts + self.adapter_bytes + self.peer_copy_bytes + self.image_cache_bytes

    @property
    def left_bytes(self) -> int:
        return self.allowed_bytes - self.used_bytes

    @property
    def blocks_per_sequence(self) -> int:
        """The most blocks that a sequence of the longest length holds."""
        return blocks_of_sequence(
            self.groups, self.max_model_len, self.block_size, self.max_step_tokens
        )

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the caches hold of sequences of the longest length, prompts that an encoder read among them."""
        tables = -(-self.max_model_len // self.block_size) * (1 + self.has_cross)
        blocks = self.num_caches * max(0, self.num_blocks - 1)
        return blocks * self.block_size * tables // self.blocks_per_sequence

    @property
    def num_full_sequences(self) -> int:
        """How many sequences of the longest length the KV caches hold at once; one lies in one cache."""
        return self.num_caches * (max(0, self.num_blocks - 1) // self.blocks_per_sequence)

    @property
    def has_cross(self) -> bool:
        """A sequence's prompt, of up to `max_model_len` tokens, has blocks of its own beside its answer's."""
        return any(group.kind == "cross" for group in self.groups)

    def describe(self) -> list[str]:
        """Lines for a person: each part in bytes and GiB, and what the cache buys."""
        parts = {
            "weights": self.weights_bytes,
            "activations": self.activation_bytes,
            "graphs": self.graph_bytes,
            "KV cache": self.kv_bytes,
            "rows": self.other_bytes,
        }
        more = {
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
        if self.host_expert_bytes:
            lines.append(
                f"experts: {self.host_expert_bytes / 2**30:.2f} GiB of the host's memory, computed there"
            )
        if self.forms:
            lines.append(f"weights of products: {self.describe_forms()}")
        return lines

    def describe_capacity(self) -> str:
        each = ", prompt and answer each" if self.has_cross else ""
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
    """The settings with the context that the KV cache has room for, and the ledger. `block`: bytes of a KV block.
    `taken_bytes`: what the engine will still take of `free_bytes` for other things than the cache. Several ranks on a CPU
    share what is free. All must have as many blocks: `agree` gives, of one's number, the smallest of all."""
    name = config.device.info.name
    if (ranks := config.parallel.num_ranks) > 1 and not config.device.info.is_cuda:
        free_bytes, total_bytes = free_bytes // ranks, total_bytes // ranks
        name = f"{name}, shared by {ranks} ranks"
    pictures = 0 if config.images is None else config.images.cache_bytes
    taken_bytes += pictures
    allowed, budget = kv_budget(
        config, block, total_bytes=total_bytes, free_bytes=free_bytes, taken_bytes=taken_bytes
    )
    num_blocks = plan_kv(budget_bytes=budget, block_bytes=block)
    if spec.is_encoder:
        num_blocks = min(num_blocks, scratch_blocks(config))
    num_blocks = agree(num_blocks)
    try:
        config = config.with_memory_limits(num_blocks - 1, block)  # block 0 is the null block
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
        image_cache_bytes=pictures,
        host_tier_bytes=(config.cache.host_bytes or 0) // block * block,
        disk_tier_bytes=config.cache.disk_bytes or 0,
        num_caches=config.parallel.experts if config.parallel.deals_requests else 1,
    )
