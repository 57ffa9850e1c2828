"""Settings of the steps sparsify, prune, distill, draft_head and lora. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, get_args

from slipstream.errors import ConfigError

Method: TypeAlias = Literal["magnitude", "wanda", "sparsegpt"]
Pattern: TypeAlias = Literal["2:4", "4:8"]
Importance: TypeAlias = Literal["magnitude", "activation", "taylor", "wactigrad"]
Divergence: TypeAlias = Literal["forward", "reverse", "js"]


def require(settings: Any, is_allowed: Callable[[Any], bool], what: str, *fields: str) -> None:
    """Raise ConfigError for the first of these fields whose value is not allowed; `what` describes
    the allowed values."""
    for name in fields:
        if not is_allowed(value := getattr(settings, name)):
            raise ConfigError(f"{name}={value!r} must be {what}", field=name)


def warmup_cosine(step: float, num_steps: int, num_rising: int, final: float = 0.0) -> float:
    """Fraction of the maximum learning rate at a step: it rises linearly over `num_rising` steps
    and falls along a cosine to `final`."""
    if step < num_rising:
        return min(1.0, (step + 1) / num_rising)
    done = (step - num_rising) / max(1, num_steps - num_rising)
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2


def require_at_least(settings: Any, least: int, *fields: str) -> None:
    require(settings, lambda value: value >= least, f"at least {least}", *fields)


def require_share(settings: Any, *fields: str) -> None:
    require(settings, lambda value: 0 <= value <= 1, "a share from 0 to 1", *fields)


def require_inside(settings: Any, *fields: str) -> None:
    require(settings, lambda value: 0 < value < 1, "between 0 and 1", *fields)


def require_one_of(settings: Any, allowed: tuple[Any, ...], *fields: str) -> None:
    require(
        settings, lambda value: value in allowed, f"one of {', '.join(map(str, allowed))}", *fields
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsify:
    """Sets a fraction `ratio` of the weights of linear layers to zero, or half of them by
    `pattern`. `ignore`: name patterns of linear layers that stay dense. With ratios="outliers" the
    layers' ratios differ by up to 2 · `spread`."""

    method: Method = "sparsegpt"
    ratio: float = 0.5
    pattern: Pattern | None = None
    ratios: Literal["uniform", "outliers"] = "uniform"
    spread: float = 0.08
    outlier: float = 5.0  # factor on the mean
    damping: float = 0.01  # SparseGPT: added to the Hessian's diagonal, as a fraction of its mean
    # fraction of the change of a linear layer's inputs that its weight compensates
    catch_up: float = 0.0
    ignore: tuple[str, ...] = ()

    def check(self) -> None:
        require_inside(self, "ratio", "damping")
        require_share(self, "catch_up")
        if self.pattern is not None and self.ratio != 0.5:
            raise ConfigError(
                f"pattern={self.pattern!r} zeros half; leave ratio out", field="ratio"
            )
        if self.ratios == "outliers" and self.pattern is not None:
            raise ConfigError(
                "a pattern has one ratio; ratios='outliers' is for weights without one",
                field="ratios",
            )
        if self.ratios == "outliers" and not 0 <= 2 * self.spread < min(self.ratio, 1 - self.ratio):
            raise ConfigError(
                f"spread={self.spread} must leave every ratio between 0 and 1", field="spread"
            )
        require(self, lambda value: value > 1, "above 1", "outlier")

    @property
    def needs_text(self) -> bool:
        return self.method != "magnitude" or self.ratios == "outliers" or self.catch_up > 0

    def takes(self, product: str) -> bool:
        return product != "head" and not any(
            fnmatchcase(product, pattern) for pattern in self.ignore
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneSettings:
    """Fractions to remove, from 0 to 1, of each layer's heads (kv groups) and channels, of the
    hidden width and of the layers. Channels and width stay multiples of `multiple`. `drop_layers`
    are the indices of layers to remove. `size` removes layers until this fraction of the model's
    parameters remains."""

    heads: float = 0.0
    channels: float = 0.0
    hidden: float = 0.0
    layers: float = 0.0
    drop_layers: tuple[int, ...] = ()
    size: float | None = None
    importance: Importance = "activation"
    multiple: int = 32

    def check(self) -> None:
        require(
            self,
            lambda v: 0 <= v < 1,
            "a share from 0 to below 1",
            "heads",
            "channels",
            "hidden",
            "layers",
        )
        require_one_of(self, get_args(Importance), "importance")
        require_at_least(self, 1, "multiple")
        if (self.layers > 0) + bool(self.drop_layers) + (self.size is not None) > 1:
            raise ConfigError(
                "give one of layers, a share to rank, drop_layers, their numbers, and size",
                field="drop_layers",
            )
        if self.size is not None:
            require_inside(self, "size")
        if not (
            self.heads
            or self.channels
            or self.hidden
            or self.layers
            or self.drop_layers
            or self.size
        ):
            raise ConfigError(
                "nothing to prune: give heads, channels, hidden, layers, drop_layers or size",
                field="prune",
            )

    @property
    def needs_text(self) -> bool:
        """Whether the step needs calibration text."""
        units = max(self.heads, self.channels, self.hidden) > 0
        return (
            self.layers > 0 or self.size is not None or (self.importance != "magnitude" and units)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """Settings of distillation. A step trains on `batch_size` sequences over all processes,
    `micro_batch` at a time in each. The loss is the weighted sum of the terms of `objective.py`.
    The learning rate rises over the fraction `warmup` of the steps and falls along a cosine to
    `final_rate` of its maximum. `recompute` saves memory and costs time."""

    num_steps: int = 1000
    batch_size: int = 16
    micro_batch: int = 4
    divergence: Divergence = "forward"
    temperature: float = 1.0
    divergence_weight: float = 1.0
    nll_weight: float = 0.0
    state_weight: float = 0.0
    attention_weight: float = 0.0
    learning_rate: float = 3e-4
    warmup: float = 0.05
    final_rate: float = 0.1
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    recompute: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 0
    eval_every: int = 100
    save_every: int = 200

    def check(self) -> None:
        weights = ("divergence_weight", "nll_weight", "state_weight", "attention_weight")
        require_at_least(
            self, 1, "num_steps", "batch_size", "micro_batch", "eval_every", "save_every"
        )
        require_one_of(self, get_args(Divergence), "divergence")
        require_one_of(self, ("bfloat16", "float32"), "dtype")
        require(
            self, lambda value: value > 0, "above 0", "temperature", "learning_rate", "clip_norm"
        )
        require(self, lambda value: value >= 0, "0 or more", *weights, "weight_decay")
        require_share(self, "warmup", "final_rate")
        if not (
            self.divergence_weight or self.nll_weight or self.state_weight or self.attention_weight
        ):
            raise ConfigError(
                "nothing to learn from: every weight of the loss is 0", field="divergence_weight"
            )

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        share = warmup_cosine(
            step, self.num_steps, round(self.warmup * self.num_steps), self.final_rate
        )
        return self.learning_rate * share


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill(DistillSettings):
    """Distillation as a step of a recipe: the original model teaches the pruned one.

    The student learns from `num_windows` windows of `context` tokens of `text`, and from the
    teacher's answers to `num_answers` of its questions (with `rationale_weight` also from the
    teacher's rationales). `held_out` windows of the evaluation part are for evaluation. With
    `top_k` the teacher runs once, and its most likely tokens are cached on disk. Each of
    `num_processes` uses one GPU."""

    text: str = "sharegpt"
    num_windows: int = 2048
    context: int = 512
    held_out: int = 16
    num_answers: int = 0
    max_tokens: int = 256
    rationale_weight: float | None = None
    top_k: int | None = None
    num_processes: int = 1

    @property
    def needs_text(self) -> bool:
        return True

    def check(self) -> None:
        DistillSettings.check(self)
        require_at_least(self, 1, "max_tokens", "num_processes")
        require_at_least(self, 0, "num_windows", "held_out", "num_answers")
        require_at_least(self, 2, "context")
        if self.num_windows + self.num_answers < 1:
            raise ConfigError(
                "nothing to learn from: give num_windows or num_answers", field="num_windows"
            )
        if self.rationale_weight is not None and (
            self.num_answers < 1 or self.rationale_weight <= 0
        ):
            raise ConfigError(
                "rationale_weight must be above 0, and needs num_answers", field="rationale_weight"
            )
        if self.top_k is not None and (
            self.top_k < 1 or self.state_weight > 0 or self.attention_weight > 0
        ):
            raise ConfigError(
                "top_k must be at least 1, and keeps no hidden states or attention", field="top_k"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """Trains a draft head for the model (`compress.training.draft`), on its own answers to up to
    `num_answers` questions of `text`, of up to `max_tokens` tokens.

    - `context`: maximum characters of a question.
    - `num_places`: number of consecutive tokens that the head learns to predict.
    - `draft_vocab_size`: number of the answers' most frequent tokens in the head's vocabulary
      (None: a quarter of the model's, a multiple of 16, at most 32,000).
    - `num_steps`, `batch_tokens`: training steps, and tokens per step.
    - `minutes`: time limit for answers and training together (None: 50 on a CPU, 9 on a GPU).
    - `state_weight`: weight of the loss on the distance to the model's final hidden states.
    - `norm_before_fc`: one norm of all inputs of `fc`; `fc_norm`: one for each state in them;
      `norm_output`: EAGLE-3.1's.
    - `num_questions_held_out`: questions for the receipt."""

    kind: Literal["eagle3", "medusa"]
    text: str = "sharegpt"
    num_answers: int = 16_384
    max_tokens: int = 256
    context: int = 1024
    temperature: float = 0.0
    num_places: int = 5
    draft_vocab_size: int | None = None
    num_steps: int = 8000
    batch_tokens: int = 4096
    learning_rate: float = 5e-4
    warmup_steps: int = 20
    weight_decay: float = 0.01
    state_weight: float = 0.0
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    minutes: float | None = None
    num_questions_held_out: int = 48
    seed: int = 0

    def limit(self, *, on_gpu: bool) -> float:
        """Time limit in minutes."""
        return (9.0 if on_gpu else 50.0) if self.minutes is None else self.minutes

    def vocab_size(self, of_model: int) -> int:
        # GPU kernels for 8-bit linear layers need the number of outputs to be a multiple of 16
        usual = max(16, min(32_000, of_model // 4) // 16 * 16)
        return min(of_model, self.draft_vocab_size or usual)

    def check(self) -> None:
        require_at_least(
            self, 1, "num_answers", "num_places", "num_steps", "batch_tokens", "max_tokens"
        )
        require_at_least(self, 0, "num_questions_held_out", "seed", "warmup_steps")
        require_at_least(self, 0, "temperature", "weight_decay", "state_weight")
        require_at_least(self, 8, "context")
        require_inside(self, "learning_rate")
        require(self, lambda value: value is None or value >= 1, "at least 1", "draft_vocab_size")
        require(self, lambda value: value is None or value > 0, "above 0", "minutes")
        if self.kind == "medusa":
            norms = "fc_norm", "norm_before_fc", "norm_output"
            require(self, lambda value: not value, "false: Medusa has no such norm", *norms)
        if self.fc_norm:
            require(
                self,
                lambda value: not value,
                "false: with fc_norm each state has a norm of its own",
                "norm_before_fc",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """Trains an adapter (`compress.training.lora`) on up to `num_documents` documents of each part of `text`,
    of which `held_out` (at most a tenth) are used for evaluation only.

    - `targets`: last parts of PEFT's names of linear layers, such as q_proj; empty: all.
    - `rank`: rank of the adapter of every linear layer not in `ranks`.
    - `alpha`: the adapter's output is multiplied by alpha/rank, with `rslora` by alpha/√rank.
    - `quantization`: quantizes the base model like an engine with that setting.
    - `num_steps`, `batch_size`, `minutes`: training ends after this many steps of this many
      documents, or after this time.
    - `warmup`: fraction of the steps in which the learning rate rises; then it falls along a cosine to 0."""

    text: str = "sharegpt"
    num_documents: int = 4096
    held_out: int = 32
    context: int = 512
    rank: int = 16
    ranks: dict[str, int] = field(default_factory=dict)
    alpha: float = 32.0
    dropout: float = 0.05
    rslora: bool = False
    targets: tuple[str, ...] = ()
    quantization: Literal["int8", "int4"] | None = None
    num_steps: int = 500
    minutes: float | None = None
    batch_size: int = 8
    micro_batch: int = 4
    learning_rate: float = 2e-4
    warmup: float = 0.03
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    recompute: bool = False
    seed: int = 0

    def check(self) -> None:
        require_at_least(
            self, 1, "num_documents", "held_out", "num_steps", "batch_size", "micro_batch"
        )
        require_at_least(self, 2, "context")
        require_at_least(self, 0, "seed", "weight_decay")
        require(self, lambda value: 1 <= value <= 512, "from 1 to 512", "rank")
        if any(
            not isinstance(r, int) or isinstance(r, bool) or not 1 <= r <= 512
            for r in self.ranks.values()
        ):
            raise ConfigError(
                f"ranks={self.ranks!r} must be numbers from 1 to 512 by target", field="ranks"
            )
        require(self, lambda value: value > 0, "above 0", "alpha", "clip_norm")
        require(
            self, lambda value: 0 <= value < 1, "a share from 0 to below 1", "dropout", "warmup"
        )
        require_inside(self, "learning_rate")
        require(self, lambda value: value is None or value > 0, "above 0", "minutes")
