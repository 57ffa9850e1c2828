"""Checks a folder of `slipstream optimize` on this machine: its objectives under its own traffic, and its answers.

Speed is measured as the search measured it (`worker.speed`). Answers are those of the canary that lies in the folder, made
where its quality was measured: the same checkpoint with a wrong kernel or a changed file does not pass it. With the original
model at hand the quality itself is measured again, on the same text and tasks, and has to keep the same limits.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.config import EngineArgs
from slipstream.config.engine_folder import is_engine_folder, read_engine_folder
from slipstream.engine.folder import this_machine
from slipstream.errors import ConfigError
from slipstream.files import parse_json
from slipstream.optimize.run import QualityLoss

RECORD_NAME = "optimize.json"
QUALITY = ("kl", "kl_stderr", "perplexity_ratio", "tasks", "not_measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Seconds at the 99th percentile: wanted, as the folder was made, and here; None where no request tells it."""

    name: str
    wanted: float
    made: float | None
    here: float | None

    @property
    def met(self) -> bool:
        return self.here is not None and self.here <= self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """`differences`: of this machine from the folder's, in words. `canary`: its KL in nats and the most that it
    may be; None where the folder has none. `quality_here` is what was measured against the original, None where that was not
    asked for; `faults` says which limits it does not keep."""

    objectives: tuple[Objective, ...]
    figures: Mapping[str, Any]
    made: Mapping[str, Any]
    differences: tuple[str, ...]
    quality: Mapping[str, Any]
    canary: Mapping[str, Any] | None
    quality_here: Mapping[str, Any] | None = None
    faults: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        answers = self.canary is None or bool(self.canary["ok"])
        return all(o.met for o in self.objectives) and answers and not self.faults


def read_record(folder: Path) -> dict[str, Any]:
    """What the search wrote. ConfigError if `folder` is none of its."""
    if not is_engine_folder(folder):
        raise ConfigError(
            f"{folder} is no engine folder; `slipstream optimize` makes one", field="folder"
        )
    try:
        found: dict[str, Any] = parse_json((folder / RECORD_NAME).read_bytes())
        (
            found["traffic"]["lengths"][0][1],
            found["chosen"]["figures"],
            found["objectives"],
        )  # it must have them
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} holds no {RECORD_NAME}: `slipstream build` makes such folders, which promise no figures; only those "
            "of `slipstream optimize` do",
            field="folder",
        ) from None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{folder / RECORD_NAME} does not say what the folder promised ({error!r}); only `slipstream optimize` writes it",
            field="folder",
        ) from None
    return found


Job: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]


def check_folder(
    folder: Path,
    *,
    device: str = "auto",
    speed: Job,
    quality: Job | None = None,
    original: str | None = None,
) -> Checked:
    """`speed` is `worker.speed`: it starts the folder's engine and sends the traffic. `quality` is `worker.quality`, which
    needs the `original`."""
    record = read_record(folder)
    args = EngineArgs(model=str(folder), device=device, **record.get("at_start", {}))
    given = {"traffic": record["traffic"], "objectives": record["objectives"]}
    found = speed(
        {"args": dataclasses.asdict(dataclasses.replace(args, skip_tokenizer_init=True)), **given}
    )
    here: dict[str, Any] | None = None
    faults: list[str] = []
    if quality is not None and original is not None:
        here, faults = _quality(record, args, EngineArgs(model=original, device=device), quality)
    made = record["folder"] or record["chosen"]["figures"]
    return Checked(
        objectives=tuple(
            Objective(
                name=name, wanted=most, made=made.get(f"{name}_p99"), here=found.get(f"{name}_p99")
            )
            for name, most in record["objectives"].items()
        ),
        figures=found,
        made=made,
        differences=tuple(read_engine_folder(folder).machine.differences(this_machine())),
        quality={name: record["chosen"]["figures"].get(name) for name in QUALITY},
        canary=found.get("canary"),
        quality_here=here,
        faults=tuple(faults),
    )


def _quality(
    record: Mapping[str, Any], args: EngineArgs, original: EngineArgs, quality: Job
) -> tuple[dict[str, Any], list[str]]:
    """What is measured, and the limits of the search that it does not keep."""
    if record["chosen"]["figures"].get("not_measured"):
        raise ConfigError(
            "the folder was made with random weights, which have no quality to measure",
            field="against",
        )
    limits = record["limits"]
    kept = QualityLoss(
        kl=limits["kl"],
        perplexity=limits["perplexity"],
        tasks=tuple((n, most) for n, most in limits["tasks"]),
    )
    with tempfile.TemporaryDirectory() as receipt:
        job = {
            "original": dataclasses.asdict(original),
            "args": dataclasses.asdict(args),
            "folder": receipt,
        }
        job |= {
            "text": limits["text"],
            "tasks": [name for name, _ in kept.tasks],
            "limit": limits["task_limit"],
        }
        job |= {
            "name": record["chosen"]["compression"],
            "recipe": {"name": record["chosen"]["compression"]},
        }
        found = quality(job)
    return found, kept.faults(found)
