"""Trains a draft head for a model on the model's own answers, and writes it in the format in which
such heads are published.

1. The model answers questions from a text, as many as the time limit allows. The answers are stored
   next to the result, so that an interrupted run can continue.
2. The head's inputs and targets are computed once for every answer, and cached if they fit in
   memory.
3. The head is trained (`compress.training.heads`) for a number of steps, or until the time is up.
4. The engine runs with the head on questions that it was not trained on, for the receipt.

`speculative_config` takes the folder: {"method": "eagle3", "model": FOLDER}."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.compress.checkpoint import claim, fingerprint, work_folder
from slipstream.compress.steps import DraftHead, warmup_cosine
from slipstream.compress.training.common import in_bfloat16, parameter_groups, write_receipt
from slipstream.compress.training.heads import (
    EagleNet,
    MedusaNet,
    eagle_for,
    eagle_start,
    losses,
    medusa_for,
    medusa_start,
)
from slipstream.compress.training.teacher import (
    Example,
    read_examples,
    read_questions,
    teacher_examples,
    write_examples,
)
from slipstream.config import EngineArgs
from slipstream.errors import ConfigError
from slipstream.evals.states import TextStates
from slipstream.model.draft_heads import as_model
from slipstream.model.load.weights import load_parameters
from slipstream.model.save import new_folder, stored, write_config, write_tensors
from slipstream.spec.description import ModelDescription
from slipstream.spec.drafts.heads import LayeredSpec, MedusaSpec
from slipstream.spec.model import RopeSpec

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

RECEIPT_NAME = "slipstream-draft.json"
ANSWER_SHARE = 0.4
"""Fraction of the time for answers; the rest is for training."""
CACHE_BYTES = 4 * 2**30
"""Maximum bytes of cached hidden states; if they need more, they are computed again for each batch."""

Progress = Callable[[str, int, int], None]


def train_head(
    source: ModelDescription,
    settings: DraftHead,
    out: Path,
    *,
    device: torch.device,
    restart: bool = False,
    download_dir: str | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> dict[str, Any]:
    """Train a head and write it to `out`. Returns its receipt, which is also in `out`."""
    work, seconds = work_folder(out, "draft"), 60 * settings.limit(on_gpu=device.type != "cpu")
    claim(work, out, {"settings": asdict(settings), "source": fingerprint(source)}, restart=restart)
    begin = time.perf_counter()
    examples = _answers(
        source,
        settings,
        work / "answers.jsonl",
        device,
        download_dir,
        begin + ANSWER_SHARE * seconds,
        progress,
    )
    if settings.num_questions_held_out:  # raises an error before the work if they are missing
        held_out = read_questions(
            settings.text,
            "evaluation",
            settings.num_questions_held_out,
            settings.context,
            download_dir=download_dir,
        )
    else:
        held_out = []
    training = HeadTraining(source, examples, settings, device)
    history = training.run(begin + seconds, progress)
    trained = time.perf_counter() - begin
    with new_folder(out) as folder:
        training.write(folder)
        parts: dict[str, Any] = {
            "training": {
                "num_answers": len(examples),
                "num_tokens": sum(len(e.token_ids) - e.num_context for e in examples),
                "num_steps": len(history),
                "seconds": round(trained, 1),
                "history": history[:: max(1, len(history) // 100)],
            }
        }
        if held_out:
            training.forget()
            parts["acceptance"] = measure_head(
                source, settings, folder, held_out, device=device, progress=progress
            )
        receipt = write_receipt(folder / RECEIPT_NAME, source, settings, **parts)
    shutil.rmtree(work, ignore_errors=True)
    return receipt


# --- Answers --------------------------------------------------------------------------------------------------------------


def _answers(
    source: ModelDescription,
    settings: DraftHead,
    kept: Path,
    device: torch.device,
    download_dir: str | None,
    until: float,
    progress: Progress,
) -> list[Example]:
    """Generate the model's answers: as many as the settings ask for and the time allows, but at
    least some. After the last question the questions start again, and answers are sampled."""
    from slipstream.engine.llm import LLM

    found = read_examples(kept) if kept.is_file() else []
    asked = read_questions(
        settings.text,
        "calibration",
        settings.num_answers,
        settings.context,
        download_dir=download_dir,
    )
    total, sizes = settings.num_answers, _engine(source, settings, device)
    if len(found) >= total or (found and time.perf_counter() >= until):
        return found
    with LLM(str(source.path), **sizes) as llm:
        while len(found) < total and (not found or time.perf_counter() < until):
            begin = len(found)
            some = [
                asked[i % len(asked)]
                for i in range(begin, min(begin + 4 * sizes["max_num_seqs"], total))
            ]
            temperature = (
                settings.temperature if begin < len(asked) else max(1.0, settings.temperature)
            )
            answers = teacher_examples(
                llm,
                some,
                max_tokens=settings.max_tokens,
                temperature=temperature,
                seed=settings.seed + begin,
            )
            if not answers:
                raise ConfigError(
                    f"{source.name} gave no answer to {len(some)} questions of {settings.text}",
                    field="text",
                )
            found += answers
            write_examples(kept, answers, append=True)
            progress("answers", len(found), total)
    return found


def _engine(source: ModelDescription, settings: DraftHead, device: torch.device) -> dict[str, Any]:
    length = min(source.spec.max_position, 2 * settings.context + settings.max_tokens)
    return {
        "device": str(device),
        "max_model_len": length,
        "max_num_seqs": 16 if device.type == "cpu" else 256,
    }


# --- Training -------------------------------------------------------------------------------------------------------------


class HeadTraining:
    """Training of one head. The head is in float32; matrix products are in bfloat16 if that is faster."""

    def __init__(
        self,
        source: ModelDescription,
        examples: Sequence[Example],
        settings: DraftHead,
        device: torch.device,
    ) -> None:
        self.source, self.settings, self.device = source, settings, device
        self.examples = [e for e in examples if 3 < len(e.token_ids) <= settings.batch_tokens]
        if not self.examples:
            why = f"none of {len(examples)} questions with its answer has 4 to {settings.batch_tokens} tokens"
            raise ConfigError(f"{why}: raise batch_tokens", field="batch_tokens")
        spec, longest = source.spec, max(len(e.token_ids) for e in self.examples)
        dense = load_parameters(source, dtype=torch.bfloat16, device=device, wanted=self.is_read)
        table = dense["embed.weight"]
        rows = dense.get("head.weight", table)
        self.tokens = frequent_tokens(
            examples, spec.vocab_size, settings.vocab_size(spec.vocab_size)
        )
        self.place = (
            torch.full((spec.vocab_size,), -1)
            .scatter(0, self.tokens, torch.arange(len(self.tokens)))
            .to(device)
        )
        self.rows = rows[self.tokens.to(rows.device)].detach().to(device)
        self.net: EagleNet | MedusaNet
        if settings.kind == "eagle3":
            fc_norm: Any = (
                "joint" if settings.norm_before_fc else "each" if settings.fc_norm else None
            )
            head = eagle_for(
                spec, len(self.tokens), fc_norm=fc_norm, norm_output=settings.norm_output
            )
            start = eagle_start(head, spec, dense, self.rows, settings.seed)
            self.spec: LayeredSpec | MedusaSpec = head
            self.net = EagleNet(
                head,
                start,
                table.detach().float().to(device),
                max_len=longest + settings.num_places,
            ).to(device)
        else:
            self.spec = medusa_for(spec, settings.num_places)
            self.net = MedusaNet(self.spec, medusa_start(self.spec), self.rows.float(), spec).to(
                device
            )
        aux = () if isinstance(self.spec, MedusaSpec) else self.spec.aux_layers or ()
        args = EngineArgs(model=str(source.path), device=str(device))
        self.model: TextStates | None = TextStates(
            args, aux, context=longest, step_tokens=2 * settings.batch_tokens
        )
        taken = 1 + len(aux)
        total = sum(len(e.token_ids) for e in self.examples) * taken * spec.hidden_size * 2
        self.cache: list[Tensor | None] | None = (
            [None] * len(self.examples) if total <= CACHE_BYTES else None
        )

    def is_read(self, name: str) -> bool:
        """Whether a head's initial weights or its training target depend on this parameter of the model."""
        last = f"layers.{self.source.spec.num_layers - 1}."
        return name.startswith(("embed.", "head.", "final_norm.", last))

    def forget(self) -> None:
        """Drop the model to free its memory."""
        self.model, self.cache = None, None

    @torch.no_grad()
    def states(self, indices: Sequence[int]) -> list[Tensor]:
        """Hidden states of these examples: [L, E of the final state, then E of each aux layer],
        bfloat16. Cached ones are on the CPU."""
        if self.cache is not None and all(self.cache[i] is not None for i in indices):
            return [t for i in indices if (t := self.cache[i]) is not None]
        assert self.model is not None
        final, aux = self.model.of([self.examples[i].token_ids for i in indices])
        if isinstance(self.spec, LayeredSpec):
            final = [torch.cat(pair, -1) for pair in zip(final, aux, strict=True)]
        found = [states.bfloat16() for states in final]
        if self.cache is not None:
            for i, states in zip(indices, found, strict=True):
                self.cache[i] = states.cpu()
        return found

    def batches(self) -> Iterator[list[int]]:
        """Yields, without end, indices of examples of similar lengths, with about `batch_tokens` tokens in all."""
        generator, size = torch.Generator().manual_seed(self.settings.seed), 16
        while True:
            order = torch.randperm(len(self.examples), generator=generator).tolist()
            groups = [
                sorted(order[i : i + 8 * size], key=lambda i: len(self.examples[i].token_ids))
                for i in range(0, len(order), 8 * size)
            ]
            found: list[list[int]] = []
            for group in groups:
                now: list[int] = []
                for i in group:
                    if (
                        now
                        and (len(now) + 1) * len(self.examples[i].token_ids)
                        > self.settings.batch_tokens
                    ):
                        found.append(now)
                        now = []
                    now.append(i)
                found.append(now)
            yield from (found[i] for i in torch.randperm(len(found), generator=generator).tolist())

    def padded(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(tokens [B, L], the head's inputs [B, L, …], the model's final states [B, L, E], its
        logits of the head's tokens [B, L, D], mask of counted positions [B, L]), padded"""
        some = [self.examples[i] for i in indices]
        longest, e = max(len(x.token_ids) for x in some), self.source.spec.hidden_size
        tokens = torch.zeros(len(some), longest, dtype=torch.int64)
        answered = torch.zeros(len(some), longest, dtype=torch.bool)
        for row, x in enumerate(some):
            tokens[row, : len(x.token_ids)] = torch.tensor(x.token_ids)
            answered[row, x.num_context - 1 : len(x.token_ids) - 1] = True
        tokens = tokens.to(self.device)
        states = torch.nn.utils.rnn.pad_sequence(list(self.states(indices)), batch_first=True).to(
            self.device
        )
        final, rest = states[..., :e], states[..., e:]
        wanted = as_model(
            torch.nn.functional.linear(final.to(self.rows.dtype), self.rows).float(),
            self.source.spec,
        )
        following = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
        counted = answered.to(self.device) & (self.place[following] >= 0)
        return tokens, (rest if rest.shape[-1] else final).float(), final.float(), wanted, counted

    def run(self, until: float, progress: Progress) -> list[dict[str, Any]]:
        """Train until the steps are done or the time is up; returns a record of each step."""
        s, begin, history = self.settings, time.perf_counter(), list[dict[str, Any]]()
        groups = parameter_groups(self.net.parameters(), s.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=s.learning_rate, betas=(0.9, 0.95))
        for step, indices in enumerate(self.batches()):
            share = max(
                step / s.num_steps, (time.perf_counter() - begin) / max(1e-9, until - begin)
            )
            if share >= 1 and step:
                break
            tokens, states, final, wanted, counted = self.padded(indices)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=in_bfloat16(self.device)):
                hidden = self.net(tokens, states, s.num_places)
                loss, hits, counts = losses(
                    self.net, hidden, wanted, counted, final, s.state_weight
                )
            if not counts.any():  # no answer contains a token of the head's vocabulary
                continue
            if not torch.isfinite(loss):
                raise ConfigError(
                    f"the loss of step {step} is {float(loss)}: lower learning_rate",
                    field="learning_rate",
                )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            rate = s.learning_rate * min(
                (step + 1) / (s.warmup_steps + 1), warmup_cosine(round(1000 * share), 1000, 0, 0.02)
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            agreement = [round(x, 4) for x in (hits / counts.clamp(min=1)).tolist()]
            history.append(
                {
                    "step": step,
                    "loss": round(float(loss.detach()), 4),
                    "agreement": agreement,
                    "rate": rate,
                }
            )
            progress(
                f"training, loss {float(loss.detach()):.3f}, right {agreement[0]:.0%}",
                round(share * s.num_steps),
                s.num_steps,
            )
        if not history:
            raise ConfigError(
                "no step trained the head: no answer has a token that the head proposes; raise draft_vocab_size",
                field="draft_vocab_size",
            )
        return history

    def write(self, folder: Path) -> None:
        """Write the head's files, in bfloat16."""
        spec = self.source.spec
        if isinstance(self.spec, MedusaSpec):
            values = {n.removeprefix("head"): p for n, p in self.net.named_parameters()}
            config = {
                "architectures": ["MedusaModel"],
                "model_type": "medusa",
                "hidden_size": spec.hidden_size,
                "vocab_size": spec.vocab_size,
                "num_heads": self.spec.num_heads,
                "num_hidden_layers": self.spec.num_layers,
                "original_lm_head": True,
            }
            names = self.spec.names(converted=True)
            maps: dict[str, Tensor] = {}
        else:
            values = dict(self.net.named_parameters())
            names = self.spec.names("midlayer.")
            config = eagle_config(self.spec, spec.max_position)
            chosen = torch.zeros(spec.vocab_size, dtype=torch.bool).scatter(0, self.tokens, True)
            maps = {"d2t": self.tokens - torch.arange(len(self.tokens)), "t2d": chosen}
        tensors = {
            name: stored(values[place.target].detach(), place).bfloat16()
            for name, place in names.items()
        }
        write_tensors(folder, (*tensors.items(), *maps.items()))
        write_config(folder, {**config, "dtype": "bfloat16"})


def frequent_tokens(examples: Sequence[Example], vocab_size: int, count: int) -> Tensor:
    """The `count` most frequent tokens of the answers, ascending. If answers have fewer tokens, the
    lowest other token ids are added."""
    counter = Counter(token for e in examples for token in e.token_ids[e.num_context :])
    ranked = [token for token, _ in counter.most_common(count)]
    others = (token for token in range(vocab_size) if token not in counter)
    return torch.tensor(sorted([*ranked, *(next(others) for _ in range(count - len(ranked)))]))


def eagle_config(head: LayeredSpec, max_position: int) -> dict[str, Any]:
    a, m = head.layers[0].self_attention, head.layers[0].feed_forward
    position = a.position
    assert isinstance(position, RopeSpec)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": head.hidden_size,
        "intermediate_size": m.intermediate_size,  # type: ignore[union-attr]
        "num_hidden_layers": 1,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": head.norm.eps,
        "rope_theta": position.theta,
        "max_position_embeddings": max_position,
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(head.aux_layers or ()),
        "fc_norm": head.fc_norm == "each",
        "norm_before_fc": head.fc_norm == "joint",
        "norm_output": head.norm_output,
        "tie_word_embeddings": False,
    }


# --- The receipt ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Accepted:
    """Counts of accepted drafts by position."""

    num_prompts: int
    num_runs: int
    by_position: tuple[float, ...]

    @property
    def length(self) -> float:
        """Mean tokens per verification: the accepted drafts plus one."""
        return 1 + sum(self.by_position)

    def as_data(self) -> dict[str, Any]:
        rounded = [round(p, 4) for p in self.by_position]
        return {
            "num_prompts": self.num_prompts,
            "num_runs": self.num_runs,
            "accepted_length": round(self.length, 3),
            "by_position": rounded,
        }


def measure_head(
    source: ModelDescription,
    settings: DraftHead,
    folder: Path,
    questions: Sequence[str],
    *,
    device: torch.device,
    progress: Progress = lambda phase, done, total: None,
) -> dict[str, Any]:
    """Measure acceptance by position and accepted length, for each kind of text. The engine answers
    `questions` greedily."""
    from slipstream.engine.llm import LLM

    most = settings.num_places
    config = {"method": settings.kind, "model": str(folder), "num_speculative_tokens": most}
    kinds: dict[str, list[str]] = {}
    with LLM(str(source.path), **_engine(source, settings, device)) as llm:
        for question, text in zip(
            questions, _texts(llm, questions, settings.max_tokens), strict=True
        ):
            kinds.setdefault(kind_of(text), []).append(question)
    found: dict[str, Accepted] = {}
    with LLM(
        str(source.path), speculative_config=config, **_engine(source, settings, device)
    ) as llm:
        for i, (kind, some) in enumerate(sorted(kinds.items())):
            progress("acceptance", i, len(kinds))
            before = llm.core.stats()
            _texts(llm, some, settings.max_tokens)
            after = llm.core.stats()
            runs = after.spec_num_drafts - before.spec_num_drafts
            earlier = (*before.spec_accepted_by_position, *(0,) * most)
            places = zip(after.spec_accepted_by_position, earlier, strict=False)
            found[kind] = Accepted(
                len(some), runs, tuple((a - b) / max(1, runs) for a, b in places)
            )
    runs = sum(x.num_runs for x in found.values())
    shares = [
        sum(x.by_position[i] * x.num_runs for x in found.values() if i < len(x.by_position))
        / max(1, runs)
        for i in range(most)
    ]
    overall = Accepted(len(questions), runs, tuple(shares))
    return {
        "num_speculative_tokens": most,
        **overall.as_data(),
        "by_text": {kind: x.as_data() for kind, x in found.items()},
    }


def _texts(llm: LLM, questions: Sequence[str], max_tokens: int) -> list[str]:
    from slipstream.params.sampling import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [
        a.outputs[0].text
        for a in llm.chat([[{"role": "user", "content": q}] for q in questions], sampling)
    ]


def kind_of(text: str) -> str:
    """Kind of an answer: code, a list (several numbered or bulleted lines), or prose."""
    if "```" in text:
        return "code"
    return "lists" if len(re.findall(r"(?m)^\s*(?:\d+[.)]|[-*])\s", text)) >= 3 else "prose"
