"""The training data of distillation: examples from text or from the teacher's answers, and a cache of the teacher's logits
on disk.

Answers are generated with our own engine. With rationales each question yields two examples (Distilling step-by-step, Hsieh
et al. 2023): the answer, and the teacher's reasoning with the weight `rationale_weight`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.base.files import digest
from slipstream.compress.training.objective import TopK
from slipstream.errors import CheckpointError, ConfigError
from slipstream.evals.text import Part, read_documents
from slipstream.model.save import new_folder
from slipstream.model.sequences import SequenceBatch, WholeModel

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

WHY = "Think step by step and explain the reasoning that leads to the answer.\n\n"
"""Prefix of a question that asks for a rationale, for the teacher and for the student."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Tokens to train on. The first `num_context` (at least 1) are context, the others are predicted, each with `weight`."""

    token_ids: tuple[int, ...]
    num_context: int = 1
    weight: float = 1.0


def text_examples(windows: Iterable[Sequence[int]]) -> list[Example]:
    return [Example(token_ids=tuple(window)) for window in windows]


def teacher_examples(
    llm: LLM,
    questions: Sequence[str],
    *,
    max_tokens: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
    rationale_weight: float | None = None,
) -> list[Example]:
    """Generate the teacher's answers to the questions, through its chat template, and its rationales if `rationale_weight`
    is given."""
    from slipstream.params.sampling import SamplingParams

    tasks: list[tuple[str, float]] = [(question, 1.0) for question in questions]
    if rationale_weight is not None:
        tasks += [(WHY + question, rationale_weight) for question in questions]
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + i)
        for i in range(len(tasks))
    ]
    answers = llm.chat([[{"role": "user", "content": text}] for text, _ in tasks], params)
    found = []
    for (_, weight), answer in zip(tasks, answers, strict=True):
        prompt, generated = tuple(answer.prompt_token_ids), tuple(answer.outputs[0].token_ids)
        if generated:
            found.append(
                Example(token_ids=prompt + generated, num_context=len(prompt), weight=weight)
            )
    return found


def read_questions(
    text: str, part: Part, count: int, longest: int, *, download_dir: str | None = None
) -> list[str]:
    """Read the first `count` questions of a part of `text`, of up to `longest` characters; fewer if
    it has fewer. ConfigError if it has none."""
    found: list[str] = []
    for document in read_documents(text, part, download_dir=download_dir):
        asked = next((content for role, content in document.turns if role == "user"), None)
        if asked is not None and len(asked) <= longest:
            found.append(asked)
        if len(found) == count:
            break
    if not found:
        raise ConfigError(
            f"the {part} part of {text} holds no questions of up to {longest} characters",
            field="text",
        )
    return found


def write_examples(path: Path, examples: Iterable[Example], *, append: bool = False) -> None:
    """Write a file for `read_examples`, one JSON object per line; with `append`, after its contents."""
    lines = (
        json.dumps({"token_ids": e.token_ids, "num_context": e.num_context, "weight": e.weight})
        for e in examples
    )
    with path.open("a" if append else "w") as file:
        file.writelines(f"{line}\n" for line in lines)


def read_examples(path: Path) -> list[Example]:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        found = [
            Example(
                token_ids=tuple(r["token_ids"]), num_context=r["num_context"], weight=r["weight"]
            )
            for r in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no examples: {error}", field="examples") from error
    check_examples(found)
    return found


def check_examples(examples: Sequence[Example]) -> None:
    for i, example in enumerate(examples):
        if not 1 <= example.num_context < len(example.token_ids):
            raise ConfigError(
                f"example {i}: num_context={example.num_context} of {len(example.token_ids)} tokens leaves nothing to learn",
                field="examples",
            )


def fingerprint(examples: Sequence[Example]) -> str:
    return digest([e.token_ids for e in examples])


# --- Logits on disk ---------------------------------------------------------------------------------------------------

SHARD = 256
"""Examples per file."""


class LogitCache:
    """The teacher's k most likely next tokens at each position of the examples, at one temperature."""

    def __init__(self, folder: Path, examples: Sequence[Example]) -> None:
        """Open a cache. ConfigError if it was made from other examples."""
        try:
            self.about: dict[str, Any] = json.loads((folder / "logits.json").read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{folder} holds no cached logits: {error}", field="logits"
            ) from error
        if self.about["examples"] != fingerprint(examples):
            raise ConfigError(
                f"the logits in {folder} are of other examples; make them again", field="logits"
            )
        self.folder = folder
        self._starts = torch.tensor([0, *(len(e.token_ids) for e in examples)]).cumsum(0).tolist()

    @property
    def temperature(self) -> float:
        return float(self.about["temperature"])

    @property
    def vocab_size(self) -> int:
        return int(self.about["vocab_size"])

    def of(self, indices: Sequence[int], device: torch.device) -> TopK:
        """Cached tokens and log-probabilities of these examples, concatenated."""
        from safetensors import safe_open

        ids, values = [], []
        for i in indices:
            first = self._starts[i // SHARD * SHARD]
            rows = slice(self._starts[i] - first, self._starts[i + 1] - first)
            with safe_open(
                self.folder / f"logits-{i // SHARD:05d}.safetensors", framework="pt"
            ) as file:
                ids.append(file.get_slice("ids")[rows].long())
                values.append(file.get_slice("logprobs")[rows].float())
        return TopK(torch.cat(ids).to(device), torch.cat(values).to(device))


def cache_logits(
    teacher: WholeModel,
    examples: Sequence[Example],
    folder: Path,
    *,
    k: int = 64,
    temperature: float = 1.0,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> LogitCache:
    """Run the teacher over `examples` once and store its k most likely tokens, in 6 bytes each."""
    from safetensors.torch import save_file

    if not 1 <= k < teacher.spec.vocab_size:
        raise ConfigError(
            f"k={k} must be from 1 to below the vocabulary's {teacher.spec.vocab_size}", field="k"
        )
    with new_folder(folder) as into, torch.no_grad():
        for begin in range(0, len(examples), SHARD):
            shard = examples[begin : begin + SHARD]
            kept: list[tuple[Tensor, Tensor]] = []
            for example in shard:
                batch = SequenceBatch.of([example.token_ids], device)
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    logits = teacher(batch)
                top = (logits.float() / temperature).log_softmax(-1).topk(k, dim=-1)
                kept.append((top.indices.int().cpu(), top.values.half().cpu()))
            tensors = {
                "ids": torch.cat([ids for ids, _ in kept]),
                "logprobs": torch.cat([values for _, values in kept]),
            }
            save_file(tensors, into / f"logits-{begin // SHARD:05d}.safetensors")
        about = {
            "k": k,
            "temperature": temperature,
            "vocab_size": teacher.spec.vocab_size,
            "examples": fingerprint(examples),
        }
        (into / "logits.json").write_text(json.dumps(about, indent=2))
    return LogitCache(folder, examples)
