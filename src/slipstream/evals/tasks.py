"""Tasks with correct answers: multiple choice from a local file, rated answers, and the tasks of lm-eval.

A file of questions has one JSON object a line: {"prompt": TEXT, "choices": [TEXT, …], "answer": INDEX}. A choice is
scored as the continuation of the prompt and a space, by its log-probability per byte (lm-eval's acc_norm), so that its
length has no effect. A file of rated answers (`slipstream audit export --rating all`) tests whether answers rated up
are more likely, per byte, than those rated down; only the part of the data that is never used for training is scored
(`evals.text`). Any other name is a task of lm-eval (the extra eval).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.base.files import parse_json
from slipstream.engine.llm import LLM
from slipstream.errors import ConfigError, install_command
from slipstream.evals.likelihood import loglikelihoods
from slipstream.evals.text import Document, Part
from slipstream.params.lora_request import LoRARequest

PREFERRED = ("acc_norm", "acc", "exact_match", "f1", "bleu", "word_perplexity")
"""Metrics in order of preference: the first that a task has is reported, else its first metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RatedAnswer:
    """A rated answer to `messages`, dicts with role and content."""

    messages: tuple[tuple[tuple[str, str], tuple[str, str]], ...]
    answer: str
    is_good: bool

    @property
    def part(self) -> Part:
        """Part of the data, training or evaluation, to which the conversation belongs."""
        turns = [(dict(m)["role"], dict(m)["content"]) for m in self.messages]
        return Document(turns=tuple(turns)).part


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """The score of an evaluation task. `stderr` and `higher_is_better` are None if the task does
    not define them. `num_pairs` is the number of pairs of rated answers, None if the task scores
    questions. `also` has other metrics of the same task."""

    name: str
    metric: str
    value: float
    stderr: float | None
    num_questions: int
    higher_is_better: bool | None = None
    num_pairs: int | None = None
    also: tuple[TaskResult, ...] = ()

    @property
    def scored(self) -> str:
        """Number of scored questions or pairs, as text."""
        if self.num_pairs is None:
            return f"{self.num_questions} questions"
        return f"{self.num_pairs} pairs of {self.num_questions} rated answers"


def run_tasks(
    llm: LLM,
    names: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    part: Part = "evaluation",
    lora_request: LoRARequest | None = None,
) -> list[TaskResult]:
    """Run the tasks `names`, each a .jsonl file or a task of lm-eval, on their first `limit` questions. `num_fewshot`
    is only for lm-eval's tasks, `part` and `lora_request` only for rated answers; ConfigError if no task uses them."""
    files = [name for name in names if name.endswith(".jsonl")]
    if num_fewshot is not None and len(files) == len(names):
        raise ConfigError(
            "num_fewshot is for lm-eval's tasks; write the examples into the file's prompts",
            field="num_fewshot",
        )
    if lora_request is not None and not all(n in files and is_rated(Path(n)) for n in names):
        raise ConfigError("lora_request is for files of rated answers", field="lora_request")
    found = {
        name: rated_answers(
            llm,
            read_rated(Path(name), part, limit),
            name=Path(name).stem,
            lora_request=lora_request,
        )
        if is_rated(Path(name))
        else multiple_choice(llm, read_questions(Path(name))[:limit], name=Path(name).stem)
        for name in files
    }
    if others := [name for name in names if name not in found]:
        found |= run_lm_eval(llm, others, limit=limit, num_fewshot=num_fewshot)
    return [found[name] for name in names]


def check_tasks(
    names: Sequence[str], *, limit: int | None = None, part: Part = "evaluation"
) -> None:
    """Raise ConfigError if `run_tasks` would not find the questions. Needs no model."""
    for name in names:
        if name.endswith(".jsonl"):
            path = Path(name)
            read_rated(path, part, limit) if is_rated(path) else read_questions(path)
    if others := [name for name in names if not name.endswith(".jsonl")]:
        _manager(others)


def multiple_choice(
    llm: LLM, questions: Sequence[Question], *, name: str = "choices"
) -> TaskResult:
    """Fraction of questions whose correct choice is the most likely."""
    tokenizer = llm.get_tokenizer()
    pairs = []
    for question in questions:
        num_prompt = len(tokenizer.encode(question.prompt))
        for choice in question.choices:
            whole = tokenizer.encode(f"{question.prompt} {choice}")
            pairs.append((whole[:num_prompt], whole[num_prompt:]))
    scores = iter(loglikelihoods(llm, pairs))
    right = 0
    for question in questions:
        rates = [next(scores).logprob / len(choice.encode()) for choice in question.choices]
        right += rates.index(max(rates)) == question.answer
    share = right / len(questions)
    stderr = math.sqrt(share * (1 - share) / len(questions))
    count = len(questions)
    return TaskResult(
        name=name,
        metric="acc_norm",
        value=share,
        stderr=stderr,
        num_questions=count,
        higher_is_better=True,
    )


def rated_answers(
    llm: LLM,
    rated: Sequence[RatedAnswer],
    *,
    name: str = "rated",
    lora_request: LoRARequest | None = None,
) -> TaskResult:
    """Fraction of pairs in which the answer rated up is more likely, per byte, than the one rated down.

    `preferred` counts pairs of the same conversation; `auc` counts all pairs (the area under the ROC curve).
    If any conversation has both ratings, the score is `preferred`, with `auc` in `also`. The standard error
    assumes as many pairs as the rarer rating has answers (an upper bound, because pairs share answers)."""
    tokenizer = llm.get_tokenizer()
    if tokenizer.chat_template is None:
        raise ConfigError("rated answers need a model with a chat template", field="tasks")
    texts = [(tokenizer.apply_chat_template([*map(dict, r.messages)]), r.answer) for r in rated]
    pairs = []
    for prompt, answer in texts:
        context = tokenizer.encode(prompt, add_special_tokens=False)
        pairs.append((context, tokenizer.encode(answer, add_special_tokens=False)))
    scores = [
        found.logprob / len(r.answer.encode())
        for found, r in zip(loglikelihoods(llm, pairs, lora_request), rated, strict=True)
    ]
    every = [
        (up, down)
        for up, a in enumerate(rated)
        for down, b in enumerate(rated)
        if a.is_good and not b.is_good
    ]

    def share(metric: str, compared: Sequence[tuple[int, int]]) -> TaskResult:
        won = [
            1.0 if scores[up] > scores[down] else 0.5 * (scores[up] == scores[down])
            for up, down in compared
        ]
        value = sum(won) / len(won)
        rarer = min(len({up for up, _ in compared}), len({down for _, down in compared}))
        return TaskResult(
            name=name,
            metric=metric,
            value=value,
            stderr=math.sqrt(value * (1 - value) / rarer),
            num_questions=len({i for pair in compared for i in pair}),
            higher_is_better=True,
            num_pairs=len(compared),
        )

    auc = share("auc", every)
    same = [(up, down) for up, down in every if rated[up].messages == rated[down].messages]
    return replace(share("preferred", same), also=(auc,)) if same else auc


def is_rated(path: Path) -> bool:
    """Whether a file has rated answers, judged by its first line."""
    return '"rating"' in next((line for line in _lines(path) if line.strip()), "")


def read_rated(
    path: Path, part: Part = "evaluation", limit: int | None = None
) -> list[RatedAnswer]:
    """Read at most `limit` rated answers in a part of a file. ConfigError names the wrong line, or
    the missing rating."""
    found = [
        _rated(line, f"{path}, line {number}")
        for number, line in enumerate(_lines(path), 1)
        if line.strip()
    ]
    taken = [r for r in found if part in ("all", r.part)][:limit]
    if len({r.is_good for r in taken}) != 2:
        raise ConfigError(
            f"{path} has answers of one rating only in what is scored ({len(taken)} of {len(found)} answers, part={part!r}); "
            "export with --rating all, or rate more (--part all takes those, too, that training takes)",
            field="tasks",
        )
    return taken


def _rated(line: str, where: str) -> RatedAnswer:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}", field="tasks") from error
    match row:
        case {
            "messages": [*turns, {"role": "assistant", "content": str(answer)}],
            "rating": "up" | "down" as rating,
        } if (
            answer
            and turns
            and all(isinstance(t, dict) and isinstance(t.get("content"), str) for t in turns)
        ):
            messages = tuple(
                (("role", str(t.get("role"))), ("content", t["content"])) for t in turns
            )
            return RatedAnswer(messages=messages, answer=answer, is_good=rating == "up")
    raise ConfigError(
        f'{where}: {{"messages": [{{"role", "content"}}, …], "rating": "up" or "down"}} was expected, of which the last '
        "message is the assistant's",
        field="tasks",
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").split("\n")  # JSON strings may contain other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the questions in {path} can't be read: {error}", field="tasks"
        ) from error


def read_questions(path: Path) -> list[Question]:
    """Read the questions in a file. ConfigError names the wrong line."""
    lines = _lines(path)
    found = [
        _question(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"{path} holds no questions", field="tasks")
    return found


def _question(line: str, where: str) -> Question:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}", field="tasks") from error
    match row:
        case {"prompt": str(prompt), "choices": list(choices), "answer": int(answer)} if (
            prompt
            and len(choices) > 1
            and all(isinstance(c, str) and c for c in choices)
            and 0 <= answer < len(choices)
        ):
            return Question(prompt=prompt, choices=tuple(choices), answer=answer)
    raise ConfigError(
        f'{where}: {{"prompt": TEXT, "choices": [TEXT, TEXT, …], "answer": INDEX}} was expected, with an index of a choice',
        field="tasks",
    )


def _manager(tasks: Sequence[str | dict[str, Any]]) -> Any:
    """Create lm-eval's task manager. ConfigError if it does not know one of the tasks."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"lm-eval's tasks need it: {install_command('eval')} ({error})", field="tasks"
        ) from error
    manager = TaskManager()
    unknown = [t for t in tasks if isinstance(t, str) and t not in manager.all_tasks]
    if unknown:
        raise ConfigError(
            f"lm-eval knows no task {', '.join(unknown)}; `lm-eval ls tasks` lists them",
            field="tasks",
        )
    return manager


def run_lm_eval(
    llm: LLM,
    tasks: Sequence[str | dict[str, Any]],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> dict[str, TaskResult]:
    """Run tasks of lm-eval, given by name or as configs. A group of tasks has one result. ConfigError if the package is missing
    or does not know a name."""
    manager = _manager(tasks)
    import lm_eval

    from slipstream.evals.lm_eval_adapter import SlipstreamLM

    result = lm_eval.simple_evaluate(
        model=SlipstreamLM(llm),
        tasks=list(tasks),
        limit=limit,
        num_fewshot=num_fewshot,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    names = [t if isinstance(t, str) else t["task"] for t in tasks]
    return {name: _result(name, result) for name in names}


def _result(name: str, result: dict[str, Any]) -> TaskResult:
    values = {**result["results"], **result.get("groups", {})}[name]
    metrics = {
        k: v
        for k, v in values.items()
        if isinstance(v, (int, float)) and "," in k and "_stderr," not in k
    }
    if not metrics:
        raise ConfigError(f"lm-eval gives no number for {name}: {sorted(values)}", field="tasks")
    key = next(
        (k for wanted in PREFERRED for k in metrics if k.split(",")[0] == wanted),
        next(iter(metrics)),
    )
    metric, _, kind = key.partition(",")
    stderr = values.get(f"{metric}_stderr,{kind}")
    counts = result.get("n-samples", {}).get(name, {})
    return TaskResult(
        name=name,
        metric=metric,
        value=float(metrics[key]),
        stderr=float(stderr) if isinstance(stderr, (int, float)) else None,
        num_questions=int(counts.get("effective", 0)),
        higher_is_better=(result.get("higher_is_better", {}).get(name) or {}).get(metric),
    )
