"""An update of the model's weights in this process: pieces arrive, then all weights are written, or none.

1. `BeginWeights` raises an error for a format that can't be written in place, and for declared tensors
   that don't fit the model: unknown or missing ones, or those of another shape.
2. Pieces are recorded. Tensors of this process are copied, since a trainer goes on to change them; files, and
   a trainer's GPU memory, are read when the weights are built. A piece that fails is dropped whole.
3. `CheckWeights` builds all weights once without writing.
4. `WriteWeights` builds them again, module by module, and overwrites the running model's.

An error in steps 1 to 3 leaves the old weights. One in step 4 should not happen; it leaves a mix, and the
engine then takes no requests. No torch: it is loaded for pieces that need it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import CheckpointError, ConflictError, RequestError
from slipstream.messages.weight_ops import (
    DTYPES,
    BeginWeights,
    BroadcastPiece,
    CheckWeights,
    DropPiece,
    DropWeights,
    FilePiece,
    FolderPiece,
    IpcPiece,
    JoinWeightGroup,
    LeaveWeightGroup,
    SumWeights,
    TensorInfo,
    WeightsOp,
    WriteWeights,
)
from slipstream.messages.weights import GivenPiece
from slipstream.model.load.checkpoint import finder, names_of
from slipstream.model.load.refill import Refill, checksums, refusal
from slipstream.model.stored.parts import Stored
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.parameters import Integers
from slipstream.spec.scheme import SCHEMES, Scheme
from slipstream.worker.weights.pieces import Came, broadcast_tensors, file_tensors, kept_tensors

if TYPE_CHECKING:
    from slipstream.worker.loaded_runner import LoadedRunner
    from slipstream.worker.weights.group import WeightGroup


class WeightUpdates:
    """Updates of a loaded model, one at a time, and the groups in which tensors are broadcast."""

    def __init__(self, loaded: LoadedRunner) -> None:
        self._loaded = loaded
        self._groups: dict[str, WeightGroup] = {}
        self._begun: BeginWeights | None = None
        self._declared: dict[str, TensorInfo] = {}
        self._given: dict[str, Stored] = {}
        self._folder: Path | None = None
        self._last: dict[str, Stored] | None = None  # tensors of the last piece; empty for a folder
        self._refill: Refill | None = None

    def do(self, op: WeightsOp | GivenPiece) -> dict[str, str] | None:
        """Run one operation of an update. Returns the checksums, if it has any.

        RequestError or CheckpointError if it is not possible; then nothing has changed.
        """
        match op:
            case JoinWeightGroup():
                self._join(op)
            case LeaveWeightGroup():
                self._group(op.name).close()
                del self._groups[op.name]
            case BeginWeights():
                self._begin(op)
            case CheckWeights():
                made = self._made()
                made.check()
                self._refill = made
            case WriteWeights():
                assert self._refill is not None
                self._refill.write()
                self._forget()
                self._loaded.weights_written()
                return checksums(self._loaded.model.decoder)
            case DropWeights():
                self._forget()
            case DropPiece():
                self._drop_piece()
            case SumWeights():
                return checksums(self._loaded.model.decoder)
            case _:
                self._take(op)
        return None

    # --- Groups ---

    def _join(self, op: JoinWeightGroup) -> None:
        if op.name in self._groups:
            message = f"group {op.name!r} is joined already; destroy it first"
            raise RequestError(message, field="group_name")
        try:
            from slipstream.worker.weights.group import WeightGroup
        except ImportError:
            raise RequestError(
                "a broadcast of weights needs torch in the engine's process; send them by a folder or as tensors",
                field="backend",
            ) from None
        rank, size = op.rank_offset, op.world_size
        device = self._loaded.platform.device
        self._groups[op.name] = WeightGroup(
            op.address, op.port, rank, size, name=op.name, backend=op.backend, device=device
        )

    def _group(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise RequestError(
                f"no group {name!r} is joined; init_weight_transfer_engine joins one",
                field="group_name",
            )
        return self._groups[name]

    # --- An update ---

    def _begin(self, op: BeginWeights) -> None:
        if self._begun is not None:
            raise ConflictError("an update is under way; finish or abort it first")
        loaded = self._loaded
        if loaded.model.tower is not None:
            why: str | None = (
                "an encoder of pictures or sounds can't be updated; start with max_images=0"
            )
        else:
            why = refusal(loaded.model.decoder)
        if why is not None:
            raise RequestError(f"weights can't change in place: {why}")
        if op.tensors is not None:
            declared = {info.name: info for info in op.tensors}
            if len(declared) != len(op.tensors):
                raise RequestError("a name is there twice", field="names")
            if not declared:
                raise RequestError("no tensors are declared", field="names")
            # unknown or missing tensors, or those of another shape, are reported before a byte is sent
            self._weights([(i.name, i.shape, _unread(i.name)) for i in op.tensors])
            self._declared = declared
        self._begun = op

    def _take(self, op: WeightsOp | GivenPiece) -> None:
        self._last = None
        if self._begun is None:
            raise ConflictError("no update has begun; start_weight_update begins one")
        if self._folder is not None:
            raise RequestError("a folder has all tensors already; finish the update")
        as_value = self._loaded.as_value
        match op:
            case FolderPiece(path=path):
                if self._given or self._begun.tensors is not None:
                    raise RequestError("a folder has all tensors, and can't follow others")
                self._described(Path(path))  # raise errors now
                self._folder, self._last = Path(path), {}
                return
            case FilePiece(path=path):
                found: Iterable[Came] = file_tensors(Path(path), as_value)
            case GivenPiece(tensors=tensors):
                found = kept_tensors(tensors, as_value)
            case BroadcastPiece():
                self._expect(op.tensors)
                group = self._group(op.group)
                if not 0 <= op.source < group.world_size or op.source == group.rank:
                    message = (
                        f"source {op.source} is no other member of a group of {group.world_size}"
                    )
                    raise RequestError(message, field="source")
                self._last = self._received(op, group)
                self._given.update(self._last)
                return
            case IpcPiece():
                from slipstream.worker.weights.ipc import opened

                self._expect(op.tensors)
                found = opened(op, self._loaded.platform)
            case _:
                raise AssertionError(op)
        self._last = self._collected(found)
        self._given.update(self._last)

    def _received(self, op: BroadcastPiece, group: WeightGroup) -> dict[str, Stored]:
        """Receive the tensors that a trainer broadcasts. After an error the trainer's next message
        is unknown, so the group is left."""
        try:
            return self._collected(broadcast_tensors(op, group, self._loaded.as_value))
        except Exception:
            del self._groups[op.group]
            group.close()
            raise

    def _collected(self, found: Iterable[Came]) -> dict[str, Stored]:
        """Collect the tensors of a piece by name. RequestError names one that does not fit the model."""
        came = list[Came]()
        for name, shape, kind, read in found:
            self._check_new(name, shape)
            came.append((name, shape, kind, read))
        self._check_types([(name, kind) for name, _, kind, _ in came])
        return {name: (name, shape, read) for name, shape, _, read in came}

    def _drop_piece(self) -> None:
        """Drop the last piece if this rank has accepted it, because another rank has not."""
        if self._last is not None:
            self._folder = None
            self._given = {n: x for n, x in self._given.items() if n not in self._last}
            self._last = None

    def _check_types(self, kinds: Sequence[tuple[str, str]]) -> None:
        """Check that weights have a dtype of `DTYPES`. Buffers that the model does not use may have
        any dtype."""
        if all(kind in DTYPES for _, kind in kinds):
            return
        dense = self._dense
        given = [(name, (), _unread(name)) for name, _ in kinds]
        find = finder(dense, names_of(dense, given))
        for name, kind in kinds:
            if kind in DTYPES or (place := find(name)) is None:
                continue
            if isinstance(place.transform, Integers) and kind in ("int32", "int64"):
                continue
            message = f"{name} is of {kind}; send one of {', '.join(DTYPES)}, or a whole checkpoint"
            raise RequestError(message, field=name)

    def _expect(self, tensors: Sequence[TensorInfo]) -> None:
        """Check tensors before a trainer's broadcast of them is received."""
        names = set[str]()
        for info in tensors:
            self._check_new(info.name, info.shape)
            if info.name in names:
                raise RequestError(f"the tensor {info.name!r} is there twice", field="names")
            names.add(info.name)
        # twice: tied weights may be sent under both of their names
        most = 2 * sum(map(math.prod, self._loaded.model.description.shapes.values()))
        if (count := sum(math.prod(info.shape) for info in tensors)) > most:
            message = f"the shapes have {count} numbers together, and the model about {most // 2}"
            raise RequestError(message, field="shapes")

    def _check_new(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self._given:
            raise RequestError(f"the tensor {name!r} has come already", field="names")
        if self._begun is None or self._begun.tensors is None:
            return
        declared = self._declared.get(name)
        if declared is None:
            raise RequestError(f"the tensor {name!r} was not declared", field="names")
        if declared.shape != tuple(shape):
            message = f"{name} was declared as {list(declared.shape)}, and is {list(shape)}"
            raise RequestError(message, field="shapes")

    def _forget(self) -> None:
        self._begun, self._folder, self._refill, self._last = None, None, None, None
        self._declared, self._given = {}, {}

    # --- The weights, built as by a load ---

    def _made(self) -> Refill:
        if self._begun is None:
            raise ConflictError("no update has begun; start_weight_update begins one")
        if self._folder is not None:
            description, by = self._described(self._folder)
            weights, scheme = self._loaded.weights_of(description, by, None)
        else:
            if missing := [name for name in self._declared if name not in self._given]:
                message = f"{len(missing)} declared tensors have not come: {missing[0]} …"
                raise RequestError(message, field="names")
            weights, scheme = self._weights([*self._given.values()])
        config, decoder = self._loaded.config.model, self._loaded.model.decoder
        return Refill(decoder, weights, max_model_len=config.max_model_len, scheme=scheme)

    def _weights(self, given: Sequence[Stored]) -> tuple[Any, Scheme | None]:
        """Build the weights of a dense checkpoint in transformers' names, whose tensors are `given`."""
        dense = self._dense
        return self._loaded.weights_of(dense, self._scheme(dense), given)

    @property
    def _dense(self) -> ModelDescription:
        own = self._loaded.model.description
        return dataclasses.replace(own, format="safetensors", quantization=None, gguf=None)

    def _described(self, folder: Path) -> tuple[ModelDescription, Scheme | None]:
        """Describe the folder's model, which must be the running one, and the scheme that quantizes it."""
        own = self._loaded.model.description
        most = None if own.spec.media is not None else 0
        found = read_spec(folder).taking_media(most)
        if found.spec != own.spec:
            field = _different(own.spec, found.spec)
            raise CheckpointError(
                f"{folder} is another model: its {field} differs from what runs", field=field
            )
        return found, self._scheme(found)

    def _scheme(self, found: ModelDescription) -> Scheme | None:
        """Scheme by which dense weights are quantized: the one set at the start, or else that of
        the checkpoint loaded then."""
        if found.quantization is not None and found.quantization.rounds:
            return None  # unchanged
        asked = self._loaded.config.model.quantization or self._loaded.model.description.scheme
        return None if asked is None else SCHEMES[asked]


def _unread(name: str) -> Callable[[], Any]:
    def read() -> Any:
        raise AssertionError(f"{name} is declared, and has not come")

    return read


def _different(own: Any, other: Any) -> str:
    """Name of the first field in which two specs differ."""
    names = (f.name for f in dataclasses.fields(own))
    return next((n for n in names if getattr(own, n) != getattr(other, n)), "config")
