"""Random steps for the tests of the ops: ragged batches over a paged cache, and parameters for sampling.

Everything is made on the CPU from a seed and then moved, so that a case is the same on every device. What no sequence
owns is filled with large numbers: an op that reads past a sequence's end gives nonsense instead of passing by luck.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from slipstream.kernels.cpu.packed import Packed
from slipstream.kernels.layouts import NormParams
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, SamplingTensors

GARBAGE = 1000.0


def rms_norm(weight: Tensor, offset: float = 0.0) -> NormParams:
    return NormParams(kind="rms", weight=weight, eps=1e-5, offset=offset)


def layer_norm(weight: Tensor, bias: Tensor | None = None) -> NormParams:
    return NormParams(kind="layer", weight=weight, eps=1e-5, bias=bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`sequences` are (tokens in this step, tokens in the cache before it); `padded` rows stand after the decodes."""

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    padded: int = 0
    seed: int = 0

    @property
    def query_lens(self) -> list[int]:
        decodes = [n for n, _ in self.sequences if n == 1]
        return decodes + [1] * self.padded + [n for n, _ in self.sequences if n != 1]

    @property
    def seq_lens(self) -> list[int]:
        decodes = [n + c for n, c in self.sequences if n == 1]
        return decodes + [0] * self.padded + [n + c for n, c in self.sequences if n != 1]

    @property
    def num_decodes(self) -> int:
        return sum(n == 1 for n in self.query_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step's inputs. `owned` says for each token whether it is a real one (not padding)."""

    q: Tensor  # [T, H, D]
    kv: LayerKV
    meta: AttentionMetadata
    owned: Tensor  # bool [T]

    def clone_kv(self) -> LayerKV:
        return LayerKV(self.kv.k.clone(), self.kv.v.clone())


def step(shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Step:
    rng = torch.Generator().manual_seed(shape.seed)
    size, kv_heads, dim = shape.block_size, shape.num_kv_heads, shape.head_dim
    needed = [-(-length // size) for length in shape.seq_lens]
    total = sum(needed) + 3
    free = (torch.randperm(total - 1, generator=rng) + 1).tolist()
    k = torch.full((total, kv_heads, size, dim), GARBAGE)
    v = torch.full((total, kv_heads, size, dim), -GARBAGE)
    # Entries beyond a sequence's blocks are those of some other time: any block at all.
    table = torch.randint(
        0, total, (len(needed), max(*needed, 1) + 1), generator=rng, dtype=torch.int32
    )
    positions, slots, owned = [], [], []
    for i, (query, length) in enumerate(zip(shape.query_lens, shape.seq_lens, strict=True)):
        blocks = [free.pop() for _ in range(needed[i])]
        table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for at in range(length):
            for cache in (k, v):
                cache[blocks[at // size], :, at % size] = torch.randn(kv_heads, dim, generator=rng)
        for at in range(length - query, length) if length else range(query):
            positions.append(at)
            slots.append(blocks[at // size] * size + at % size if length else 0)
            owned.append(length > 0)
    starts = torch.tensor([0, *shape.query_lens]).cumsum(0)
    q = torch.randn(int(starts[-1]), shape.num_heads, dim, generator=rng)
    meta = AttentionMetadata(
        query_start_loc=starts.int().to(device),
        seq_lens=torch.tensor(shape.seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        num_decodes=shape.num_decodes,
        max_query_len=max(shape.query_lens),
        max_seq_len=max(shape.seq_lens),
    )
    kv = LayerKV(k.to(device, dtype), v.to(device, dtype))
    return Step(q=q.to(device, dtype), kv=kv, meta=meta, owned=torch.tensor(owned, device=device))


def edge_shapes(
    max_sequences: int = 5, block_sizes: tuple[int, ...] = (4, 16)
) -> st.SearchStrategy[Shape]:
    """Steps around the awkward edges: lengths 1 and block_size ± 1, one very long among many short, decodes with
    prefill chunks that have context, padding, every grouping of heads."""

    @st.composite
    def build(draw: Any) -> Shape:
        size = draw(st.sampled_from(block_sizes))
        edges = st.sampled_from([1, 2, size - 1, size, size + 1, 2 * size, 3 * size + 1])
        decodes = [(1, length - 1) for length in draw(st.lists(edges, max_size=max_sequences))]
        if decodes and draw(st.booleans()):
            decodes[0] = (1, draw(st.sampled_from([9, 20, 33])) * size)
        contexts = st.sampled_from([0, 1, size - 1, size, 2 * size + 1])
        prefills = draw(st.lists(st.tuples(edges.filter(lambda n: n > 1), contexts), max_size=2))
        sequences = (*decodes, *prefills) or ((1, 0),)
        heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (4, 1), (9, 3)]))
        return Shape(
            sequences=sequences,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=draw(st.sampled_from([16, 32])),
            block_size=size,
            padded=draw(st.sampled_from([0, 0, 1, 3])),
            seed=draw(st.integers(0, 2**31)),
        )

    return build()


def attention_options(num_heads: int) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of `AttentionParams`: window, soft cap, ALiBi, sinks and a bias by distance, each or none; now and then over
    whole sequences, where there is no window."""
    slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / num_heads) for i in range(num_heads)])
    return st.fixed_dictionaries(
        {
            "scale": st.sampled_from([0.25, 1.0]),
            "window": st.sampled_from([None, None, 1, 3, 16, 17]),
            "softcap": st.sampled_from([None, None, 2.0]),
            "alibi_slopes": st.sampled_from([None, None, slopes]),
            "sinks": st.sampled_from([None, None, 3 * torch.arange(num_heads).float().cos()]),
            "distance_bias": st.sampled_from(
                [None, None, *(_biases(num_heads, reach) for reach in (3, 20))]
            ),
            "causal": st.sampled_from([True, True, False]),
        }
    )


def _biases(num_heads: int, reach: int) -> Tensor:
    return torch.randn(num_heads, 2 * reach + 1, generator=torch.Generator().manual_seed(reach))


# --- Sampling -------------------------------------------------------------------------------------------------------


def sampling(num_rows: int, *, device: str = "cpu", **given: Any) -> SamplingTensors:
    """Neutral parameters (temperature 1, nothing filtered), with those in `given` put in place. A scalar is for every
    row, a list for each. Flags follow from the values."""
    kinds = {
        "temperature": (torch.float32, 1.0),
        "top_k": (torch.int32, 0),
        "top_p": (torch.float32, 1.0),
        "min_p": (torch.float32, 0.0),
        "seeds": (torch.int64, 0),
        "history_lens": (torch.int32, 1),
        "prompt_lens": (torch.int32, 1),
        "repetition_penalty": (torch.float32, 1.0),
        "presence_penalty": (torch.float32, 0.0),
        "frequency_penalty": (torch.float32, 0.0),
    }
    penalised = "history" in given
    fields: dict[str, Any] = {}
    for name, (dtype, neutral) in kinds.items():
        if (
            name in ("prompt_lens", "repetition_penalty", "presence_penalty", "frequency_penalty")
            and not penalised
        ):
            continue
        value = torch.as_tensor(given.pop(name, neutral), dtype=dtype)
        fields[name] = value.expand(num_rows).contiguous().to(device)
    if penalised:
        longest = max(len(h) for h in given["history"])
        rows = [[*h, *([0] * (longest - len(h)))] for h in given["history"]]
        fields["history_lens"] = torch.tensor(
            [len(h) for h in given.pop("history")], dtype=torch.int32, device=device
        )
        fields["history"] = torch.tensor(rows, dtype=torch.int32, device=device)
    if "bias" in given:
        rows_, tokens, values = zip(*given.pop("bias"), strict=True)
        fields["bias_rows"] = torch.tensor(rows_, device=device)
        fields["bias_tokens"] = torch.tensor(tokens, device=device)
        fields["bias_values"] = torch.tensor(values, dtype=torch.float32, device=device)
    if "allowed" in given:  # {row: tokens}
        allowed = given.pop("allowed")
        pairs = [(row, token) for row, tokens_ in allowed.items() for token in tokens_]
        fields["limited_rows"] = torch.tensor(list(allowed), device=device)
        fields["allowed_rows"], fields["allowed_tokens"] = torch.tensor(
            pairs, device=device
        ).unbind(1)
    assert not given, f"unknown: {given}"
    return SamplingTensors(
        **fields,
        all_greedy=bool((fields["temperature"] == 0).all()),
        any_top_k=bool((fields["top_k"] > 0).any()),
        any_top_p=bool((fields["top_p"] < 1).any()),
        any_min_p=bool((fields["min_p"] > 0).any()),
    )


def sampling_cases(max_rows: int = 5) -> st.SearchStrategy[tuple[Tensor, SamplingTensors]]:
    """(logits [S, V] with ties, parameters in every mixture). On the CPU."""

    @st.composite
    def build(draw: Any) -> tuple[Tensor, SamplingTensors]:
        rows, vocab = draw(st.integers(1, max_rows)), draw(st.sampled_from([5, 64, 97, 1200, 4096]))
        rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        logits = torch.randn(rows, vocab, generator=rng) * draw(st.sampled_from([0.0, 1.0, 6.0]))
        if draw(st.booleans()):
            logits = logits.bfloat16().float()  # ties

        def each(values: list[Any]) -> list[Any]:
            return draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows))

        given: dict[str, Any] = {
            "temperature": each([0.0, 0.5, 1.0, 3.0]),
            "seeds": each([0, 1, -1, 2**62]),
            "history_lens": each([1, 2, 1000]),
        }
        for name, values in (
            ("top_k", [0, 1, 4, 50, 2000, 10**6]),
            ("top_p", [1.0, 1e-6, 0.5, 0.9, 0.999]),
            ("min_p", [0.0, 0.05, 1.0]),
        ):
            if draw(st.booleans()):
                given[name] = each(values)
        if draw(st.booleans()):
            ids = st.lists(st.integers(0, min(vocab, 20) - 1), min_size=1, max_size=12)
            given["history"] = [draw(ids) for _ in range(rows)]
            given["prompt_lens"] = [draw(st.integers(1, len(h))) for h in given["history"]]
            given["repetition_penalty"] = each([1.0, 1.3, 0.7])
            given["presence_penalty"] = each([0.0, 0.5, -1.0])
            given["frequency_penalty"] = each([0.0, 0.25, -0.5])
        if draw(st.booleans()):
            pairs = draw(
                st.sets(
                    st.tuples(st.integers(0, rows - 1), st.integers(0, 3)), min_size=1, max_size=4
                )
            )
            given["bias"] = [
                (r, t, draw(st.sampled_from([5.0, -3.0, -math.inf]))) for r, t in sorted(pairs)
            ]
        if draw(st.booleans()):
            tokens = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=6, unique=True)
            given["allowed"] = draw(st.dictionaries(st.integers(0, rows - 1), tokens, min_size=1))
        return logits, sampling(rows, **given)

    return build()


def rows_of(part: Packed, which: Tensor) -> Tensor:
    """Rows [n] of a packed weight, float32 [n, inner]."""
    return torch.from_numpy(part.rows_of(which.numpy()))


def draw_layout(data: st.DataObject, shape: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of a QKVLayout for a step of this shape: with and without positions and norms."""
    dim = shape.head_dim
    rotary = data.draw(st.sampled_from([0, 8, dim]))
    torch.manual_seed(shape.seed)
    angles = torch.rand(1024, rotary // 2) * 6
    normed = data.draw(st.booleans())
    return {
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": dim,
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=-1) if rotary else None,
        "interleaved": data.draw(st.booleans()),
        "q_norm": torch.randn(dim).to(dtype) if normed else None,
        "k_norm": torch.randn(dim).to(dtype) if normed else None,
        "norm_offset": data.draw(st.sampled_from([0.0, 1.0])),
        "norm_after": data.draw(st.booleans()),
    }
