"""Lowers a recording of ops to the operators of a C++ program, with fusion. Nothing here imports
torch.

`lower` walks the recording once. It chooses a buffer for each value and decides what is fused; a
`ProgramEmitter` writes the operators.

Fusions:

1. A product whose result is only added to a sum adds into that sum's buffer. So do embeddings of
   positions and mixtures of experts.
2. Gate and up are one product, with their activation as its epilogue.
3. Norms, activations and gathers write the form that the next product reads (`FORM_*` of
   `kernels.cpu.native`). If their readers want several forms they write float32, which is converted
   once for each other form.

A buffer can take another value after the last read of its current one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from slipstream.kernels.layouts import norm_parts
from slipstream.kernels.tracing.recording import Op, Refused, Value
from slipstream.spec.model import Activation, ClampedSilu, DenseSpec, OwnActivation, OwnNorm
from slipstream.spec.reason import Reason

if TYPE_CHECKING:
    from slipstream.kernels.cpu.program.emitter import ProgramEmitter

F32 = 0
"""Copy of `native.FORM_F32`."""

LACKS = {
    "embed_token_types": "the C++ program has no embeddings of token types",
    "softcap": "the C++ program has no soft cap of hidden states",
}
"""Ops that a C++ program can't have, with the reasons."""

SUM = "the C++ program has no sum of two normed results (a branch without a norm before it)"


class DryEmitter:
    """An emitter that writes nothing: with it `lower` only tests whether a model can be lowered."""

    def __init__(self) -> None:
        self._num_buffers = 0

    def buffer(self, form: int, size: int, rows_a_token: int = 1) -> int:
        self._num_buffers += 1
        return self._num_buffers - 1

    def bound(self) -> int:
        return self.buffer(F32, 0)

    def form(self, w: Any) -> int:
        return F32

    def gates(self, w: Any) -> bool:
        return False

    def experts(
        self, x: int, logits: int, counts: int, experts: Any, scratch: ScratchBuffers
    ) -> int:
        return scratch("results", F32, 0, 1)

    def __getattr__(self, operator: str) -> Callable[..., None]:
        return lambda *given, **named: None


Emitter: TypeAlias = "ProgramEmitter | DryEmitter"
"""Writes operators of a program. Buffers are numbers, -1 for none; forms are `native.FORM_*`."""


class ScratchBuffers:
    """Gives an op temporary buffers, which are free again when the op is written.

    Called as (name, form, size, rows per token) → a buffer.
    """

    def __init__(self, lowering: Lowering) -> None:
        self._lowering = lowering
        self.taken: list[Buffer] = []

    def __call__(self, name: str, form: int, size: int, rows_a_token: int = 1) -> int:
        self.taken.append(self._lowering.new(form, size, rows_a_token))
        return self.taken[-1].number

    def take(self, number: int) -> Buffer:
        """Keeps this buffer: it is no longer freed with the temporary ones."""
        found = next(b for b in self.taken if b.number == number)
        self.taken.remove(found)
        return found

    def free(self) -> None:
        for buffer in self.taken:
            self._lowering.free(buffer)
        self.taken.clear()


@dataclass(slots=True, eq=False)
class Buffer:
    number: int
    form: int
    size: int
    rows_a_token: int = 1
    bound: bool = False
    values: set[int] = field(default_factory=set)  # the values in it that will be read again


@dataclass(frozen=True, slots=True)
class Stored:
    """A value of the recording that is stored in a buffer."""

    buffer: Buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (self.buffer,)


@dataclass(frozen=True, slots=True)
class Added:
    """A value that has no buffer of its own: it was added into another value's."""

    into: Buffer
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Routed:
    """The results of a token's experts, not yet summed."""

    results: Buffer

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (self.results,)


@dataclass(frozen=True, slots=True)
class Weighed:
    """The value x · sigmoid(weight), whose multiplication is postponed. Without x it is the sigmoid
    alone."""

    weight: Buffer
    x: Buffer | None = None

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (self.weight,) if self.x is None else (self.x, self.weight)


@dataclass(frozen=True, slots=True)
class Columns:
    """A value that is columns of a buffer, from `start` on. As the value of a sigmoid they stand
    for their sigmoids, which are computed later."""

    buffer: Buffer
    start: int = 0

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (self.buffer,)


Place: TypeAlias = Stored | Added | Routed | Weighed | Columns


@dataclass(frozen=True, slots=True)
class Lowered:
    """The buffers of a lowered program.

    `given` is that of the value that the caller binds before a run, if any. `out` is the result's,
    and `more` those of further results. `counts` has, by layer, the counters of tokens by expert.
    Tokens are counted only while it is bound.
    """

    given: int | None
    out: int | None
    counts: dict[int, int]
    more: tuple[int, ...] = ()


def lower(
    ops: Sequence[Op],
    given: Value | None,
    result: Value | None,
    emit: Emitter,
    more: Sequence[Value] = (),
) -> Lowered | Reason:
    """Writes `ops` with `emit`. `given` is the program's input; `result` and copies of `more` go to
    the caller.

    Returns a `Reason` if the program lacks something.
    """
    try:
        return Lowering(sums_of_norms(ops), given, result, emit, more).run()
    except Refused as refused:
        return refused.reason


def sums_of_norms(ops: Sequence[Op]) -> list[Op]:
    """Returns the ops without sums that a later norm makes from the same two values.

    The ops that read such a sum are moved after the norm. So a tap between layers costs no sum, and
    a product can still add into the residual.
    """
    norms = {op.inputs: op for op in reversed(ops) if op.name == "norm" and len(op.inputs) == 2}
    same: dict[int, Value] = {}  # sums that a norm makes
    late: dict[int, list[Op]] = {}  # by a norm's sum: the ops that wait for it
    found: list[Op] = []
    for op in ops:
        if op.name == "add" and op.inputs in norms:
            same[op.out.index] = norms[op.inputs].outputs[1]
            late[same[op.out.index].index] = []
            continue
        inputs = tuple(same.get(x.index, x) for x in op.inputs)
        op = op if inputs == op.inputs else replace(op, inputs=inputs)
        waits = next(
            (key for key, ops_ in late.items() if any(_made(x, key, ops_) for x in inputs)), None
        )
        if waits is not None:
            late[waits].append(op)
            continue
        found.append(op)
        if op.name == "norm" and len(op.outputs) == 2:
            found += late.pop(op.outputs[1].index, [])
    return found


def _made(x: Value, total: int, waiting: Sequence[Op]) -> bool:
    """Tells whether `x` is available only after the sum `total`: it is the sum itself, or the result of a `waiting`
    op."""
    return x.index == total or any(x == out for op in waiting for out in op.outputs)


def refusal(head: Sequence[Op]) -> Reason | None:
    """Returns the reason why a program's hidden states can't become logits, or None. The logits'
    factor and soft cap are not part of the program."""
    names = [op.name for op in head]
    if names.count("linear") > 1:
        return Reason("embed_size: the C++ program has no projection after the last layer")
    unknown = set(names) - {"linear", "scale", "softcap"}
    return (
        Reason(f"the C++ program has no {min(unknown)} after the last layer") if unknown else None
    )


class Lowering:
    def __init__(
        self,
        ops: Sequence[Op],
        given: Value | None,
        result: Value | None,
        emit: Emitter,
        more: Sequence[Value] = (),
    ) -> None:
        self.ops, self.emit, self.result, self.more = ops, emit, result, more
        self.uses: dict[int, list[int]] = {}  # by value: the ops that read it
        for i, op in enumerate(ops):
            for x in op.inputs:
                self.uses.setdefault(x.index, []).append(i)
        self.places: dict[int, Place] = {}
        self.converted: dict[tuple[int, int], Buffer] = {}  # by value and form
        self.unused: dict[tuple[int, int, int], list[Buffer]] = {}
        self.counts: dict[int, int] = {}
        self.done: set[int] = set()  # ops fused into an earlier one
        self.at = 0
        self.given = None if given is None else Buffer(emit.bound(), F32, given.width, bound=True)
        self.out = None if result is None else Buffer(emit.bound(), F32, result.width, bound=True)
        if given is not None and self.given is not None:
            self.put(given, Stored(self.given))

    def run(self) -> Lowered:
        for at, op in enumerate(self.ops):
            self.at = at
            if self.at not in self.done:
                write = getattr(self, f"_{op.name}", None)
                if write is None:
                    raise Refused(LACKS.get(op.name, f"the C++ program has no {op.name}"))
                write(op)
            for x in (*op.inputs, *op.outputs):
                if not self.lives(x.index):
                    self._release(x.index)
        if self.result is not None and self.places.get(self.result.index) != Stored(self._out):
            raise Refused(
                "the C++ program has no sum after the last layer (a model without a final norm)"
            )
        copies = []
        for value in self.more:
            copies.append(self.emit.bound())
            self.emit.convert(self.stored(value).number, copies[-1], F32, value.width)
        given, out = (None if b is None else b.number for b in (self.given, self.out))
        return Lowered(given, out, self.counts, tuple(copies))

    # --- Buffers and values ---

    @property
    def _out(self) -> Buffer:
        assert self.out is not None
        return self.out

    def new(self, form: int, size: int, rows_a_token: int = 1) -> Buffer:
        if waiting := self.unused.get((form, size, rows_a_token)):
            return waiting.pop()
        return Buffer(self.emit.buffer(form, size, rows_a_token), form, size, rows_a_token)

    def free(self, buffer: Buffer) -> None:
        if not buffer.bound:
            self.unused.setdefault((buffer.form, buffer.size, buffer.rows_a_token), []).append(
                buffer
            )

    def put(self, value: Value, place: Place) -> None:
        self.places[value.index] = place
        for buffer in place.buffers:
            buffer.values.add(value.index)

    def lives(self, value: int) -> bool:
        """Tells whether the value is read after this op."""
        return (
            self._is_result(value)
            or self._is_kept(value)
            or any(i > self.at for i in self.uses.get(value, ()))
        )

    def _is_result(self, value: int) -> bool:
        return self.result is not None and value == self.result.index

    def _is_kept(self, value: int) -> bool:
        return any(value == more.index for more in self.more)

    def _release(self, value: int) -> None:
        found = [self.converted.pop(key) for key in [k for k in self.converted if k[0] == value]]
        place = self.places.get(value)
        for buffer in (*found, *(() if place is None else place.buffers)):
            if value in buffer.values:
                buffer.values.remove(value)
                if not buffer.values:
                    self.free(buffer)

    def stored(self, value: Value, form: int = F32) -> Buffer:
        """Returns the buffer that has the value in that form."""
        place = self.places.get(value.index)
        if not isinstance(place, Stored):
            raise Refused(SUM)
        buffer = place.buffer
        if buffer.form == form:
            return buffer
        if buffer.form != F32:
            raise Refused(
                "the C++ program has no product of rows that were quantized for another one"
            )
        known = self.converted.get((value.index, form))
        if known is None:
            known = self.converted[value.index, form] = self.new(form, value.width)
            known.values.add(value.index)
            self.emit.convert(buffer.number, known.number, form, value.width)
        return known

    def form_for(self, value: Value) -> int:
        """Returns the format that all readers of the value want; float32 if they want different
        ones."""
        if self._is_result(value.index) or self._is_kept(value.index):
            return F32
        readers = [self.ops[i] for i in self.uses.get(value.index, ())]
        forms = {self.emit.form(r.arguments["w"]) if r.name == "linear" else F32 for r in readers}
        return forms.pop() if len(forms) == 1 else F32

    def target(self, value: Value) -> tuple[int, bool]:
        """Returns the buffer to which an op writes the value in float32, and whether it adds to the
        buffer's value."""
        if (into := self._sum_of(value)) is not None:
            self.put(value, Added(into))
            return into.number, True
        buffer = self._out if self._is_result(value.index) else self.new(F32, value.width)
        self.put(value, Stored(buffer))
        return buffer.number, False

    def _sum_of(self, value: Value) -> Buffer | None:
        """Returns the buffer of the sum that the value is added to.

        None if something else reads the value, or reads that buffer before the addition.
        """
        uses = self.uses.get(value.index, [])
        if len(uses) != 1 or self._is_result(value.index) or self._is_kept(value.index):
            return None
        reader = self.ops[uses[0]]
        if len(reader.inputs) != 2:
            return None
        if reader.name == "add":
            other = reader.inputs[reader.inputs[0] == value]
        elif reader.name in ("norm", "added") and reader.x == value:
            other = reader.inputs[1]
        else:
            return None
        place = self.places.get(other.index)
        if not isinstance(place, Stored):
            return self._sum_of(reader.out) if reader.name == "add" else None
        others = [i for i in self.uses[other.index] if i > self.at and i != uses[0]]
        wanted = self._is_result(other.index) or self._is_kept(other.index)
        alone = place.buffer.values == {other.index} and not others and not wanted
        return place.buffer if alone and place.buffer.form == F32 else None

    # --- Ops ---

    def _embed(self, op: Op) -> None:
        buffer, accumulate = self.target(op.out)
        self.emit.embed(buffer, False, 0, op.arguments["table"], op.arguments["scale"], accumulate)

    def _embed_positions(self, op: Op) -> None:
        buffer, accumulate = self.target(op.out)
        self.emit.embed(
            buffer, True, op.arguments["offset"], op.arguments["table"], 1.0, accumulate
        )

    def _norm(self, op: Op) -> None:
        if isinstance(op.arguments["norm"].kind, OwnNorm):
            raise Refused("the C++ program can't call a norm from outside (OwnNorm)")
        if op.out.inputs is not None:
            raise Refused(f"the C++ program has no rows in the form {op.out.inputs!r}")
        place, residual, form = self.places[op.x.index], -1, self.form_for(op.out)
        if len(op.inputs) == 1:
            x = self.stored(op.x)
        else:
            total = self.stored(op.inputs[1])  # x + residual is left there
            if place == Added(total):
                x = total
            else:
                x, residual = self.stored(op.x), total.number
                if any(self.lives(v) for v in total.values):
                    raise Refused(
                        "the C++ program keeps no residual that is read again after an addition"
                    )
            self.put(op.outputs[1], Stored(total))
        dies = not any(self.lives(v) for v in x.values) and (x.size, form, residual) == (
            op.out.width,
            F32,
            -1,
        )
        out = (
            self._out
            if self._is_result(op.out.index)
            else x
            if dies
            else self.new(form, op.out.width)
        )
        self.put(op.out, Stored(out))
        self.emit.norm(x.number, residual, out.number, form, op.out.width, op.arguments["norm"])

    def _added(self, op: Op) -> None:
        """Adds the operator (a + b) · factor, which overwrites b's buffer."""
        total, place = self.stored(op.inputs[1]), self.places[op.x.index]
        if any(self.lives(v) for v in total.values):
            raise Refused("the C++ program keeps no value that is read again after an addition")
        x = -1 if place == Added(total) else self.stored(op.x).number
        self.put(op.out, Stored(total))
        self.emit.sum(x, total.number, op.out.width, op.arguments["factor"])

    def _layer_inputs(self, op: Op) -> None:
        rows, given = self.stored(op.x), op.arguments
        if given["limit"] is not None:
            raise Refused(
                "the C++ program has no table for layers that is shorter than the vocabulary"
            )
        self.put(op.out, Stored(rows))
        self.emit.layer_inputs(
            rows.number, given["table"], given["norm"], given["scale"], given["factor"]
        )

    def _gated_by(self, op: Op) -> None:
        x, inputs = (self.stored(v).number for v in op.inputs)
        self._activated(
            op,
            lambda out, form, act: self.emit.gated_by(
                x, inputs, out, op.arguments["column"], form, act, op.out.width
            ),
        )

    def _place(self, op: Op) -> None:
        x = self.stored(op.x)
        out = self.new(F32, op.out.width) if len(op.inputs) == 1 else self.stored(op.inputs[1])
        self.put(op.out, Stored(out))
        self.emit.place(x.number, 0, out.number, op.arguments["column"], op.x.width)

    def _columns(self, op: Op) -> None:
        """Handles an op that takes columns of a value: it copies them, unless they are only read as
        gates."""
        x, start = self.stored(op.x), op.arguments["start"]
        if all(self.ops[i].name == "sigmoid" for i in self.uses.get(op.out.index, ())):
            self.put(op.out, Columns(x, start))
            return
        out = self.new(F32, op.out.width)
        self.put(op.out, Stored(out))
        self.emit.place(x.number, start, out.number, 0, op.out.width)

    def _side_by_side(self, op: Op) -> None:
        out, column = self.new(F32, op.out.width), 0
        for x in op.inputs:
            self.emit.place(self.stored(x).number, 0, out.number, column, x.width)
            column += x.width
        self.put(op.out, Stored(out))

    def _resized_heads(self, op: Op) -> None:
        raise Refused("the C++ program has no values narrower than keys")

    def _linear(self, op: Op) -> None:
        w = op.arguments["w"]
        x = self.stored(op.x, self.emit.form(w))
        uses = self.uses.get(op.out.index, [])
        reader = self.ops[uses[0]] if len(uses) == 1 else None
        if reader is not None and reader.arguments.get("gated") and self.emit.gates(w):
            self.done.add(uses[0])
            self._activated(
                reader, lambda out, form, act: self.emit.gated_linear(x.number, out, form, w, act)
            )
        else:
            out, accumulate = self.target(op.out)
            self.emit.linear(x.number, out, w, accumulate)

    def _activation(self, op: Op) -> None:
        x, gated = self.stored(op.x).number, op.arguments["gated"]
        self._activated(
            op, lambda out, form, act: self.emit.activation(x, out, form, act, gated, op.out.width)
        )

    def _activated(self, op: Op, write: Any) -> None:
        activation, form = _known(op.arguments["activation"]), self.form_for(op.out)
        out = self.new(form, op.out.width)
        self.put(op.out, Stored(out))
        write(out.number, form, activation)

    def _clip(self, op: Op) -> None:
        self.emit.scale(self._in_place(op), op.x.width, limit=op.arguments["limit"])

    def _scale(self, op: Op) -> None:
        self.emit.scale(self._in_place(op), op.x.width, factor=op.arguments["factor"])

    def _scale_queries(self, op: Op) -> None:
        table, size = op.arguments["table"], op.arguments["size"]
        self.emit.scale(self._in_place(op), size, table=table)

    def _norm_qk(self, op: Op) -> None:
        x, spec, column = self._in_place(op), op.arguments["spec"], 0
        for heads, which in ((spec.num_heads, "q_norm"), (spec.num_kv_heads, "k_norm")):
            parts, size, norm, step = norm_parts(spec, heads, op.arguments[which])
            self.emit.norm_parts(x, column, parts, size, norm, step)
            column += heads * spec.head_dim

    def _in_place(self, op: Op) -> int:
        """Reuses the input's buffer for the op's output, and returns its number. Refused if a later op reads the input."""
        x = self.stored(op.x)
        if any(self.lives(v) for v in x.values):
            raise Refused(f"the C++ program changes in place what is read again ({op.name})")
        self.put(op.out, Stored(x))
        return x.number

    def _rope_and_cache(self, op: Op) -> None:
        """Emits the rotation of queries and keys, and the writes of keys and values to the cache. The queries stay in place,
        at the beginning of the rows."""
        rows = self.stored(op.x)
        self.emit.rope_and_cache(
            rows.number, *_cache_of(op), op.arguments["heads"], has_queries=True
        )
        self.put(op.out, Stored(rows))

    def _cache_kv(self, op: Op) -> None:
        rows = self.stored(op.x).number
        self.emit.rope_and_cache(rows, *_cache_of(op), op.arguments["heads"], has_queries=False)

    def _attention(self, op: Op) -> None:
        q, kv, (num_heads, head_dim) = self.stored(op.x), op.arguments["kv"], op.out.shape
        out, sizes = self.new(F32, op.out.width), (num_heads, kv.num_kv_heads, head_dim, head_dim)
        self.put(op.out, Stored(out))
        self.emit.attention(q.number, out.number, *_cache_of(op), sizes, op.arguments["params"])

    def _bidirectional_attention(self, op: Op) -> None:
        self.emit.rope_and_cache(
            self.stored(op.x).number, *_cache_of(op), op.arguments["heads"], has_queries=True
        )
        self._attention(op)

    def _mla_attention(self, op: Op) -> None:
        q, row, *more = (self.stored(x).number for x in op.inputs)
        out, scratch = self.new(F32, op.out.width), ScratchBuffers(self)
        self.put(op.out, Stored(out))
        size, layer = op.x.shape[0] * op.inputs[1].width, op.arguments["kv"].layer
        chosen = (more[0], op.inputs[2].width) if more else None
        self.emit.mla_attention(
            q, row, out.number, layer, size, op.arguments["params"], scratch, chosen
        )
        scratch.free()

    def _choose_keys(self, op: Op) -> None:
        q, k, weights = (self.stored(x).number for x in op.inputs)
        out, scratch = self.new(F32, op.out.width), ScratchBuffers(self)  # int32, of the same size
        self.put(op.out, Stored(out))
        layer, params = op.arguments["kv"].layer, op.arguments["params"]
        self.emit.choose_keys(q, k, weights, out.number, layer, params, scratch)
        scratch.free()

    def _gated_delta(self, op: Op) -> None:
        gates, *more = (self.stored(y).number for y in op.inputs[1:])
        decay, z = more or (None, None)
        rows = self._overwritten(op.x), gates, decay, z
        with self._recurrence(op) as (out, scratch):
            self.emit.gated_delta(*rows, *out, op.arguments["params"], scratch)

    def _mamba2(self, op: Op) -> None:
        rows = self._overwritten(op.x)
        with self._recurrence(op) as (out, scratch):
            self.emit.mamba2(rows, *out, op.arguments["params"], scratch)

    def _short_conv(self, op: Op) -> None:
        rows = self.stored(op.x).number
        with self._recurrence(op) as (out, _):
            self.emit.short_conv(rows, *out, op.arguments["params"])

    def _causal_conv(self, op: Op) -> None:
        rows = self.stored(op.x).number
        with self._recurrence(op) as (out, _):
            self.emit.causal_conv(rows, *out, op.arguments["params"])

    def _selective_scan(self, op: Op) -> None:
        x, dt, b, c, xz = (self.stored(y).number for y in op.inputs)
        with self._recurrence(op) as (out, scratch):
            self.emit.selective_scan(x, dt, b, c, xz, *out, op.arguments["params"], scratch)

    def _overwritten(self, value: Value) -> int:
        """Returns the buffer of a value that an op overwrites."""
        buffer = self.stored(value)
        if any(self.lives(v) for v in buffer.values):
            raise Refused("the C++ program overwrites rows that are read again after a recurrence")
        return buffer.number

    @contextmanager
    def _recurrence(self, op: Op) -> Iterator[tuple[tuple[int, int, int], ScratchBuffers]]:
        """Context manager that yields (buffer, form, layer) of a recurrence's result, and its
        temporary buffers."""
        form, scratch = self.form_for(op.out), ScratchBuffers(self)
        out = self.new(form, op.out.width)
        self.put(op.out, Stored(out))
        yield (out.number, form, op.arguments["state"].layer), scratch
        scratch.free()

    def _moe(self, op: Op) -> None:
        results, scratch = self._results(op)
        uses = self.uses.get(op.out.index, [])
        reader = self.ops[uses[0]] if len(uses) == 1 else None
        if (
            reader is not None
            and reader.name == "add"
            and self._is_weighed(reader.inputs[reader.x == op.out])
        ):
            if op.arguments["experts"].spec.identity:
                raise Refused("the C++ program has no weighed expert next to identity experts")
            self.put(op.out, Routed(scratch.take(results)))
        else:
            self.emit.combine(results, *self._summed(op.out, -1, -1), self._kept(op))
        scratch.free()

    def _moe_and_shared(self, op: Op) -> None:
        results, scratch = self._results(op)
        (up, down), expert = op.arguments["shared"], op.arguments["experts"].spec.expert
        x, out = self.stored(op.x, self.emit.form(up)).number, scratch("shared", F32, op.out.width)
        self._mlp(x, up, down, expert, out, scratch)
        self.emit.combine(results, *self._summed(op.out, out, -1), self._kept(op))
        scratch.free()

    def _kept(self, op: Op) -> int:
        """Buffer of a mixture's input if identity experts return it, else -1."""
        spec = op.arguments["experts"].spec
        return self.stored(op.x).number if spec.identity and spec.adds_identity else -1

    def _results(self, op: Op) -> tuple[int, ScratchBuffers]:
        experts, scratch = op.arguments["experts"], ScratchBuffers(self)
        _known(experts.spec.expert.activation)
        if not experts.spec.has_usual_choice:
            raise Refused("the C++ program has no such choice of experts")
        x, logits = (self.stored(v).number for v in op.inputs)
        assert op.layer is not None
        counts = self.counts[op.layer] = self.emit.bound()
        return self.emit.experts(x, logits, counts, experts, scratch), scratch

    def _mlp(
        self, x: int, up: Any, down: Any, spec: DenseSpec, out: int, scratch: ScratchBuffers
    ) -> None:
        activation, form, size = _known(spec.activation), self.emit.form(down), down.weight.shape[1]
        inner = scratch("inner", form, size)
        if spec.gated and self.emit.gates(up):
            self.emit.gated_linear(x, inner, form, up, activation)
        else:
            wide = scratch("up", F32, up.out_features)
            self.emit.linear(x, wide, up, False)
            self.emit.activation(wide, inner, form, activation, spec.gated, size)
        self.emit.linear(inner, out, down, False)

    def _summed(self, value: Value, shared: int, weight: int) -> tuple[int, int, int, int, bool]:
        """Returns the arguments of `combine` for the sum of a mixture and its shared expert: (out,
        width, shared, weight, accumulate)."""
        out, accumulate = self.target(value)
        return out, value.width, shared, weight, accumulate

    def _is_weighed(self, value: Value) -> bool:
        return any(op.name == "mul" and op.out == value for op in self.ops[self.at :])

    def _sigmoid(self, op: Op) -> None:
        place = self.places.get(op.x.index)
        if not isinstance(place, Columns):
            place = Columns(self.stored(op.x))
        one = op.x.width == 1 and place.start == 0
        self.put(op.out, Weighed(place.buffer) if one else place)

    def _mul(self, op: Op) -> None:
        x, gate = self.stored(op.x), self.places[op.inputs[1].index]
        if isinstance(gate, Weighed):
            self.put(op.out, Weighed(gate.weight, x))
            return
        if not isinstance(gate, Columns) or op.x.width != op.inputs[1].width:
            raise Refused("the C++ program has no product of two results")
        form = self.form_for(op.out)
        out = self.new(form, op.out.width)
        self.put(op.out, Stored(out))
        self.emit.gate(x.number, gate.buffer.number, gate.start, out.number, form, op.out.width)

    def _add(self, op: Op) -> None:
        a, b = (self.places[x.index] for x in op.inputs)
        if isinstance(a, Routed) and isinstance(b, Weighed) and b.x is not None:
            self.emit.combine(
                a.results.number, *self._summed(op.out, b.x.number, b.weight.number), -1
            )
        elif isinstance(b, Added) and (a == b or isinstance(a, Stored)):
            self.put(op.out, a)
        elif isinstance(b, Stored) and isinstance(a, Added):
            self.put(op.out, b)
        else:
            x, into = (self.stored(v) for v in op.inputs)
            if any(self.lives(v) for v in into.values):
                x, into = into, x
            if any(self.lives(v) for v in into.values):
                raise Refused("the C++ program adds in place, and both numbers are read again")
            self.emit.sum(x.number, into.number, op.out.width, 1.0)
            self.put(op.out, Stored(into))


def _known(activation: Activation) -> Activation:
    if isinstance(activation, ClampedSilu):
        raise Refused("the C++ program has no clamped SiLU")
    if isinstance(activation, OwnActivation):
        raise Refused("the C++ program can't call an activation from outside (OwnActivation)")
    return activation


def _cache_of(op: Op) -> tuple[int, int]:
    """Returns the layer whose cache the op uses, and the group whose block tables it uses."""
    return op.arguments["kv"].layer, op.arguments["meta"].group
