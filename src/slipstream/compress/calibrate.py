"""Calibration: runs text through a model layer by layer, and collects statistics of the inputs of each linear
layer.

One layer's weights are in memory at a time. A layer runs with an op set that observes its calls, because the
decoder has no hooks. Between layers the hidden states of all windows stay on the device, or in host memory if
they are large. The `InputStats` of one linear layer take (number of inputs)² floats."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.plain.autograd import AutogradOps
from slipstream.kernels.positions import PositionTables
from slipstream.kernels.weights.forms import Activations, Linear
from slipstream.kernels.weights.quantize import numbers, quantize_rows
from slipstream.model.building import build_layer
from slipstream.model.decoder import Decoder
from slipstream.model.layers.attention import Attention
from slipstream.model.layers.feed_forward import MoE
from slipstream.model.layers.layer import Layer
from slipstream.model.load.weights import load_parameters
from slipstream.model.sequences import SequenceBatch, layer_output
from slipstream.spec.description import ModelDescription
from slipstream.spec.scheme import FORMAT_MAX, InputFormat

SAMPLE_ROWS = 1024
"""Number of input vectors of a linear layer stored as a sample, spread over the text."""

BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens computed together in a layer, by device; whole windows only."""

HELD_BYTES = 3 * 2**30
"""Maximum size in bytes of hidden states that stay on the GPU between layers; larger ones go to
host memory."""


@dataclass(slots=True)
class InputStats:
    """Statistics of a linear layer's inputs x. `hessian` is Σ x xᵀ, float32 [in, in]. `shift` is Σ
    (x° − x) xᵀ, where x° are the inputs in the original model; None if these were not observed."""

    hessian: Tensor
    absmax: Tensor  # [in]
    num_rows: int
    sample: Tensor  # [≤ SAMPLE_ROWS, in]
    shift: Tensor | None = None
    squares: Tensor | None = None  # Σ x² [in], in place of `hessian` if that is not needed

    @classmethod
    def empty(cls, inner: int, device: torch.device, *, products: bool = True) -> InputStats:
        zeros, side = torch.zeros(inner, device=device), inner if products else 0
        squares = None if products else torch.zeros(inner, device=device)
        hessian, sample = (
            torch.zeros(side, side, device=device),
            torch.empty(0, inner, device=device),
        )
        return cls(hessian, zeros, 0, sample, squares=squares)

    def add(self, x: Tensor, share: float, original: Tensor | None = None) -> None:
        """Add inputs x [T, in], and the original model's inputs x° of the same tokens. A fraction `share` of the rows goes
        to the sample."""
        x = x.float()
        if self.squares is None:
            self.hessian.addmm_(x.T, x)
        else:
            self.squares += x.square().sum(0)
        if original is not None:
            self.shift = torch.zeros_like(self.hessian) if self.shift is None else self.shift
            self.shift.addmm_((original.float() - x).T, x)
        self.absmax = torch.maximum(self.absmax, x.abs().amax(0))
        self.num_rows += len(x)
        keep = min(SAMPLE_ROWS - len(self.sample), max(1, round(len(x) * share)))
        if keep > 0 and len(x):
            at = torch.linspace(0, len(x) - 1, min(keep, len(x)), device=x.device).long()
            self.sample = torch.cat((self.sample, x[at]))

    @property
    def mean_square(self) -> Tensor:
        """The mean of x², [in]."""
        squares = self.hessian.diagonal() if self.squares is None else self.squares
        return squares / max(1, self.num_rows)

    def energy(self, weight: Tensor) -> float:
        """Σ |W x|² of a weight [out, in]: tr(W H Wᵀ), or without H an estimate by the sample. If W
        is a change of a weight, this is the squared error of the output."""
        if self.squares is not None:
            scale = self.num_rows / max(1, len(self.sample))
            return float((self.sample @ weight.T).square().sum()) * scale
        return float(((weight @ self.hessian) * weight).sum())

    def scaled(self, by: Tensor) -> InputStats:
        """Returns the statistics of the inputs multiplied by `by` [in]."""
        shift = None if self.shift is None else self.shift * by * by[:, None]
        hessian = self.hessian * by * by[:, None] if self.squares is None else self.hessian
        return InputStats(
            hessian,
            self.absmax * by,
            self.num_rows,
            self.sample * by,
            shift,
            None if self.squares is None else self.squares * by * by,
        )


@dataclass(frozen=True, slots=True)
class FakeInputs:
    """Quantizes a linear layer's inputs: each token with its own scale, or all with the given one. `columns` are not
    quantized."""

    form: InputFormat
    scale: float | None = None
    columns: tuple[int, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        if self.columns:
            at = torch.tensor(self.columns, device=x.device)
            return FakeInputs(self.form, self.scale)(x.index_fill(1, at, 0.0)).index_copy(
                1, at, x[:, at]
            )
        if self.scale is None:
            q = quantize_rows(x, self.form)
            return numbers(q).to(x.dtype)
        top = FORMAT_MAX[self.form]
        y = (x.float() / self.scale).clamp(-top, top)
        y = y.round() if self.form == "int8" else y.to(torch.float8_e4m3fn).float()
        return (y * self.scale).to(x.dtype)


@dataclass(frozen=True, slots=True)
class StraightThrough:
    """Quantizes inputs, and passes their gradients through unchanged."""

    fake: FakeInputs

    def __call__(self, x: Tensor) -> Tensor:
        return x + (self.fake(x.detach()) - x.detach())


class StopLayer(Exception):  # noqa: N818 (it is no error)
    """Raised to skip the rest of a layer once all inputs needed were observed."""


class ObservingOps(AutogradOps):
    """Ops that observe a layer. `watch` maps linear layers, by name in the layer, to functions that are
    called with their inputs. The layer stops after the linear layer `last`. `inputs` maps linear layers to
    functions that quantize their inputs. `on_cache` is called with the KV cache."""

    name = "observing"

    def __init__(
        self,
        watch: Mapping[str, Callable[[Tensor], None]] | None = None,
        *,
        last: str | None = None,
        inputs: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        on_cache: Callable[[LayerKV], None] | None = None,
    ) -> None:
        self._watch = watch or {}
        self._last = last
        self._inputs = inputs or {}
        self._on_cache = on_cache
        self._names: dict[int, str] = {}

    def bind(self, layer: Layer) -> None:
        """Record the address of each linear layer's weight, by which calls are identified. An expert's weight is a view of
        its layer's."""
        self._names = {w.data_ptr(): name for name, w in product_weights(layer)}

    def linear(self, x: Activations, w: Linear) -> Tensor:
        assert isinstance(x, Tensor)
        name = self._names.get(w.weight.data_ptr(), "")
        if name in self._watch:
            self._watch[name](x)
        if name and name == self._last:
            raise StopLayer
        fake = self._inputs.get(name.partition("@")[0])
        return super().linear(x if fake is None else fake(x), w)

    def attention(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        if self._on_cache is not None:
            self._on_cache(kv)
        return super().attention(q, kv, meta, params)


def product_weights(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the layer, weight) of all linear layers that may be quantized. Experts are separate, as
    "experts.up@3"."""
    if layer.attention is not None:
        assert isinstance(layer.attention, Attention), "`check_writable` refuses others"
        yield "attention.qkv", layer.attention.qkv.weight
        yield "attention.out", layer.attention.out.weight
    if layer.recurrent is not None:
        yield "recurrent.in", layer.recurrent.into.weight
        yield "recurrent.out", layer.recurrent.out.weight
    if layer.mlp is None:
        return
    if not isinstance(layer.mlp, MoE):
        yield "mlp.up", layer.mlp.up.weight
        yield "mlp.down", layer.mlp.down.weight
        return
    for part in ("up", "down"):
        whole = getattr(layer.mlp, part).weight
        for i, weight in enumerate(whole.chunk(layer.mlp.spec.num_experts)):
            yield f"experts.{part}@{i}", weight
    if layer.mlp.shared is not None:
        yield "shared.up", layer.mlp.shared.up.weight
        yield "shared.down", layer.mlp.shared.down.weight


class Stream:
    """Windows of text between two layers of a model. After i calls of `advance`, `states` are the inputs of layer i.

    Layers get their parameters by the names of `spec.parameters` without "layers.i.", in any dtype; they compute in `dtype`.
    """

    def __init__(
        self,
        description: ModelDescription,
        windows: Sequence[Sequence[int]],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.spec, self.device, self.dtype = description.spec, device, dtype
        longest = max(len(w) for w in windows)
        per_batch = max(1, BATCH_TOKENS[device.type] // longest)
        chunks = [windows[i : i + per_batch] for i in range(0, len(windows), per_batch)]
        self.batches = [SequenceBatch.of(chunk, device) for chunk in chunks]
        self.num_tokens = sum(len(w) for w in windows)
        self.tables = PositionTables(longest, device)
        num_bytes = self.num_tokens * self.spec.hidden_size * dtype.itemsize
        self.home = device if num_bytes <= HELD_BYTES else torch.device("cpu")
        ends = load_ends(description, device=device, dtype=dtype)
        with torch.no_grad():
            self.states = [ends.embedded(b.token_ids, b.meta).to(self.home) for b in self.batches]
        self.catch_up, self.original = 0.0, list[Tensor]()

    def keep_original(self, catch_up: float) -> None:
        """Store the original layers' outputs too from now on, if compressed layers compensate a
        fraction `catch_up` > 0 of the difference."""
        self.catch_up, self.original = catch_up, list(self.states) if catch_up else []

    def target_states(self) -> list[Tensor] | None:
        """Layer inputs whose original outputs are the target of learned rounding; None: use `states`."""
        if not self.catch_up:
            return None
        return [
            torch.lerp(now, was, self.catch_up)
            for now, was in zip(self.states, self.original, strict=True)
        ]

    def advance(
        self,
        index: int,
        parameters: Mapping[str, Tensor],
        inputs: Mapping[str, FakeInputs],
        load_original: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        """Run the compressed layer `index` with quantized inputs, and the original layer if its outputs are stored."""
        self.states = self.run(index, parameters, ObservingOps(inputs=inputs))
        if self.original:
            self.original = self.run(index, load_original(), ObservingOps(), self.original)

    def layer(self, index: int, parameters: Mapping[str, Tensor], ops: ObservingOps) -> Layer:
        """Build layer `index` with these parameters, and register its linear layers with `ops`."""
        own = {name: value.to(self.dtype) for name, value in parameters.items()}
        layer = build_layer(self.spec.layers[index], own, ops, self.tables)
        ops.bind(layer)
        return layer

    @torch.no_grad()
    def run(
        self,
        index: int,
        parameters: Mapping[str, Tensor],
        ops: ObservingOps,
        states: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Compute the outputs of layer `index` for `states`, or for its current inputs. A batch
        that stopped early returns its inputs."""
        return list(self._each(index, parameters, ops, self.states if states is None else states))

    def _each(
        self,
        index: int,
        parameters: Mapping[str, Tensor],
        ops: ObservingOps,
        states: Sequence[Tensor],
    ) -> Iterator[Tensor]:
        layer = self.layer(index, parameters, ops)
        for batch, state in zip(self.batches, states, strict=True):
            try:
                yield layer_output(layer, ops, state.to(self.device), batch).to(self.home)
            except StopLayer:
                yield state

    @torch.no_grad()
    def observe(
        self,
        index: int,
        parameters: Mapping[str, Tensor],
        products: Collection[str],
        *,
        inputs: Mapping[str, FakeInputs],
        original: Mapping[str, Tensor] | None = None,
        hessian: bool = True,
    ) -> dict[str, InputStats]:
        """Statistics of the inputs of `products` (linear layers), with experts by their own names;
        without `hessian` only magnitudes and a sample. If original outputs are stored and
        `original` has the layer's original parameters, `InputStats.shift` is computed too, except
        for experts, whose tokens differ."""
        stats: dict[str, InputStats] = {}
        theirs: dict[str, Tensor] = {}  # original inputs of one batch, by linear layer
        share = 2 * SAMPLE_ROWS / max(1, self.num_tokens)

        def watcher(name: str) -> Callable[[Tensor], None]:
            def see(x: Tensor) -> None:
                if name not in stats:
                    stats[name] = InputStats.empty(x.shape[1], x.device, products=hessian)
                stats[name].add(x, share, theirs.pop(name, None))

            return see

        names = [name for name, _ in product_weights(self.layer(index, parameters, ObservingOps()))]
        wanted = [name for name in names if name.partition("@")[0] in products]
        last = (
            wanted[-1]
            if wanted and "@" not in wanted[-1] and not wanted[-1].startswith("shared.")
            else None
        )
        watching = ObservingOps({n: watcher(n) for n in wanted}, last=last, inputs=inputs)
        ours = self._each(index, parameters, watching, self.states)
        if original is None or not self.original:
            deque(ours, maxlen=0)
            return stats
        paired = {n: partial(theirs.__setitem__, n) for n in wanted if "@" not in n}
        # Batch by batch, the original layer first, so that its inputs are known when the compressed layer's are observed.
        deque(
            zip(
                self._each(index, original, ObservingOps(paired, last=last), self.original),
                ours,
                strict=True,
            ),
            maxlen=0,
        )
        return stats

    def cache_range(self, index: int, parameters: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Maximum magnitude of keys and of values for each kv head, float32 [K] each."""
        seen: list[tuple[Tensor, Tensor]] = []

        def see(kv: LayerKV) -> None:
            seen.append((kv.k.float().abs().amax((0, 2, 3)), kv.v.float().abs().amax((0, 2, 3))))

        self.run(index, parameters, ObservingOps(on_cache=see, last="attention.out"))
        keys, values = zip(*seen, strict=True)
        return torch.stack(keys).amax(0), torch.stack(values).amax(0)


def load_layer(
    description: ModelDescription, index: int, device: torch.device
) -> dict[str, Tensor]:
    """Load a layer's parameters in float32, by their names in the layer."""
    prefix = f"layers.{index}."
    found = load_parameters(
        description, dtype=torch.float32, device=device, wanted=lambda n: n.startswith(prefix)
    )
    return {name.removeprefix(prefix): value for name, value in found.items()}


def load_ends(
    description: ModelDescription, *, device: torch.device, dtype: torch.dtype
) -> Decoder:
    """Loads the model without its layers: embeddings, last norm and output head."""
    own = load_parameters(
        description, dtype=dtype, device=device, wanted=lambda n: not n.startswith("layers.")
    )
    return Decoder(description.spec, own, AutogradOps(), max_model_len=1, layers=())
