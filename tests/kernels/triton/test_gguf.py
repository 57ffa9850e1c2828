"""GGUF's types on a GPU: products of every type in Triton's interpreter, and tiny models whose tensors have several types."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from slipstream.kernels.ops import Experts
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.products import gguf as kernels
from slipstream.kernels.weights import gguf_codes
from slipstream.kernels.weights.forms import (
    BlockLinear,
    BlockRows,
    CodedLinear,
    JoinedLinear,
    Linear,
)
from slipstream.model.load.loader import load_model
from slipstream.model.stored.gguf_quants import dequantize
from slipstream.spec.description import read_spec
from slipstream.spec.families import find_gguf_family
from slipstream.spec.model import DenseSpec, MoESpec
from slipstream.spec.parameters import parameters
from slipstream.spec.stored.gguf_types import FORMS, TYPES
from tests.kernels.triton.for_hopper import run_for_hopper
from tests.model.formats.test_gguf import random_blocks
from tests.model.formats.test_gguf_models import write
from tests.model.harness import CPU, run
from tests.support import tiny_models

BY_NAME = {quant.name: quant for quant in TYPES.values()}
TOKENS = [5, 9, 200, 31, 7, 44, 45, 46]


def blocks_and_values(kind: str, rows: int, inner: int, seed: int = 0) -> tuple:
    """A weight's bytes [rows, bytes of a row] and its values, float32 [rows, inner]."""
    quant = BY_NAME[kind]
    raw = random_blocks(kind, rows * inner // quant.block_size, seed)
    if kind == "MXFP4":
        raw[:, 0] = np.random.default_rng(seed).integers(118, 126, len(raw))
    values = torch.from_numpy(dequantize(raw, kind, np.float32).reshape(rows, inner))
    return raw.reshape(rows, -1), values


def linear_of(shape, *pieces, bias=None, dtype=torch.float32) -> BlockLinear:
    weight = torch.empty(shape, device="meta", dtype=dtype)
    return BlockLinear(weight=weight, pieces=pieces, bias=bias)


def inner_of(kind: str) -> int:
    """Inputs of a row: two blocks, or a part of a unit."""
    return 512 if BY_NAME[kind].block_size == 256 else 320


@pytest.mark.parametrize("kind", FORMS)
def test_blocks_taken_apart_are_the_values_of_the_gguf_package(kind):
    raw = random_blocks(kind, 300)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(300, -1)
    made = gguf_codes.split(raw.astype(np.int32), kind)
    np.testing.assert_array_equal(made.values(FORMS[kind]), expected)
    there = gguf_codes.split(torch.from_numpy(raw).int(), kind)
    for name in ("codes", "scales", "mins", "d", "dmin"):
        ours, theirs = getattr(there, name), getattr(made, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or np.array_equal(ours.numpy(), theirs)


@pytest.mark.parametrize("kind", FORMS)
def test_product_and_rows_of_every_type_are_those_of_its_values(kind):
    rows, inner = 41, inner_of(kind)
    raw, values = blocks_and_values(kind, rows, inner)
    order = np.random.default_rng(1).permutation(rows).astype(np.int32)
    ops, bias = TritonOps(), torch.randn(rows)
    piece = BlockRows(type=kind, blocks=raw, start=0, order=order)
    w = ops.pack_weight(linear_of((rows, inner), piece, bias=bias))
    assert isinstance(w, CodedLinear)
    own_bytes = sum(x.nbytes for x in (w.weight, w.high, w.factors, w.d) if x is not None)
    assert own_bytes >= rows * inner * FORMS[kind].bytes_of_256() // 256
    assert ops.forms_of(w) == [(kind, own_bytes + bias.nbytes)]
    dense = torch.empty_like(values)
    dense[torch.from_numpy(order).long()] = values
    assert torch.equal(kernels.expand(w), dense)
    ids = torch.tensor([40, 0, 7])
    assert torch.equal(ops.embed(ids, w), dense[ids])
    torch.testing.assert_close(ops.embed(ids, w, 1.7), dense[ids] * 1.7)
    for dtype, error in ((torch.float32, 1e-5), (torch.float16, 1e-3)):
        for num_tokens in (1, 9, 40):
            x = torch.randn(num_tokens, inner).to(dtype)
            wanted = x.float() @ dense.T + bias
            found = ops.linear(x, w).float()
            assert (found - wanted).abs().max() < error * wanted.abs().max()


def test_many_tokens_take_the_expanded_weight_or_the_dense_copy(monkeypatch):
    monkeypatch.setattr(kernels, "EXPAND_TOKENS", 4)
    raw, values = blocks_and_values("Q4_K", 16, 256)
    for ops in (TritonOps(), TritonOps(dense_copies=True)):
        w = ops.pack_weight(linear_of((16, 256), BlockRows(type="Q4_K", blocks=raw, start=0)))
        x = torch.randn(70, 256)
        torch.testing.assert_close(ops.linear(x, w), x @ values.T, rtol=1e-5, atol=1e-4)
        assert (w.dense is not None) == ops.dense_copies


def test_rows_in_several_types_are_one_product_each():
    parts = [("Q4_K", 24), ("Q4_K", 8), ("Q6_K", 16)]
    pieces, values, start = [], [], 0
    for i, (kind, rows) in enumerate(parts):
        raw, own = blocks_and_values(kind, rows, 256, i)
        pieces.append(BlockRows(type=kind, blocks=raw, start=start))
        values.append(own)
        start += rows
    dense, bias, x = torch.cat(values), torch.randn(48), torch.randn(3, 256)
    for ops in (TritonOps(), TritonOps(deterministic=True)):
        w = ops.pack_weight(linear_of((48, 256), *reversed(pieces), bias=bias))
        assert isinstance(w, JoinedLinear)
        assert [(p.type, p.rows) for p in w.parts] == [("Q4_K", 32), ("Q6_K", 16)]
        assert [ops.forms_of(part)[0][0] for part in w.parts] == ["Q4_K", "Q6_K"]
        assert not ops.forms_of(w)
        torch.testing.assert_close(ops.linear(x, w), x @ dense.T + bias, rtol=1e-5, atol=1e-4)


def split_of(tile):
    """Sums of parts of K, which the last thread block adds."""
    raw, values = blocks_and_values("Q5_K", 64, 1024)
    ops = TritonOps()
    w = ops.pack_weight(linear_of((64, 1024), BlockRows(type="Q5_K", blocks=raw, start=0)))
    x = torch.randn(5, 1024)
    y = kernels.linear(x, w, ops._scratch[CPU], tile=tile)
    torch.testing.assert_close(y, x @ values.T, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("splits", [1, 2, 3, 4])
def test_sums_over_parts_of_the_inputs_are_added(splits):
    split_of((8, 32, splits, 2, 1))


def mixture(ops, types, spec, hidden):
    """Experts whose up and down have these types, and the same with the values as dense weights."""
    count, width = spec.num_experts, spec.expert.intermediate_size
    made, dense = [], []
    for i, (kind, (rows, inner)) in enumerate(
        zip(types, ((2 * width, hidden), (hidden, width)), strict=True)
    ):
        if kind == "F32":
            own = torch.randn(count * rows, inner) * 0.1
            made.append(ops.quantize_experts(own, num_experts=count))
        else:
            raw, own = blocks_and_values(kind, count * rows, inner, i)
            piece = BlockRows(type=kind, blocks=raw, start=0, copies=count)
            made.append(
                ops.pack_experts(linear_of((count * rows, inner), piece), num_experts=count)
            )
        dense.append(Linear(weight=own))
    return Experts(*made, spec), Experts(*dense, spec)


OF_TWO = MoESpec(
    num_experts=8,
    num_experts_per_token=2,
    expert=DenseSpec(intermediate_size=256, activation="silu", gated=True),
    normalize=True,
)


@pytest.mark.parametrize("types", [("Q4_K", "Q6_K"), ("IQ3_S", "F32"), ("MXFP4", "MXFP4")])
@pytest.mark.parametrize("num_tokens", [1, 24])
def test_experts_in_a_type_of_their_own(types, num_tokens):
    ops = TritonOps()
    experts, dense = mixture(ops, types, OF_TWO, 256)
    x, logits = torch.randn(num_tokens, 256) * 0.1, torch.randn(num_tokens, 8)
    wanted = ReferenceOps().moe(x, logits, dense)
    found = ops.moe(x, logits, experts)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("types", [("Q4_K", "Q6_K"), ("IQ3_S", "F32")])
def test_a_tokens_experts_in_ggufs_types_are_the_same_whatever_their_load(types):
    ops = TritonOps(deterministic=True)
    experts, dense = mixture(ops, types, OF_TWO, 256)
    x, logits = torch.randn(260, 256) * 0.1, torch.randn(260, 8)
    whole = ops.moe(x, logits, experts)
    wanted = ReferenceOps().moe(x, logits, dense)
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    for first, end in ((0, 1), (3, 6), (20, 60)):
        rows = slice(first, end)
        assert torch.equal(ops.moe(x[rows], logits[rows], experts), whole[rows])


def test_experts_whose_rows_have_several_types_are_expanded():
    pieces, dense = [], torch.empty(2, 24, 256)
    for start, (kind, rows) in zip((0, 8), (("Q4_K", 8), ("Q6_K", 16)), strict=True):
        raw, own = blocks_and_values(kind, 2 * rows, 256)
        pieces.append(BlockRows(type=kind, blocks=raw, start=start, copies=2))
        dense[:, start : start + rows] = own.view(2, rows, 256)
    w = TritonOps().pack_experts(linear_of((48, 256), *pieces), num_experts=2)
    assert torch.equal(w.weight, dense.flatten(0, 1))


KINDS = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "IQ4_XS", "attn_output": "Q5_0"}


def write_llama(path, *, tied: bool, kinds=KINDS, **sizes):
    """A tiny model whose tensors have types as Q4_K_M mixes them: by a part of their name."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, **sizes}
    tiny_models.write(path / "hf", "llama", **sizes, tie_word_embeddings=tied)
    spec, tensors = read_spec(path / "hf").spec, {}
    shapes = parameters(spec)
    for i, (name, place) in enumerate(find_gguf_family("llama").gguf.names(spec).items()):
        if place.target not in shapes:
            continue
        rows, *inner = shapes[place.target]
        rows = rows if place.rows is None else place.rows
        if not inner:
            tensors[name] = np.ones(rows), "F32"
            continue
        kind = next((own for part, own in kinds.items() if part in name), "Q4_K")
        raw, values = blocks_and_values(kind, rows, *inner, i)
        scale = np.float16(0.05 / float(values.std()))
        for at in BY_NAME[kind].halves:
            blocks = raw.reshape(-1, BY_NAME[kind].block_bytes)
            d = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
            blocks[:, at : at + 2] = (d * scale).view(np.uint8)
        tensors[name] = raw, kind
    a = spec.layers[0].attention
    metadata = {
        "block_count": 2, "embedding_length": sizes["hidden_size"], "feed_forward_length": sizes["intermediate_size"],
        "context_length": 128, "attention.key_length": a.head_dim, "attention.value_length": a.head_dim,
        "attention.head_count": a.num_heads, "attention.head_count_kv": a.num_kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": spec.vocab_size,
    }  # fmt: skip
    write(path / "model.gguf", tensors, **{f"llama.{k}": v for k, v in metadata.items()})
    return path / "model.gguf"


@pytest.mark.parametrize("tied", [True, False])
def test_model_in_mixed_types_has_the_logits_of_its_values(tmp_path, tied):
    path = write_llama(tmp_path, tied=tied)
    wanted = run(load_model(path, ops=ReferenceOps(), device=CPU, dtype=torch.float32), TOKENS)
    made = load_model(path, ops=TritonOps(), device=CPU, dtype=torch.float32)
    forms = {form.name for form in made.forms}
    assert {"Q4_K", "Q6_K", "Q5_0"} <= forms
    found = run(made, TOKENS, (5, 1, 2))
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


PROGRAM = """
import slipstream.kernels.triton.products.gguf as g
from slipstream.kernels.triton.products.split_k import ArrivalCounters
from slipstream.kernels.triton.products.gguf_packing import empty

g._linear_kernel = Compiled(g._linear_kernel)
g.pdl_options = lambda _: {"PDL": True, "launch_pdl": True}
found = []
for kind in sys.argv[2:]:
    w = empty(kind, 4096, 4096, torch.device("cpu"), torch.bfloat16, None)
    x = torch.zeros(int(sys.argv[1]), 4096, dtype=torch.bfloat16)
    g.linear(x, w, ArrivalCounters(torch.device("cpu")))
    binary = g._linear_kernel.binaries[-1]
    found.append([binary.metadata.shared, binary.asm["ttgir"].count("convert_layout"), binary.asm["sass"].count("MMA")])
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 256])
def test_kernels_compile_for_hopper_and_keep_sums_where_they_are_made(num_tokens):
    kinds = list(FORMS) if num_tokens == 1 else ["Q4_K", "Q6_K"]
    for shared, converts, products in run_for_hopper(PROGRAM, str(num_tokens), *kinds):
        assert shared < 227 * 1024
        assert converts <= 2  # of the result alone
        assert products > 0


def executed(text: str, inputs: list[int], num_outputs: int) -> list[int]:
    """PTX on 32-bit registers, as the chip executes it: outputs, then inputs, by number."""
    values = dict(enumerate([0] * num_outputs + inputs))

    def read(word: str) -> int:
        if word[0] == "$":
            return values[int(word[1:])]
        return values[word] if word[0].isalpha() else int(word, 0)

    for line in text.replace("{", "").replace("}", "").split(";"):
        name, *rest = line.split(maxsplit=1) or [""]
        if not rest or name == ".reg":
            continue
        out, *given = (word.strip() for word in rest[0].split(","))
        a, *others = map(read, given)
        match name:
            case "mov.b32":
                made = a
            case "and.b32":
                made = a & others[0]
            case "shr.b32":
                made = a >> others[0]
            case "shl.b32":
                made = a << others[0] & 0xFFFFFFFF
            case "lop3.b32":
                assert others[2] == 0xEA
                made = a & others[0] | others[1]
            case "prmt.b32":
                octets = (others[0] << 32 | a).to_bytes(8, "little")
                picked = [others[1] >> 4 * i & 15 for i in range(4)]
                assert max(picked) < 8
                made = int.from_bytes(bytes(octets[i] for i in picked), "little")
        values[int(out[1:]) if out[0] == "$" else out] = made
    return [values[i] for i in range(num_outputs)]


@pytest.mark.parametrize("kind", FORMS)
def test_instructions_give_the_numbers_of_a_units_codes(kind):
    """Codes' numbers, or 128 plus the code, of four neighbouring words."""
    text, registers = kernels._instructions(kind)
    if not text:
        return
    form = FORMS[kind]
    rng = np.random.default_rng(0)
    low = rng.integers(0, 2 ** (32 if form.bits >= 4 else 16), 4, dtype=np.uint64)
    more = rng.integers(0, 2 ** (16 if form.bits == 6 else 8), 4, dtype=np.uint64)
    kinds = np.uint32 if form.bits >= 4 else np.uint16
    inputs = low.astype(kinds).view(np.uint32).tolist()
    if form.bits in (3, 5, 6):
        inputs += more.astype(np.uint16 if form.bits == 6 else np.uint8).view(np.uint32).tolist()
    assert registers.count("r") == 16 + len(inputs)
    outputs = np.array(executed(text, inputs, 16), np.uint32).view(np.int16).reshape(8, 4)
    found = torch.from_numpy(outputs).view(torch.bfloat16).float().numpy()
    for i in range(8):
        width = 4 if form.bits >= 4 else 2
        code = (low >> np.uint64(width * i)) & np.uint64(2**width - 1)
        if form.bits in (3, 5, 6):
            above = 2 if form.bits == 6 else 1
            code |= ((more >> np.uint64(above * i)) & np.uint64(2**above - 1)) << np.uint64(width)
        wanted = gguf_codes.book(form)[code] if form.book != "linear" else code + 128.0
        np.testing.assert_array_equal(found[i], wanted)
