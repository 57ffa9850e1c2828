"""What the steps of a recipe that change a model's shape and numbers are told: sparsify, prune, distil. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

from slipstream.errors import ConfigError

Method: TypeAlias = Literal["magnitude", "wanda", "sparsegpt"]
Pattern: TypeAlias = Literal["2:4", "4:8"]
Importance: TypeAlias = Literal["magnitude", "activation", "taylor", "wactigrad"]
Divergence: TypeAlias = Literal["forward", "reverse", "js"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsify:
    """`ratio` of the weights of the layers' products become 0, or, with a `pattern`, the half that it says. `ignore` are
    patterns of products that stay as they are. With ratios="outliers" the layers' ratios span 2 · `spread`."""

    method: Method = "sparsegpt"
    ratio: float = 0.5
    pattern: Pattern | None = None
    ratios: Literal["uniform", "outliers"] = "uniform"
    spread: float = 0.08
    outlier: float = 5.0  # times the mean
    damping: float = 0.01  # SparseGPT: added to the Hessian's diagonal, as a share of its mean
    catch_up: float = 0.0  # the share of what zeros before a product changed in its inputs that it makes up for
    ignore: tuple[str, ...] = ()

    def check(self) -> None:
        if not 0 < self.ratio < 1:
            raise ConfigError(f"ratio={self.ratio} must lie between 0 and 1", field="ratio")
        if self.pattern is not None and self.ratio != 0.5:
            raise ConfigError(f"pattern={self.pattern!r} takes out half; leave ratio out", field="ratio")
        if self.ratios == "outliers" and self.pattern is not None:
            raise ConfigError("a pattern has one ratio; ratios='outliers' is for weights without one", field="ratios")
        if self.ratios == "outliers" and not 0 <= 2 * self.spread < min(self.ratio, 1 - self.ratio):
            raise ConfigError(f"spread={self.spread} must leave every ratio between 0 and 1", field="spread")
        if not self.outlier > 1:
            raise ConfigError(f"outlier={self.outlier} must be above 1", field="outlier")
        if not 0 < self.damping < 1:
            raise ConfigError(f"damping={self.damping} must lie between 0 and 1", field="damping")
        if not 0 <= self.catch_up <= 1:
            raise ConfigError(f"catch_up={self.catch_up} must be a share from 0 to 1", field="catch_up")

    @property
    def needs_text(self) -> bool:
        return self.method != "magnitude" or self.ratios == "outliers" or self.catch_up > 0

    def takes(self, product: str) -> bool:
        return product != "head" and not any(fnmatchcase(product, pattern) for pattern in self.ignore)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneSettings:
    """Shares to take out, 0 to 1, of each layer's heads (kv groups) and channels, of the hidden width and of the layers.
    Channels and width stay multiples of `multiple`. `drop_layers` names layers instead of ranking them; `size` drops as many as
    leave that share of the model's parameters."""

    heads: float = 0.0
    channels: float = 0.0
    hidden: float = 0.0
    layers: float = 0.0
    drop_layers: tuple[int, ...] = ()
    size: float | None = None
    importance: Importance = "activation"
    multiple: int = 32

    def check(self) -> None:
        for name in ("heads", "channels", "hidden", "layers"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name}={getattr(self, name)} must be a share from 0 to below 1", field=name)
        if self.importance not in get_args(Importance):
            known = ", ".join(get_args(Importance))
            raise ConfigError(f"importance={self.importance!r} is not one of {known}", field="importance")
        if (self.layers > 0) + bool(self.drop_layers) + (self.size is not None) > 1:
            raise ConfigError("give one of layers, a share to rank, drop_layers, their numbers, and size", field="drop_layers")
        if self.size is not None and not 0 < self.size < 1:
            raise ConfigError(f"size={self.size} must be a share between 0 and 1", field="size")
        if self.multiple < 1:
            raise ConfigError(f"multiple={self.multiple} must be at least 1", field="multiple")
        if not (self.heads or self.channels or self.hidden or self.layers or self.drop_layers or self.size):
            raise ConfigError("nothing to prune: give heads, channels, hidden, layers, drop_layers or size", field="prune")

    @property
    def needs_text(self) -> bool:
        """Whether anything is measured."""
        units = max(self.heads, self.channels, self.hidden) > 0
        return self.layers > 0 or self.size is not None or (self.importance != "magnitude" and units)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """`batch_size` sequences a step, over all processes; `micro_batch` at once in one. The loss is `divergence` of the
    distributions times `divergence_weight`, plus the other terms by their weights (`objective.py`). The rate rises over
    `warmup` of the steps and falls along a cosine to `final_rate` of its height. `recompute` trades time for memory."""

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
        for name in ("num_steps", "batch_size", "micro_batch", "eval_every", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1", field=name)
        for name, allowed in (("divergence", get_args(Divergence)), ("dtype", ("bfloat16", "float32"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}", field=name)
        for name in ("temperature", "learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0", field=name)
        for name in ("divergence_weight", "nll_weight", "state_weight", "attention_weight", "weight_decay"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more", field=name)
        for name in ("warmup", "final_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be a share from 0 to 1", field=name)
        if not (self.divergence_weight or self.nll_weight or self.state_weight or self.attention_weight):
            raise ConfigError("nothing to learn from: every weight of the loss is 0", field="divergence_weight")

    def rate(self, step: int) -> float:
        """The learning rate of step 0, 1, …"""
        rising = round(self.warmup * self.num_steps)
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        done = (step - rising) / max(1, self.num_steps - rising)
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill(DistillSettings):
    """Distillation as a recipe's step: from the model as it was to what the steps before made of it.

    It learns from `num_windows` windows of `context` tokens of `text`, and from what the teacher answers to `num_answers`
    questions of it (with `rationale_weight` also why); `held_out` windows of the evaluation part are measured on. With `top_k`
    the teacher runs once, and its likeliest tokens are kept on disk. `num_processes` take a GPU each."""

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
        for name in ("max_tokens", "num_processes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1", field=name)
        for name in ("num_windows", "held_out", "num_answers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more", field=name)
        if self.context < 2:
            raise ConfigError(f"context={self.context} must be at least 2", field="context")
        if self.num_windows + self.num_answers < 1:
            raise ConfigError("nothing to learn from: give num_windows or num_answers", field="num_windows")
        if self.rationale_weight is not None and (self.num_answers < 1 or self.rationale_weight <= 0):
            raise ConfigError("rationale_weight must be above 0, and needs num_answers", field="rationale_weight")
        if self.top_k is not None and (self.top_k < 1 or self.state_weight > 0 or self.attention_weight > 0):
            raise ConfigError("top_k must be at least 1, and keeps no hidden states or attention", field="top_k")
