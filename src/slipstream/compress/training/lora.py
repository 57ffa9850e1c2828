"""Trains an adapter (LoRA) on a frozen model and writes it in PEFT's format: `slipstream compress
MODEL --recipe lora`.

1. The base is a checkpoint's model: dense, or dequantized once from compressed-tensors or GGUF, or
   quantized like by an engine at load (`quantization`). The adapter is thus trained on the values
   that will be served (QLoRA, Dettmers et al. 2023). During training the base is in memory in
   bfloat16 (float32 on a CPU without bfloat16 products).
2. A document is a text, all tokens of which are learned, or a conversation, of which only the
   assistant's answers are learned. The prompt of an answer is tokenized separately, as in a server.
3. A step's documents depend only on the step's number. The state is saved in a folder next to the
   result, from which an interrupted run continues.
4. Some documents are held out. The receipt has their perplexity before and after, the loss of each
   step, and a digest of the data.

The folder works with `--lora NAME=PATH` and `peft.PeftModel.from_pretrained`."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.compress.checkpoint import claim, fingerprint, work_folder
from slipstream.compress.steps import LoRA, warmup_cosine
from slipstream.compress.training.common import (
    Epochs,
    in_bfloat16,
    read_state,
    restore_state,
    save_state,
    write_receipt,
)
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import ConfigError, RequestError
from slipstream.evals.text import Document, Part, read_documents
from slipstream.kernels.plain.autograd import AutogradOps
from slipstream.kernels.weights.forms import Activations, Linear
from slipstream.kernels.weights.quantize import dequantize, round_linear
from slipstream.model.load.weights import load_parameters, transform
from slipstream.model.save import new_folder
from slipstream.model.sequences import SequenceBatch, WholeModel, attention_of
from slipstream.spec.adapters import CONFIG_NAME, WEIGHTS_NAME
from slipstream.spec.description import ModelDescription
from slipstream.spec.parameters import Placement, Transpose, parameters
from slipstream.spec.scheme import SCHEMES

RECEIPT_NAME = "slipstream-lora.json"

PARTS: tuple[Part, ...] = ("calibration", "evaluation")

SAVE_S = 60.0
"""Interval in seconds between saved states."""

_PRODUCT = re.compile(
    r"layers\.\d+\.(attention\.(qkv|out)|recurrent\.(in|out)|mlp\.(up|down))\.weight"
)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """Token ids, and a mask of those to predict (never the first)."""

    token_ids: tuple[int, ...]
    learned: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A linear layer of the checkpoint that gets an adapter."""

    name: str  # name in PEFT
    place: Placement
    rows: slice  # rows of the parameter `place.target`
    inner: int
    rank: int
    scale: float


def train_adapter(
    source: ModelDescription,
    settings: LoRA,
    out: Path,
    *,
    device: torch.device,
    restart: bool = False,
    download_dir: str | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> dict[str, Any]:
    """Train an adapter and write it to `out`. Returns its receipt, which is also in `out`.
    ConfigError is raised before the work."""
    modules = adapted_modules(source, settings)
    progress("reading the data", 0, 0)
    tokenizer = Tokenizer.for_model(source)
    train, held_out, skipped = read_samples(
        settings, tokenizer, source.spec.max_position, download_dir
    )
    digest = hashlib.sha256(
        json.dumps([asdict(sample) for sample in (*train, *held_out)]).encode()
    ).hexdigest()
    work = work_folder(out, "lora")
    claim(
        work,
        out,
        {"settings": asdict(settings), "source": fingerprint(source), "data": digest},
        restart=restart,
    )
    training = LoraTraining(source, settings, modules, train, work, device)
    before = training.evaluate(held_out) if training.step == 0 else training.before
    training.before = before
    training.run(progress)
    after = training.evaluate(held_out)
    with new_folder(out) as folder:
        write_adapter(folder, source, settings, modules, training.values)
        receipt = write_receipt(
            folder / RECEIPT_NAME,
            source,
            settings,
            data={
                "sha256": digest,
                "num_documents": len(train),
                "num_tokens": sum(len(s.token_ids) for s in train),
                "num_learned_tokens": sum(sum(s.learned) for s in train),
                "num_held_out": len(held_out),
                "num_skipped": skipped,
            },
            adapter={
                "num_modules": len(modules),
                "num_parameters": sum(v.numel() for v in training.values.values()),
            },
            held_out={
                "perplexity_before": round(math.exp(before), 4),
                "perplexity_after": round(math.exp(after), 4),
            },
            training={
                "num_steps": training.step,
                "seconds": round(training.seconds, 1),
                "loss": training.history,
            },
        )
    shutil.rmtree(work, ignore_errors=True)
    return receipt


def adapted_modules(source: ModelDescription, settings: LoRA) -> list[Module]:
    """Linear layers that get an adapter. ConfigError names a target that the model lacks, or that
    can't have one."""
    spec = source.spec
    if spec.kind != "a decoder":
        raise ConfigError(
            f"lora: {source.name} is {spec.kind}, and adapters are for decoders that write text",
            field="lora",
        )
    for layer in spec.layers:
        attention_of(layer)
    shapes, names = parameters(spec), source.family.names(spec)
    # If a family's first prefix is empty, its modules' names begin with its second one.
    before = (*source.family.prefixes, "")[1] if source.family.prefixes[0] == "" else ""
    every = {
        before + name.removesuffix(".weight"): place
        for name, place in names.items()
        if name.endswith(".weight") and _PRODUCT.fullmatch(place.target)
    }
    known = sorted({name.rpartition(".")[2] for name in every})
    for target in settings.targets:
        if target not in known:
            has = ", ".join(known)
            raise ConfigError(
                f"targets: this model has no {target!r} for an adapter; it has {has}",
                field="targets",
            )
    found = []
    for name, place in every.items():
        last = name.rpartition(".")[2]
        if settings.targets and last not in settings.targets:
            continue
        out, inner = shapes[place.target]
        rank = settings.ranks.get(last, settings.rank)
        scale = settings.alpha / (rank**0.5 if settings.rslora else rank)
        rows = slice(place.start, out if place.rows is None else place.start + place.rows)
        found.append(Module(name, place, rows, inner, rank, scale))
    if strange := sorted(set(settings.ranks) - {m.name.rpartition(".")[2] for m in found}):
        raise ConfigError(f"ranks: {strange[0]!r} is none of the targets", field="ranks")
    return found


# --- Data -----------------------------------------------------------------------------------------------------------------


def read_samples(
    settings: LoRA, tokenizer: Tokenizer, longest: int, download_dir: str | None
) -> tuple[list[TrainingSample], list[TrainingSample], int]:
    """(training samples, held-out samples, number of documents with nothing to learn). Documents
    with the smallest digests are held out, so that they stay the same when others are added.
    """
    count, context = settings.num_documents, min(settings.context, longest)
    documents = [
        document
        for part in PARTS
        for document in islice(
            read_documents(settings.text, part, download_dir=download_dir), count
        )
    ]
    unique = {hashlib.sha256(repr(d).encode("utf-8", "replace")).hexdigest(): d for d in documents}
    if len(unique) < 2:
        raise ConfigError(
            f"{settings.text} holds {len(unique)} documents; one at least is learned and one held out",
            field="text",
        )
    num_held_out = min(settings.held_out, max(1, len(unique) // 10))
    held = set(sorted(unique)[:num_held_out])
    found: tuple[list[TrainingSample], list[TrainingSample]] = [], []
    skipped = 0
    for digest, document in unique.items():
        samples = list(_samples(document, tokenizer, context))
        skipped += not samples
        found[digest in held].extend(samples)
    if not found[0] or not found[1]:
        raise ConfigError(
            f"{settings.text}: {skipped} of {len(unique)} documents hold nothing to learn within {context} tokens; give "
            "others, or a longer context",
            field="text",
        )
    return *found, skipped


def _samples(document: Document, tokenizer: Tokenizer, context: int) -> Iterator[TrainingSample]:
    if document.turns:
        sample = _conversation(document.turns, tokenizer, context)
        if sample is not None:
            yield sample
        return
    ids = tokenizer.encode(document.text)
    if tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    for begin in range(0, len(ids), context):
        part = tuple(ids[begin : begin + context])
        if len(part) > 1:
            yield TrainingSample(part, (False, *[True] * (len(part) - 1)))


def _conversation(
    turns: Sequence[tuple[str, str]], tokenizer: Tokenizer, context: int
) -> TrainingSample | None:
    """Training sample of a conversation. None if no answer is within the context, or if the template changes
    text before an answer."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            "the data has conversations, and the model has no chat template; give texts",
            field="text",
        )
    messages = [{"role": role, "content": content} for role, content in turns]
    ids: list[int] = []
    learned: list[bool] = []
    done = ""
    try:
        for i, (role, _) in enumerate(turns):
            if role != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True)
            whole = tokenizer.apply_chat_template(messages[: i + 1], add_generation_prompt=False)
            if not prompt.startswith(done) or not whole.startswith(prompt):
                return None
            for text, is_answer in ((prompt[len(done) :], False), (whole[len(prompt) :], True)):
                tokens = tokenizer.encode(text, add_special_tokens=False)
                ids += tokens
                learned += [is_answer] * len(tokens)
            done = whole
    except RequestError:
        return None  # the template raised an error, for example for two user turns in a row
    ids, learned = ids[:context], learned[:context]
    return TrainingSample(tuple(ids), tuple(learned)) if any(learned[1:]) else None


# --- Training -------------------------------------------------------------------------------------------------------------


class LoRAOps(AutogradOps):
    """Linear layers with adapters. `own` maps the address of a linear layer's weight to its modules
    with A [r, in] and B [out, r], B in the checkpoint's order of rows."""

    def __init__(self, dropout: float) -> None:
        self.own: dict[int, list[tuple[Module, Tensor, Tensor]]] = {}
        self.dropout, self.training = dropout, False

    def linear(self, x: Activations, w: Linear) -> Tensor:
        assert isinstance(x, Tensor)
        y = super().linear(x, w)
        modules = self.own.get(w.weight.data_ptr())
        if modules is None:
            return y
        parts, end = [], 0
        for module, a, b in modules:
            dropped = F.dropout(x, self.dropout) if self.training and self.dropout else x
            b = (
                b
                if isinstance(module.place.transform, Transpose)
                else transform(b, module.place.transform)
            )
            if module.rows.start > end:
                parts.append(y.new_zeros(len(y), module.rows.start - end))
            parts.append(F.linear(F.linear(dropped, a), b * module.scale))
            end = module.rows.stop
        if end < y.shape[1]:
            parts.append(y.new_zeros(len(y), y.shape[1] - end))
        return y + torch.cat(parts, -1)


class LoraTraining:
    """One training run; it continues from the state in `work`, if there is one."""

    def __init__(
        self,
        source: ModelDescription,
        settings: LoRA,
        modules: Sequence[Module],
        samples: Sequence[TrainingSample],
        work: Path,
        device: torch.device,
    ) -> None:
        self.settings, self.samples, self.work, self.device = settings, samples, work, device
        self.in_bfloat16 = in_bfloat16(device)
        base = frozen_base(
            source, settings, torch.bfloat16 if self.in_bfloat16 else torch.float32, device
        )
        self.ops = LoRAOps(settings.dropout)
        longest = min(settings.context, source.spec.max_position)
        self.model = WholeModel(
            source.spec, base, max_len=longest, recompute=settings.recompute, ops=self.ops
        )
        self.model.requires_grad_(False)
        weights = dict(self.model.named_parameters())
        generator = torch.Generator().manual_seed(settings.seed)
        self.values: dict[str, torch.nn.Parameter] = {}
        for m in sorted(modules, key=lambda m: (m.place.target, m.rows.start)):
            bound = m.inner**-0.5  # PEFT's initialisation: kaiming_uniform with a = √5
            a = torch.empty(m.rank, m.inner).uniform_(-bound, bound, generator=generator)
            pair = a, torch.zeros(m.rows.stop - m.rows.start, m.rank)
            down, up = (torch.nn.Parameter(side.to(device)) for side in pair)
            self.values |= {f"{m.name}.lora_A.weight": down, f"{m.name}.lora_B.weight": up}
            self.ops.own.setdefault(weights[m.place.target].data_ptr(), []).append((m, down, up))
        self.optimizer = torch.optim.AdamW(
            self.values.values(),
            lr=settings.learning_rate,
            betas=(0.9, 0.999),
            weight_decay=settings.weight_decay,
        )
        self.step, self.seconds, self.before = 0, 0.0, math.nan
        self.history: list[float] = []
        self.epochs = Epochs(len(samples), settings.batch_size, settings.seed)
        self._resume()

    def run(self, progress: Progress) -> None:
        """Run the remaining steps, until the time is up."""
        s = self.settings
        begin, before, saved = time.perf_counter(), self.seconds, time.perf_counter()
        limit = math.inf if s.minutes is None else 60 * s.minutes
        while self.step < s.num_steps and (self.seconds < limit or not self.step):
            share = max(self.step / s.num_steps, self.seconds / limit)
            loss = self._train_step(
                s.learning_rate * warmup_cosine(round(1000 * share), 1000, round(1000 * s.warmup))
            )
            self.history.append(round(loss, 5))
            self.step += 1
            now = time.perf_counter()
            self.seconds = before + now - begin
            progress(
                f"training, loss {loss:.3f}",
                round(max(self.step / s.num_steps, self.seconds / limit) * 1000),
                1000,
            )
            if now - saved > SAVE_S:
                self._save()
                saved = now

    def _train_step(self, rate: float) -> float:
        """Run one step. Returns the loss in nats per learned token."""
        s = self.settings
        torch.manual_seed(s.seed * 1_000_003 + self.step)  # for dropout
        some = sorted(
            (self.samples[i] for i in self.epochs.indices(self.step)),
            key=lambda sample: len(sample.token_ids),
        )
        total = sum(sum(sample.learned) for sample in some)
        self.ops.training = True
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for begin in range(0, len(some), s.micro_batch):
            part = self._nll(some[begin : begin + s.micro_batch]) / total
            part.backward()
            loss += float(part.detach())
        if not math.isfinite(loss):
            raise ConfigError(
                f"the loss of step {self.step} is {loss}: lower learning_rate",
                field="learning_rate",
            )
        torch.nn.utils.clip_grad_norm_(self.values.values(), s.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return loss

    def _nll(self, some: Sequence[TrainingSample]) -> Tensor:
        """Summed loss of the learned tokens, in nats."""
        batch = SequenceBatch.of([sample.token_ids for sample in some], self.device)
        learned = torch.tensor(
            [flag for sample in some for flag in (*sample.learned[1:], False)], device=self.device
        )
        targets = batch.token_ids.roll(-1)[learned]

        def read(hidden: Tensor) -> Tensor:
            return F.cross_entropy(
                self.model.logits(hidden[learned]).float(), targets, reduction="sum"
            )

        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.in_bfloat16):
            found: Tensor = self.model(batch, read)
        return found

    @torch.no_grad()
    def evaluate(self, held_out: Sequence[TrainingSample]) -> float:
        """Mean loss in nats per learned token with the current adapter."""
        self.ops.training = False
        some = sorted(held_out, key=lambda sample: len(sample.token_ids))
        size = self.settings.micro_batch
        total = sum(float(self._nll(some[i : i + size])) for i in range(0, len(some), size))
        return total / sum(sum(sample.learned) for sample in some)

    # --- Saved state ------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        about = {
            "step": self.step,
            "seconds": self.seconds,
            "before": self.before,
            "history": self.history,
        }
        save_state(self.work, self.values, self.optimizer, about)

    def _resume(self) -> None:
        if (about := read_state(self.work)) is None:
            return
        restore_state(self.work, self.values, self.optimizer, about)
        self.step, self.seconds, self.before = about["step"], about["seconds"], about["before"]
        self.history = list(about["history"])


def frozen_base(
    source: ModelDescription, settings: LoRA, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Load the frozen parameters of the base model, in `dtype`."""
    values = load_parameters(source, dtype=dtype, device=device)
    if settings.quantization is not None:
        scheme = SCHEMES[settings.quantization]
        for name, value in values.items():
            if _PRODUCT.fullmatch(name):
                rounded: Any = round_linear(value, None, scheme)
                values[name] = dequantize(rounded, torch.float32).to(dtype)
    return values


def write_adapter(
    folder: Path,
    source: ModelDescription,
    settings: LoRA,
    modules: Sequence[Module],
    values: Mapping[str, Tensor],
) -> None:
    """Write PEFT's two files, in float32 like PEFT."""
    from safetensors.torch import save_file

    tensors = {
        f"base_model.model.{name}": value.detach().cpu().contiguous()
        for name, value in values.items()
    }
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source.name,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "rank_pattern": dict(settings.ranks),
        "alpha_pattern": {},
        "target_modules": sorted({module.name.rpartition(".")[2] for module in modules}),
        "bias": "none",
        "fan_in_fan_out": any(isinstance(module.place.transform, Transpose) for module in modules),
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
    }
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
