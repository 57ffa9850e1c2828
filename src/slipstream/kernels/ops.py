"""The op set: what a model is computed with, and the one place that chooses an implementation.

`OpSet` gives every op's signature, shapes and meaning; `reference.py` is the oracle, `cpu.py` the C++ kernels of a CPU,
`cpu_torch.py` the torch ops that are fast there where those are not built, `triton/` the GPU's. The decoder is handed an
`OpSet` and never asks which. Shapes: T tokens in the step, S sequences, H query heads, K kv heads, D head dim, B blocks, V
vocabulary, E hidden size, F feed-forward size.

A step is *ragged*: the tokens of all sequences stand one after another, sequence i at
query_start_loc[i] : query_start_loc[i + 1]. Its keys and values are written to the cache first, then attention reads
everything from the cache: prefill, chunked prefill and decode are one op.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.kernels.tiles import NO_TILES, TileTable
from slipstream.model.scheme import BLOCK, InputFormat, Scheme
from slipstream.model.spec import Activation, AttentionKind, LatentAttentionSpec, MoESpec, NamedActivation


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's paged cache. Block 0 is the null block: padding writes there, nothing reads it.

    In 8 bits (float8 e4m3 or int8) a stored number times its head's scale is the key or value. How `v` lies in memory is
    the op set's choice (`OpSet.values_by_dim`).
    """

    k: Tensor  # [B, K, block_size, D]
    v: Tensor  # [B, K, block_size, D], or of latent attention the last numbers of each key: a view of `k`
    k_scale: Tensor | None = None  # float32 [K], with an 8-bit cache
    v_scale: Tensor | None = None  # float32 [K]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def latent(self) -> bool:
        """The values are part of the keys, and are not written by themselves."""
        return self.v.shape[3] < self.k.shape[3]


def cache_tensors(
    attention: AttentionKind,
    num_blocks: int,
    block_size: int,
    new: Callable[[tuple[int, ...]], Tensor],
    *,
    values_by_dim: bool = False,
) -> tuple[Tensor, Tensor]:
    """`LayerKV`'s k and v for a layer, of tensors that `new` makes."""
    shape = (num_blocks, attention.num_kv_heads, block_size, attention.head_dim)
    k = new(shape)
    if isinstance(attention, LatentAttentionSpec):
        return k, k[..., attention.rotary_dim :]
    return k, new((*shape[:2], shape[3], shape[2])).transpose(2, 3) if values_by_dim else new(shape)


def by_dim(v: Tensor) -> Tensor:
    """The same values [B, K, block_size, D], with a block's tokens side by side in memory: [B, K, D, block_size]."""
    return v.transpose(2, 3).contiguous().transpose(2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where this step's tokens stand. Tensors are on the model's device; the ints are known on the host.

    The first `num_decodes` sequences have exactly one token each (their queries are tokens 0 … num_decodes − 1).
    `cross` says where the same sequences' keys and values of an encoder stand (its positions and slots are unused).
    Inside a captured graph the ints are upper bounds and padded sequences have seq_len 0 and write to slot 0
    (in the null block).
    """

    query_start_loc: Tensor  # int32 [S + 1]
    seq_lens: Tensor  # int32 [S]: tokens in the cache after this step's are written
    block_table: Tensor  # int32 [S, max_blocks]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]: block · block_size + offset
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    token_types: Tensor | None = None  # int64 [T], where a model's texts have two parts; None: all of the first
    cross: AttentionMetadata | None = None

    @classmethod
    def alone(cls, start: int, num_tokens: int, *, block_size: int, device: torch.device) -> AttentionMetadata:
        """One sequence, in blocks 1, 2, …: its tokens start … start + num_tokens − 1, those before being in the cache."""
        return cls.uniform(1, num_tokens, start + num_tokens, block_size=block_size, device=device)

    @classmethod
    def uniform(
        cls, num_seqs: int, num_new: int, length: int, *, block_size: int, device: torch.device | None = None
    ) -> AttentionMetadata:
        """`num_seqs` sequences of `length` tokens, the last `num_new` of them new; each has its own blocks, from block 1 on."""
        num_blocks = -(-length // block_size)
        table = (torch.arange(num_seqs * num_blocks, dtype=torch.int32, device=device) + 1).view(num_seqs, num_blocks)
        positions = torch.arange(length - num_new, length, device=device).repeat(num_seqs)
        rows = torch.arange(num_seqs, device=device).repeat_interleave(num_new)
        return cls(
            query_start_loc=torch.arange(0, num_seqs * num_new + 1, num_new, dtype=torch.int32, device=device),
            seq_lens=torch.full((num_seqs,), length, dtype=torch.int32, device=device),
            block_table=table,
            positions=positions,
            slot_mapping=table[rows, positions // block_size].long() * block_size + positions % block_size,
            num_decodes=num_seqs if num_new == 1 else 0,
            max_query_len=num_new,
            max_seq_len=length,
        )


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Where `moe` counts, for one layer, the tokens that each expert was chosen for. A token that is written to the null block
    is padding and doesn't count."""

    counts: Tensor  # int64 [X]
    slots: Tensor  # int64 [T]: the step's `slot_mapping`
    block_size: int


@dataclass(frozen=True, slots=True)
class Quantized:
    """Activations in 8 bits: row t stands for values[t] · scales[t], or each 128 of it for theirs times their scale."""

    values: Tensor  # float8_e4m3fn or int8 [T, E]
    scales: Tensor  # float32 [T, 1], or of `fp8-block` [T, E / 128]


Activations: TypeAlias = Tensor | Quantized
"""What goes into `linear`: rows of the model's type, or already in the form that the weight's scheme wants."""


@dataclass(frozen=True, slots=True)
class SparseCopy:
    """A 2:4 weight without its zeros, as a library holds it; the faster one from so many tokens on."""

    packed: Tensor
    from_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A weight ready for its op. Dense: `weight` [out, in] of the compute dtype. Schemes are subclasses."""

    weight: Tensor
    bias: Tensor | None = None
    sparse: SparseCopy | None = None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def part(self, rows: slice) -> Linear:
        """Some rows of it: one expert's."""
        return Linear(weight=self.weight[rows], bias=self._bias(rows))

    def _bias(self, rows: slice) -> Tensor | None:
        return None if self.bias is None else self.bias[rows]

    @property
    def inputs(self) -> InputFormat | None:
        """The form of activations that this weight multiplies; None: the model's type."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLinear(Linear):
    """`fp8` and `int8`: `weight` [out, in] of float8_e4m3fn or int8, times scales[row]; inputs of the same kind."""

    scales: Tensor  # float32 [out]
    out_dtype: torch.dtype

    def part(self, rows: slice) -> ScaledLinear:
        bias, scales = self._bias(rows), self.scales[rows]
        return ScaledLinear(weight=self.weight[rows], bias=bias, scales=scales, out_dtype=self.out_dtype)

    @property
    def inputs(self) -> InputFormat:
        return "int8" if self.weight.dtype == torch.int8 else "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScaledLinear(Linear):
    """`fp8-block`: `weight` float8_e4m3fn [out, in], each block of 128 × 128 of it times one of `scales`; inputs of that form.
    `in` is a multiple of 128, and of experts the rows of each are."""

    scales: Tensor  # float32 [⌈out / 128⌉, in / 128]
    out_dtype: torch.dtype

    def part(self, rows: slice) -> BlockScaledLinear:
        assert rows.start % BLOCK == 0
        blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        bias, scales = self._bias(rows), self.scales[blocks]
        return BlockScaledLinear(weight=self.weight[rows], bias=bias, scales=scales, out_dtype=self.out_dtype)

    @property
    def inputs(self) -> InputFormat:
        return "fp8-block"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLinear(Linear):
    """`int8-split` (LLM.int8(), Dettmers et al. 2022): of the inputs, `columns` meet `dense` in the model's type, and what is
    left of them meets `weight`, an int8 `ScaledLinear`'s, which has zeros there. Inputs come in the model's type."""

    scales: Tensor  # float32 [out]
    out_dtype: torch.dtype
    columns: Tensor  # int64 [C]
    dense: Tensor  # of the model's type [out, C]

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor, columns: Sequence[int], dtype: torch.dtype) -> SplitLinear:
        """Of all columns' codes int8 [out, in], which are changed."""
        at = torch.tensor(columns, device=codes.device)
        dense = (codes[:, at].float() * scales[:, None]).to(dtype)
        codes[:, at] = 0
        return cls(weight=codes, scales=scales, out_dtype=dtype, columns=at, dense=dense)

    @property
    def rest(self) -> ScaledLinear:
        """With the bias."""
        return ScaledLinear(weight=self.weight, bias=self.bias, scales=self.scales, out_dtype=self.out_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLinear(Linear):
    """`int4`: four numbers to an int16 word. Word j of a chunk of C inputs holds, from its low bits up, the numbers of inputs
    j, j + C/4, j + C/2, j + 3C/4 of the chunk, as codes 0 … 15: a number is (code − zero) · scale, and zero is 8 unless
    `zeros` says otherwise. `weight` int16 [out, in / 4].

    `mxfp4` (OCP Microscaling Formats 1.0) has `codes` "e2m1": floats of a sign, two bits of exponent and one of mantissa, 0 to
    ±6, with scales that are powers of two; for experts alone (`moe`)."""

    scales: Tensor  # of the compute dtype [in / group_size, out]
    group_size: int
    chunk: int
    zeros: Tensor | None = None  # of the compute dtype [in / group_size, out]
    codes: Literal["int4", "e2m1"] = "int4"
    dense: Tensor | None = None  # the same numbers [out, in], where memory buys the speed of many tokens

    def part(self, rows: slice) -> GroupedLinear:
        return GroupedLinear(
            weight=self.weight[rows],
            bias=self._bias(rows),
            scales=self.scales[:, rows],
            zeros=None if self.zeros is None else self.zeros[:, rows],
            group_size=self.group_size,
            chunk=self.chunk,
            codes=self.codes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """Some rows of a weight in one of GGUF's types, as they lie in the file: row i of `blocks` is the weight's row start + i,
    or start + order[i]."""

    type: str
    blocks: npt.NDArray[np.uint8]  # [rows, bytes of a row]
    start: int
    order: Tensor | None = None  # int32 [rows]
    copies: int = 1  # experts: `blocks` holds their rows one below the other, and `start` is in each

    @property
    def rows(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLinear(Linear):
    """A weight in GGUF's own precision, for op sets that say so (`block_types`). `weight` is on the meta device."""

    pieces: tuple[BlockRows, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """How to sample S rows of logits. Flags let an op skip what no row asks for.

    `history` holds for each row the tokens so far, prompt first: row r has history_lens[r] of them, of which the first
    prompt_lens[r] are prompt. The draw of a row depends only on (seeds[r], history_lens[r]) and its logits.
    """

    temperature: Tensor  # float32 [S], 0 is greedy
    top_k: Tensor  # int32 [S], 0 is off
    top_p: Tensor  # float32 [S]
    min_p: Tensor  # float32 [S]
    seeds: Tensor  # int64 [S]
    history_lens: Tensor  # int32 [S]
    prompt_lens: Tensor | None = None  # int32 [S], with penalties
    history: Tensor | None = None  # int32 [S, L], with penalties
    repetition_penalty: Tensor | None = None  # float32 [S]
    presence_penalty: Tensor | None = None  # float32 [S]
    frequency_penalty: Tensor | None = None  # float32 [S]
    bias_rows: Tensor | None = None  # int64 [N]: logits[bias_rows, bias_tokens] += bias_values (−inf forbids a token)
    bias_tokens: Tensor | None = None  # int64 [N]
    bias_values: Tensor | None = None  # float32 [N]
    all_greedy: bool = False
    any_top_k: bool = False
    any_top_p: bool = False
    any_min_p: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShape:
    """What all layers of a decoder have in common, for `OpSet.one_token`."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool
    activation: NamedActivation
    parallel: bool
    norm: Literal["rms", "layer"]
    norm_eps: float
    norm_offset: float
    mlp_norm: bool  # whether up reads a norm of its own
    mlp_norm_eps: float
    interleaved: bool
    qk_eps: float
    qk_offset: float
    scale: float


class OpSet(ABC):
    """Every op of the decoder and sampler. Implementations hold no state but tuned choices."""

    name: str
    block_types: frozenset[str] = frozenset()
    """GGUF's types that `adopt_linear` takes as they are."""
    rounded: frozenset[str] = frozenset()
    """The schemes, of fp8, fp8-block, int8, int8-split and int4, whose weights `adopt_linear` takes; others are expanded
    before."""
    rounded_experts: frozenset[str] = frozenset()
    """The same of `adopt_experts`."""

    @property
    def layout(self) -> str | None:
        """What tells this op set's packed products from all others', if a start gains by keeping them in a file; else None."""
        return None

    def write_products(self, path: Path, products: Mapping[str, Linear]) -> int:
        """Those of the `products`, by name, that were rounded, into a file that appears whole; its bytes, 0 if there is none.
        OSError if there is no room. Only with a `layout`."""
        raise NotImplementedError

    def read_products(self, path: Path) -> dict[str, Linear]:
        """What `write_products` wrote, without biases, to be adopted. CheckpointError if it is damaged."""
        raise NotImplementedError

    def describe(self) -> str:
        """For a person."""
        return self.name

    def values_by_dim(self, dtype: torch.dtype) -> bool:
        """Whether values of a cache of that type are best kept `by_dim`; otherwise as the keys are."""
        return False

    @abstractmethod
    def prepare_linear(self, weight: Tensor, bias: Tensor | None, scheme: Scheme | None = None) -> Linear:
        """Lay a dense weight [out, in] out as this op set's `linear` reads it best, rounded by `scheme` if one is given.
        May return the weight as it is."""

    def adopt_linear(self, w: Linear) -> Linear:
        """A weight that a checkpoint (or a file of this op set's own) holds rounded already, for this op set's `linear`."""
        return w

    def embedding(self, table: Tensor | Linear, tied: Linear | None) -> Tensor | Linear:
        """The table that `embed` reads, or that a compiled step does. With `tied`, the output head that was made of it, that
        may be the head itself."""
        return table

    def adopt_experts(self, w: Linear, *, num_experts: int) -> Linear:
        """`adopt_linear` for the weights of all experts."""
        return w

    @abstractmethod
    def prepare_experts(
        self, weight: Tensor, scheme: Scheme | None = None, bias: Tensor | None = None, *, num_experts: int
    ) -> Linear:
        """`prepare_linear` for the weights (and biases) of all experts, one below the other, as `moe` reads them."""

    def one_token(
        self,
        shape: TokenShape,
        layers: Sequence[Mapping[str, Tensor | None]],
        product: Linear,
        cos_sin: Tensor | None,
    ) -> Callable[[Tensor, Sequence[LayerKV], AttentionMetadata], Tensor] | None:
        """All layers of a step of one sequence at once: x [1, E] → the residual after the last layer [1, E]. None: this op set
        runs them one by one. `layers` are the tensors of each, by name; `product` is one of the products, all of one form."""
        return None

    def forms_of(self, w: Linear) -> list[tuple[str, int]]:
        """For a person: how the parts of a product's weight are held, and in how many bytes."""
        tensors = [v for f in fields(w) if isinstance(v := getattr(w, f.name), Tensor) and v.device.type != "meta"]
        name = str(w.weight.dtype).removeprefix("torch.")
        if w.sparse is not None:
            tensors.append(w.sparse.packed)
            name += f", without zeros from {w.sparse.from_tokens} tokens on"
        return [(name, sum(t.numel() * t.element_size() for t in tensors))]

    @abstractmethod
    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        """[T] int → [T, E]: rows of `table` [V, E], times `scale` rounded to the table's dtype (as Gemma does)."""

    @abstractmethod
    def linear(self, x: Activations, w: Linear) -> Tensor:
        """[T, in] → [T, out]: x · weightᵀ + bias, accumulated in float32 (int32 for int8). x that is not yet as
        `w.inputs` wants it is quantised first; the result has the model's type."""

    def split_linear(self, x: Tensor, w: SplitLinear) -> Tensor:
        """`linear` of such a weight, by the op set's own product of 8 bits."""
        rest = self.linear(x.index_fill(1, w.columns, 0.0), w.rest)
        return torch.addmm(rest, x[:, w.columns], w.dense.T)

    @abstractmethod
    def quantize(self, x: Tensor, inputs: InputFormat) -> Quantized:
        """[T, E] → 8 bits with a scale a row (or for each 128 of it): its largest magnitude falls on the end of the range."""

    @abstractmethod
    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        residual: Tensor | None = None,
        weight_offset: float = 0.0,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        """[T, E] → (normed [T, E], sum [T, E]). `inputs`: the normed rows come out quantised.

        With `residual`, x + residual is normed and returned as the second value (it may reuse residual's memory); without,
        the second value is x. The norm is computed in float32; weight_offset is added to the weight in float32.
        """

    @abstractmethod
    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        residual: Tensor | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        """Like `rms_norm`, with the mean taken off and a bias added."""

    @abstractmethod
    def rope_and_cache(
        self,
        qkv: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cos_sin: Tensor | None,
        interleaved: bool = False,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 1e-6,
        norm_offset: float = 0.0,
    ) -> Tensor:
        """[T, (H + 2K) · D] → q [T, H, D]; k and v go to their slots of the cache. Without the values, [T, (H + K) · D], if
        `kv.latent`.

        q and k of each head are RMS-normed first if q_norm, k_norm [D] are given, then rotated by `cos_sin`
        float32 [max_position, rotary_dim]: cos in the first half of a row, sin in the second, read at
        `meta.positions`; dimensions beyond rotary_dim pass. `cos_sin=None`: no rotation. Computed in float32, and rounded
        to the cache's type after division by its scale.
        """

    @abstractmethod
    def attention(
        self,
        q: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        distance_bias: Tensor | None = None,
        causal: bool = True,
    ) -> Tensor:
        """q [T, H, D] → [T, H, D] (as wide as the values): attention of each token over its own sequence's cache.

        Token j of a sequence with seq_len L and query length n stands at position p = L − n + j and sees cache positions
        max(0, p − window + 1) … p; without `causal` (in an encoder, or of one) all L of them, or those less than window away.
        alibi_slopes float32 [H] add slope · (key position − p) to the scores, distance_bias float32 [H, 2R + 1] adds
        distance_bias[h, R + (key position − p cut to −R … R)]. sinks [H] join the softmax as the scores (scaled already,
        never capped) of a key more, whose value is 0 (Xiao et al. 2023, arXiv:2309.17453, learned). Rows of padded
        sequences (seq_len 0) are unspecified but finite. Softmax in float32.
        """

    def latent_queries(
        self,
        q: Tensor,
        row: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        keys: Tensor,
        norm: Tensor,
        eps: float,
        cos_sin: Tensor,
        interleaved: bool,
    ) -> Tensor:
        """What latent attention asks and remembers: q [T, H, P + R], plain and rotary numbers of each head, and row
        [T, C + R], the latent and the rotary key → queries [T, H, R + C], rotated and with the plain part multiplied into the
        latents' space by keys [H, P, C]. The rotated key and the normed latent (RMS norm with weight `norm` [C]) go into the
        cache."""
        (num_heads, plain_dim, rank), rotary = keys.shape, cos_sin.shape[1]
        plain, turned = q.split((plain_dim, rotary), dim=2)
        latent, key = row.split((rank, rotary), dim=1)
        normed = self.rms_norm(latent.contiguous(), norm, eps)[0]
        assert isinstance(normed, Tensor)
        absorbed = torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1)
        queries, cached = torch.cat((turned, absorbed), dim=2), torch.cat((key, normed), dim=1)
        return self.rope_and_cache(
            torch.cat((queries, cached[:, None]), dim=1).flatten(1),
            kv,
            meta,
            num_heads=num_heads,
            num_kv_heads=1,
            head_dim=rank + rotary,
            cos_sin=cos_sin,
            interleaved=interleaved,
        )

    def latent_attention(self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, values: Tensor, *, scale: float) -> Tensor:
        """`attention` over a cache of latents by `latent_queries`' q, and its sums [T, H, C] made values by values [H, C, V]:
        [T, H · V]."""
        seen = self.attention(q, kv, meta, scale=scale)
        return torch.bmm(seen.transpose(0, 1), values).transpose(0, 1).flatten(1)

    @abstractmethod
    def gated_activation(
        self, gate_up: Tensor, activation: Activation, *, inputs: InputFormat | None = None
    ) -> Activations:
        """[T, 2F] → [T, F]: act(first half) · second half (or as the activation has it), quantised if `inputs` says so."""

    @abstractmethod
    def activation(self, x: Tensor, activation: Activation, *, inputs: InputFormat | None = None) -> Activations:
        """[T, F] → [T, F]."""

    @abstractmethod
    def moe(
        self,
        x: Tensor,
        router_logits: Tensor,
        up: Linear,
        down: Linear,
        spec: MoESpec,
        *,
        correction: Tensor | None = None,
        load: ExpertLoad | None = None,
    ) -> Tensor:
        """x [T, E], router_logits [T, X] → [T, E]: each token through its experts, summed with their weights in float32.

        With p the softmax (or logistic function) of a row of router_logits in float32, the experts are the
        num_experts_per_token with the largest p (+ `correction`, float32 [X], if spec.correction), within spec.groups; their
        weights are p, divided by their sum if spec.normalize, times spec.weight_scale. `up` [X · 2F, E] (or [X · F, E]) and
        `down` [X · E, F] hold the experts one below the other, their biases too. What was chosen is added to `load`.
        """

    def moe_and_shared(
        self,
        x: Tensor,
        router_logits: Tensor,
        up: Linear,
        down: Linear,
        spec: MoESpec,
        shared: tuple[Linear, Linear],
        *,
        correction: Tensor | None = None,
        load: ExpertLoad | None = None,
    ) -> Tensor:
        """`moe`, and added to it one expert more that every token has, of the products `shared`, with the same activation."""
        routed = self.moe(x, router_logits, up, down, spec, correction=correction, load=load)
        act = self.gated_activation if spec.expert.gated else self.activation
        h = act(self.linear(x, shared[0]), spec.expert.activation, inputs=shared[1].inputs)
        return routed + self.linear(h, shared[1])

    @abstractmethod
    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """[S, V] logits (any float dtype) → int64 [S]. Order: logit bias, penalties, temperature, min_p, top_k, top_p, draw.

        `logits` may be overwritten. The draw inverts the cumulative distribution at one uniform number
        u = uniform(seed, history_len) per row (see `reference.uniform`), so it needs no state and is the same in any batch.
        """

    @abstractmethod
    def copy_blocks(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks: kv[target[i]] = kv[source[i]] for int64 [N] each; no target is also a source."""


def select_ops(
    device: torch.device,
    implementation: str = "auto",
    tiles: TileTable = NO_TILES,
    *,
    num_threads: int = 1,
    isa: str | None = None,
    deterministic: bool = False,
    dense_copies: bool = False,
) -> OpSet:
    """The op set for a device. `implementation` is auto, reference, cpu, torch or triton; one that can't run there raises. On a
    CPU auto is cpu, the C++ kernels with `num_threads` and the instruction set `isa` (None: the last that the machine has), or
    torch where they are not built (`slipstream doctor` says so). `tiles` are for triton, and so are `deterministic` (the result
    for a token depends on nothing but the tokens before it) and `dense_copies` (4-bit weights are kept dense as well)."""
    from slipstream.errors import ConfigError

    if implementation == "auto":
        implementation = "triton" if device.type == "cuda" else "cpu" if has_cpu_kernels() else "torch"
    if deterministic and implementation != "triton":
        raise ConfigError("deterministic=True needs a GPU and its kernels ('triton'); leave it out", field="deterministic")
    if implementation == "reference":
        from slipstream.kernels.reference import ReferenceOps

        return ReferenceOps()
    if implementation == "cpu" and device.type == "cpu":
        from slipstream.kernels.cpu import NativeOps

        return NativeOps(num_threads, isa)
    if implementation == "torch" and device.type == "cpu":
        from slipstream.kernels.cpu_torch import CpuOps

        return CpuOps()
    if implementation == "triton" and device.type == "cuda":
        from slipstream.kernels.triton import TritonOps

        return TritonOps(tiles, deterministic=deterministic, dense_copies=dense_copies)
    raise ConfigError(
        f"kernels={implementation!r} cannot run on {device}; use 'auto', or 'reference' on any device", field="kernels"
    )


def has_cpu_kernels() -> bool:
    """Whether the C++ kernels are built."""
    from slipstream.kernels.native import library_path

    return library_path() is not None
