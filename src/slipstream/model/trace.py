"""Records the ops of a model's step, by running the decoder's code on symbolic values. Nothing here
imports torch.

`trace` takes a built decoder, or one without weights (`named_decoder`); both give the same ops.
`covered` tells from a spec which fast implementations of a step support it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from slipstream.kernels.cpu.program.lowering import DryEmitter, lower, refusal
from slipstream.kernels.tracing.recording import (
    TOKENS,
    NamedWeight,
    Op,
    RecordingOps,
    TracedKV,
    TracedMeta,
    Value,
)
from slipstream.kernels.tracing.token_shape import match_layers, ranks_refusal, size_refusal
from slipstream.model.decoder import Decoder
from slipstream.model.layers.layer import Layer, run_layers
from slipstream.model.layers.residual import finished
from slipstream.spec.model import ModelSpec
from slipstream.spec.parameters import parameters
from slipstream.spec.reason import Reason

if TYPE_CHECKING:
    from slipstream.kernels.ops import OpSet


SPLIT = Reason(
    "the model is split over ranks, which sum up their parts between the products", notable=False
)
"""Reason why no program and no kernel runs a whole step of a model that is split over ranks."""

HOST_EXPERTS = Reason("the host computes experts between the products", notable=False)

INT4_CACHE = Reason("kv_cache_dtype='int4' is read by kernels of their own", notable=False)

ROUTED_EXPERTS = Reason("the experts of each token are noted between the products", notable=False)
STREAMED = Reason("layers are read as they are needed, between the products", notable=False)


@dataclass(frozen=True, slots=True)
class Trace:
    """The ops of one pass, in three parts.

    1. `embedding`: tokens → `embedded`.
    2. `body`: layers and final norm → `hidden`. For an encoder-decoder's encoder it ends when the
       keys and values of its states are cached.
    3. `head`: `hidden` → `logits`, if there is a head.

    `taken` is the state between layers that a draft head reads.
    """

    embedding: tuple[Op, ...]
    embedded: Value
    body: tuple[Op, ...]
    hidden: Value
    head: tuple[Op, ...] = ()
    logits: Value | None = None
    taken: Value | None = None

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.embedding + self.body + self.head


def trace(decoder: Decoder) -> Trace:
    """Records a step of a decoder or of an encoder."""
    recorder, view = _recorded(decoder)
    embedded, embedding = _embed(recorder, view)
    meta = view.with_inputs(cast("Any", TOKENS), cast("Any", embedded), TracedMeta())
    embedding += _taken(recorder)
    h, kv = (cast("Any", given) for given in (embedded, _caches(decoder)))
    hidden, tapped = view.run(h, kv, meta, lambda layer: _enter(recorder, layer, len(view.layers)))
    body, taken = _taken(recorder), None if view.tap is None else _value(tapped)
    if view.head is None:
        return Trace(embedding, embedded, body, _value(hidden), taken=taken)
    logits = view.logits(hidden)
    return Trace(embedding, embedded, body, _value(hidden), _taken(recorder), _value(logits), taken)


def trace_encoder(decoder: Decoder) -> Trace:
    """Records an encoder-decoder's encoder, and the caching of keys and values of its states for
    each decoder layer."""
    assert decoder.encoder is not None
    recorder, view = _recorded(decoder)
    made: Any = view.encoder_input if decoder.encoder.audio is None else view.embedded
    embedded, embedding = _value(made(TOKENS, TracedMeta())), _taken(recorder)
    caches = _caches(decoder)
    layers = decoder.encoder.layers
    pending, residual = _layers(recorder, view, layers, embedded, caches[:1] * len(layers))
    states = finished(view.ops, decoder.encoder.final_norm, pending, residual)
    view.remember(states, cast("Any", caches), cast("Any", TracedMeta()))
    return Trace(embedding, embedded, _taken(recorder), _value(states))


def named_decoder(spec: ModelSpec) -> Decoder:
    """Makes a decoder without weights; names and shapes stand in for them."""
    shapes = {
        name: shape for name, shape in parameters(spec).items() if not name.startswith("media.")
    }
    named: Any = {name: NamedWeight(name, shape) for name, shape in shapes.items()}
    return Decoder(spec, named, cast("OpSet", RecordingOps()), max_model_len=spec.max_position)


def covered(
    spec: ModelSpec, *, kernels: Literal["cpu", "triton"], num_ranks: int = 1
) -> dict[str, Reason | None]:
    """Maps each fast implementation of a step with these kernels to None, or the reason why it
    can't run the model.

    Assumes 16-bit weights and tensor parallelism over `num_ranks`. Weight formats and the device
    may still rule an implementation out.
    """
    decoder = named_decoder(spec)
    if kernels == "cpu":
        return {"program": program_refusal(decoder)}
    matched = match_layers(trace(decoder).body)
    if isinstance(matched, Reason):
        return {"one-token": matched}
    shape, layers = matched
    if num_ranks > 1 and (reason := ranks_refusal(shape)) is not None:
        return {"one-token": reason}
    rotary = None if layers[0].cos_sin is None else layers[0].cos_sin.shape[1]
    return {"one-token": size_refusal(shape, 16, rotary)}


def program_refusal(decoder: Decoder) -> Reason | None:
    """The reason why the C++ program can't run this model, whatever its weights; None if it can."""
    step = trace(decoder)
    if (reason := refusal(step.head)) is not None:
        return reason
    found = lower(
        *lowered_part(decoder.spec, step), DryEmitter(), () if step.taken is None else (step.taken,)
    )
    if not isinstance(found, Reason) and decoder.encoder is not None:
        encoder = trace_encoder(decoder)
        found = lower(encoder.body, encoder.embedded, None, DryEmitter())
    return found if isinstance(found, Reason) else None


def lowered_part(spec: ModelSpec, step: Trace) -> tuple[tuple[Op, ...], Value | None, Value]:
    """The part of a step that the C++ program computes: (ops, input, output).

    An encoder's embeddings are computed outside it, since they take little time compared with the
    layers.
    """
    if spec.is_encoder:
        return step.body, step.embedded, step.hidden
    return step.embedding + step.body, None, step.hidden


# --- Helpers ---


def _recorded(decoder: Decoder) -> tuple[RecordingOps, Decoder]:
    recorder = RecordingOps()
    return recorder, decoder.with_ops(cast("OpSet", recorder))


def _caches(decoder: Decoder) -> list[TracedKV]:
    return [
        TracedKV(i, 0 if layer.attention is None else layer.attention.spec.num_kv_heads)
        for i, layer in enumerate(decoder.layers)
    ]


def _embed(recorder: RecordingOps, view: Decoder) -> tuple[Value, tuple[Op, ...]]:
    embedded = view.embedded(cast("Any", TOKENS), cast("Any", TracedMeta()))
    return _value(embedded), _taken(recorder)


def _layers(
    recorder: RecordingOps,
    view: Decoder,
    layers: Sequence[Layer],
    embedded: Value,
    caches: Sequence[TracedKV],
) -> tuple[Any, Any]:
    """Runs the layers, each recorded under its index, and returns their output."""

    def before(index: int, *_: object) -> None:
        _enter(recorder, index, len(layers))

    h, kv, meta = (cast("Any", given) for given in (embedded, caches, TracedMeta()))
    return run_layers(view.ops, layers, h, kv, meta, before)


def _enter(recorder: RecordingOps, layer: int, num_layers: int) -> None:
    recorder.layer = layer if layer < num_layers else None


def _taken(recorder: RecordingOps) -> tuple[Op, ...]:
    """The ops recorded since the last call."""
    found = tuple(recorder.ops)
    recorder.ops.clear()
    return found


def _value(x: object) -> Value:
    assert isinstance(x, Value)
    return x
