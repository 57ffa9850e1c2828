"""Distillation: trains a smaller model, the student, to predict like a larger one, the teacher.

The student is any `DenseModel` with the teacher's vocabulary: a pruned model, or random weights of
a config. Weights, gradients and AdamW's moments are in float32; the models compute in bfloat16
(autocast) by default.

1. A step's batch depends only on the step's number, so a continued run equals the uninterrupted one
   in every bit.
2. Every token has the same weight however a batch is split, so several processes make the same
   steps as one.
3. With torch.distributed initialised, the student is sharded layer by layer (FSDP2). Each process
   holds the whole teacher, or reads its logits from disk."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.compress.dense import DenseModel, load_dense
from slipstream.compress.steps import DistillSettings, Divergence
from slipstream.compress.training.common import (
    Epochs,
    full,
    parameter_groups,
    read_state,
    restore_state,
    save_state,
)
from slipstream.compress.training.curves import curves
from slipstream.compress.training.objective import (
    LayerOutputs,
    Matching,
    TappedOps,
    TopK,
    layer_pairs,
    token_losses,
)
from slipstream.compress.training.teacher import (
    Example,
    LogitCache,
    check_examples,
    fingerprint,
    read_examples,
)
from slipstream.errors import CheckpointError, ConfigError
from slipstream.model.save import new_folder
from slipstream.model.sequences import SequenceBatch, WholeModel
from slipstream.platform import platform_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Means over a step's tokens; divergence and nll are weighted. `held_out_kl` is the forward KL at
    temperature 1 and `held_out_nll` the negative log-likelihood, in nats; None if they were not measured."""

    step: int
    loss: float
    divergence: float
    nll: float
    states: float
    attention: float
    rate: float
    grad_norm: float
    held_out_kl: float | None = None
    held_out_nll: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Distilled:
    model: DenseModel
    history: tuple[StepRecord, ...]


def distill(
    student: DenseModel,
    teacher: DenseModel | LogitCache,
    examples: Sequence[Example],
    settings: DistillSettings,
    *,
    progress: Callable[[StepRecord], None] = lambda record: None,
    **more: Any,
) -> Distilled:
    """Train the student for `settings.num_steps` steps. `more` are arguments of `DistillTraining`."""
    training = DistillTraining(student, teacher, examples, settings, **more)
    for record in training.run():
        progress(record)
    return Distilled(model=training.result(), history=tuple(training.history))


class DistillTraining:
    """One training run. Every process of a group creates one with the same arguments.

    `held_out` examples are for evaluation. `kept_layers` are the teacher's layers that the student's came from. With a folder
    `work` the run saves its state there, and continues from it."""

    def __init__(
        self,
        student: DenseModel,
        teacher: DenseModel | LogitCache,
        examples: Sequence[Example],
        settings: DistillSettings,
        *,
        device: torch.device,
        held_out: Sequence[Example] = (),
        kept_layers: Sequence[int] | None = None,
        work: Path | None = None,
    ) -> None:
        settings.check()
        check_examples(examples)
        self.world, self.rank = (
            (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        )
        self.settings = settings
        self.examples = examples
        self.device = device
        self.held_out = held_out
        self.student, self.work = student, work
        self._check(student, teacher)
        longest = max(len(e.token_ids) for e in (*examples, *held_out))
        # Training must not change the caller's weights.
        values = {
            n: p.detach().to(device, torch.float32, copy=True)
            for n, p in student.parameters.items()
        }
        self.ops, self.teacher_ops = TappedOps(), TappedOps()
        self.model = WholeModel(
            student.spec, values, max_len=longest, recompute=settings.recompute, ops=self.ops
        )
        self.cache = teacher if isinstance(teacher, LogitCache) else None
        self.teacher: WholeModel | None = None
        self.matching: Matching | None = None
        if isinstance(teacher, DenseModel):
            dtype = getattr(torch, settings.dtype)
            fixed = {n: p.detach().to(device, dtype) for n, p in teacher.parameters.items()}
            self.teacher = WholeModel(
                teacher.spec, fixed, max_len=longest, ops=self.teacher_ops
            ).requires_grad_(False)
            if settings.state_weight or settings.attention_weight:
                pairs = layer_pairs(student.spec.num_layers, teacher.spec.num_layers, kept_layers)
                self.matching = Matching(
                    student.spec, teacher.spec, pairs, attention=settings.attention_weight > 0
                ).to(device)
        if self.world > 1:
            self._shard()
        modules = [self.model, *([self.matching] if self.matching is not None else [])]
        self.named = {
            f"{i}.{n}": p for i, module in enumerate(modules) for n, p in module.named_parameters()
        }
        groups = parameter_groups(self.named.values(), settings.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)
        self.step, self.history = 0, list[StepRecord]()
        self.epochs = Epochs(len(examples), settings.batch_size, settings.seed)
        self._resume()

    def _check(self, student: DenseModel, teacher: DenseModel | LogitCache) -> None:
        s = self.settings
        vocab = teacher.vocab_size if isinstance(teacher, LogitCache) else teacher.spec.vocab_size
        if vocab != student.spec.vocab_size:
            have = f"the student has {student.spec.vocab_size} tokens, the teacher {vocab}"
            raise ConfigError(f"{have}: they must share them", field="student")
        if s.batch_size % self.world:
            raise ConfigError(
                f"batch_size={s.batch_size} must be a multiple of the {self.world} processes",
                field="batch_size",
            )
        if isinstance(teacher, LogitCache):
            if s.state_weight or s.attention_weight:
                raise ConfigError(
                    "hidden states and attention are not on disk: give the teacher itself",
                    field="state_weight",
                )
            if s.temperature != teacher.temperature:
                raise ConfigError(
                    f"temperature={s.temperature}, but the cached logits are of {teacher.temperature}",
                    field="temperature",
                )

    def _shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        if self.matching is not None:
            fully_shard(self.matching, mesh=mesh)

    # --- Steps --------------------------------------------------------------------------------------------------------

    def run(self) -> Iterator[StepRecord]:
        """Run the remaining steps, and yield the record of each."""
        while self.step < self.settings.num_steps:
            record = self._train_step()
            self.step += 1
            last = self.step == self.settings.num_steps
            if self.held_out and (last or self.step % self.settings.eval_every == 0):
                kl, nll = self.evaluate()
                record = replace(record, held_out_kl=kl, held_out_nll=nll)
            self.history.append(record)
            if self.work is not None and (last or self.step % self.settings.save_every == 0):
                self._save(self.work)
            yield record

    def _train_step(self) -> StepRecord:
        s, indices = self.settings, self.epochs.indices(self.step)
        total = sum(
            (len(e.token_ids) - e.num_context) * e.weight
            for e in (self.examples[i] for i in indices)
        )
        num_tokens = sum(len(self.examples[i].token_ids) for i in indices)
        own = indices[self.rank :: self.world]
        parts = [own[i : i + s.micro_batch] for i in range(0, len(own), s.micro_batch)]
        sums = torch.zeros(4, device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        for part in parts:
            div, nll, states, attention = self._losses(part)
            terms = torch.stack(
                (div / total, nll / total, states / num_tokens, attention / num_tokens)
            )
            weights = terms.new_tensor(
                (s.divergence_weight, s.nll_weight, s.state_weight, s.attention_weight)
            )
            ((terms * weights).sum() * self.world).backward()  # FSDP averages over processes
            sums += terms.detach()
        if self.world > 1:
            dist.all_reduce(sums)
        norm = torch.nn.utils.clip_grad_norm_(self.named.values(), s.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = s.rate(self.step)
        self.optimizer.step()
        div, nll, states, attention = sums.tolist()
        loss = (
            div * s.divergence_weight
            + nll * s.nll_weight
            + states * s.state_weight
            + attention * s.attention_weight
        )
        if not math.isfinite(loss):
            what = f"the loss of step {self.step} is {loss}"
            raise ConfigError(
                f"{what}: lower learning_rate, or use dtype='float32'", field="learning_rate"
            )
        means = {
            "loss": loss,
            "divergence": div,
            "nll": nll,
            "states": states,
            "attention": attention,
        }
        return StepRecord(
            step=self.step, **means, rate=s.rate(self.step), grad_norm=float(full(norm))
        )

    def _losses(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(divergence, negative log-likelihood, hidden states' loss, attention's loss), sums over tokens."""
        s, matching = self.settings, self.matching
        some = [self.examples[i] for i in indices]
        batch, weights, targets = _batch(some, self.device)
        with_attention = s.attention_weight > 0
        pairs = matching.pairs if matching is not None else ()
        ours, each = LayerOutputs.record(
            self.ops, batch, [a for a, _ in pairs], attention=with_attention
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=s.dtype == "bfloat16"):
            theirs, teacher = self._teacher(
                indices, batch, [b for _, b in pairs], attention=with_attention
            )

            def read(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
                div, nll = self._token_losses(
                    hidden, teacher, targets, weights, s.divergence, s.temperature
                )
                zero = nll.new_zeros(())
                self.ops.tap = None  # the recomputation in the backward pass must not be recorded
                with torch.autocast(self.device.type, enabled=False):
                    states, attention = (zero, zero) if matching is None else matching(ours, theirs)
                return div, nll, states, attention

            result: tuple[Tensor, Tensor, Tensor, Tensor] = self.model(batch, read, each)
        return result

    def _token_losses(
        self,
        hidden: Tensor,
        teacher: Callable[[slice], Tensor] | TopK,
        targets: Tensor,
        weights: Tensor,
        kind: Divergence = "forward",
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        head, vocab_size = self.model.logits, self.model.spec.vocab_size
        return token_losses(
            head,
            hidden,
            teacher,
            targets,
            weights,
            vocab_size=vocab_size,
            kind=kind,
            temperature=temperature,
        )

    def _teacher(
        self,
        indices: Sequence[int],
        batch: SequenceBatch,
        layers: Sequence[int],
        *,
        attention: bool,
    ) -> tuple[LayerOutputs, Callable[[slice], Tensor] | TopK]:
        """(the teacher's layer outputs, its logits)."""
        if self.cache is not None:
            return LayerOutputs(batch.lengths, {}, {}), self.cache.of(indices, self.device)
        teacher = self.teacher
        assert teacher is not None
        outputs, each = LayerOutputs.record(self.teacher_ops, batch, layers, attention=attention)
        with torch.no_grad():
            hidden = teacher.hidden(batch, each if layers else None)
        return outputs, lambda rows: teacher.logits(hidden[rows])

    @torch.no_grad()
    def evaluate(self) -> tuple[float | None, float]:
        """(forward KL, negative log-likelihood) on held-out text. The KL is None without a teacher in memory."""
        sums = torch.zeros(3, device=self.device)
        # every process evaluates all, since FSDP gathers
        for begin in range(0, len(self.held_out), self.settings.micro_batch):
            batch, weights, targets = _batch(
                self.held_out[begin : begin + self.settings.micro_batch], self.device
            )
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"
            ):
                theirs = None if self.teacher is None else self.teacher.hidden(batch)

                def read(
                    ours: Tensor,
                    theirs: Any = theirs,
                    targets: Tensor = targets,
                    weights: Tensor = weights,
                ) -> tuple[Tensor, Tensor]:
                    model, h = (
                        (self.model, ours) if self.teacher is None else (self.teacher, theirs)
                    )
                    return self._token_losses(
                        ours, lambda rows: model.logits(h[rows]), targets, weights
                    )

                kl, nll = self.model(batch, read)
            sums += torch.stack((kl, nll, weights.sum()))
        kl, nll, count = sums.tolist()
        return None if self.teacher is None else kl / count, nll / count

    def result(self) -> DenseModel:
        """Trained student, in float32 on the CPU."""
        values = {n: full(p.detach()).cpu().clone() for n, p in self.model.named_parameters()}
        return replace(self.student, parameters=values)

    # --- Saved state --------------------------------------------------------------------------------------------------

    def _plan(self) -> dict[str, Any]:
        """Settings that a continued run must have in common with the interrupted one."""
        shapes = {n: list(p.shape) for n, p in self.named.items()}
        plan = {
            "settings": asdict(self.settings),
            "examples": fingerprint(self.examples),
            "shapes": shapes,
        }
        found: dict[str, Any] = json.loads(json.dumps(plan))
        return found

    def _save(self, work: Path) -> None:
        about = {
            "step": self.step,
            "plan": self._plan(),
            "history": [asdict(r) for r in self.history],
        }
        save_state(work, self.named, self.optimizer, about, write=self.rank == 0)
        if self.world > 1:
            dist.barrier()

    def _resume(self) -> None:
        if self.work is None or (about := read_state(self.work)) is None:
            return
        if about["plan"] != self._plan():
            raise CheckpointError(
                f"{self.work} holds a run with other settings, examples or sizes; name another folder, or remove it",
                field="work",
            )
        restore_state(self.work, self.named, self.optimizer, about)
        self.step, self.history = about["step"], [StepRecord(**r) for r in about["history"]]


# --- Files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillFiles:
    """Files of a run: checkpoints of teacher and student, and examples written by `teacher.write_examples`.
    Cached `logits` replace the teacher. `out` is the folder for the student's checkpoint, the records of its
    steps (distill.json) and their curves (distill.svg). `work` is for saved states."""

    teacher: Path
    student: Path
    examples: Path
    out: Path
    work: Path
    held_out: Path | None = None
    logits: Path | None = None
    kept_layers: tuple[int, ...] | None = None
    dtype: str = "bfloat16"  # of the result


def distill_files(
    files: DistillFiles,
    settings: DistillSettings,
    *,
    device: str,
    num_processes: int = 1,
    progress: Callable[[StepRecord], None] = lambda record: None,
) -> tuple[StepRecord, ...]:
    """Run the distillation that `files` describe; returns the records of its steps. Several
    processes use one GPU each, or share the CPU; then `progress` is not called."""
    if num_processes < 1:
        raise ConfigError(
            f"num_processes={num_processes} must be at least 1", field="num_processes"
        )
    if num_processes == 1:
        _worker(0, files, settings, device, 1, None, progress)
    else:
        import tempfile

        from torch.multiprocessing.spawn import start_processes

        # a file instead of a port, so that no other process can join
        with tempfile.TemporaryDirectory() as meeting:
            args = (files, settings, device, num_processes, f"file://{meeting}/group")
            start_processes(_worker, args=args, nprocs=num_processes, start_method="spawn")
    return tuple(
        StepRecord(**row) for row in json.loads((files.out / "distill.json").read_text())["history"]
    )


def _worker(
    rank: int,
    files: DistillFiles,
    settings: DistillSettings,
    device: str,
    world: int,
    meeting: str | None,
    progress: Callable[[StepRecord], None] = lambda record: None,
) -> None:
    place = torch.device(device if world == 1 or device == "cpu" else f"cuda:{rank}")
    if meeting is not None:
        platform = platform_of(place)
        platform.activate(torch.get_num_threads())
        dist.init_process_group(
            platform.collectives, init_method=meeting, world_size=world, rank=rank
        )
    try:
        examples = read_examples(files.examples)
        held_out = read_examples(files.held_out) if files.held_out is not None else []
        cpu = torch.device("cpu")
        student = load_dense(files.student, dtype=torch.float32, device=cpu)
        teacher: DenseModel | LogitCache
        if files.logits is not None:
            teacher = LogitCache(files.logits, examples)
        else:
            teacher = load_dense(files.teacher, dtype=getattr(torch, settings.dtype), device=cpu)
        more: dict[str, Any] = {
            "device": place,
            "held_out": held_out,
            "kept_layers": files.kept_layers,
            "work": files.work,
        }
        found = distill(student, teacher, examples, settings, progress=progress, **more)
        if rank == 0:
            write(files.out, found, settings, dtype=getattr(torch, files.dtype))
        if meeting is not None:
            # gloo's threads release a collective's tensors some time after it ended, and need the
            # interpreter for that. A process that exits meanwhile aborts. Waiting here gives them
            # the interpreter.
            dist.barrier()
    finally:
        if meeting is not None:
            dist.destroy_process_group()


def write(out: Path, found: Distilled, settings: DistillSettings, *, dtype: torch.dtype) -> None:
    """Write the checkpoint, the records and the curves."""
    with new_folder(out) as folder:
        found.model.write_into(folder, dtype=dtype)
        record = {"settings": asdict(settings), "history": [asdict(r) for r in found.history]}
        (folder / "distill.json").write_text(json.dumps(record, indent=1))
        named = {"loss": "loss", "held-out KL": "held_out_kl", "held-out NLL": "held_out_nll"}
        values = {
            name: [(r.step + 1, getattr(r, key)) for r in found.history]
            for name, key in named.items()
        }
        series = {
            name: [(step, value) for step, value in points if value is not None]
            for name, points in values.items()
        }
        title = "Distillation: loss of each step, and on held-out text"
        (folder / "distill.svg").write_text(curves(series, title=title))


def _batch(
    examples: Sequence[Example], device: torch.device
) -> tuple[SequenceBatch, Tensor, Tensor]:
    """(batch, the weight of each position's prediction, float32 [T], the tokens to predict [T])."""
    batch = SequenceBatch.of([e.token_ids for e in examples], device)
    weights = []
    for e in examples:
        count = len(e.token_ids)
        weights.append(torch.full((count,), e.weight))
        weights[-1][: e.num_context - 1] = 0.0  # predicts context
        weights[-1][-1] = 0.0  # has nothing to predict
    return batch, torch.cat(weights).to(device), batch.token_ids.roll(-1)
