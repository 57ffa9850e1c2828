"""Checks a folder of `slipstream optimize` on this machine: its latency objectives under its own
traffic, and its model's answers.

Speed is measured as in the search (`worker.speed`). Answers are compared by the canary in the
folder, which was made on the machine where the quality was measured: a wrong kernel or a changed
file makes it fail. If the original model is given, the quality is measured again on the same text
and tasks, and must be within the same limits."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.base.files import parse_json
from slipstream.config import EngineArgs
from slipstream.config.engine_folder import is_engine_folder, read_engine_folder
from slipstream.engine.folder import this_machine
from slipstream.errors import ConfigError
from slipstream.optimize.run import QualityLoss

RECORD_NAME = "optimize.json"
QUALITY = ("kl", "kl_stderr", "perplexity_ratio", "tasks", "not_measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Latency at the 99th percentile in seconds: the limit, the value measured when the folder was
    made, and the one measured here. None if no request has a value."""

    name: str
    wanted: float
    made: float | None
    here: float | None

    @property
    def met(self) -> bool:
        return self.here is not None and self.here <= self.wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Result of a check.

    - `differences`: differences between this machine and the folder's, as text.
    - `canary`: its KL in nats and the limit; None if the folder has no canary.
    - `quality_here`: the quality relative to the original; None if it was not measured.
    - `faults`: exceeded quality limits."""

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
    """Read the record that the search wrote. ConfigError if `folder` was not made by a search."""
    if not is_engine_folder(folder):
        raise ConfigError(
            f"{folder} is not an engine folder; `slipstream optimize` makes one", field="folder"
        )
    try:
        found: dict[str, Any] = parse_json((folder / RECORD_NAME).read_bytes())
        # KeyError, IndexError or TypeError if an entry is missing
        (found["traffic"]["lengths"][0][1], found["chosen"]["figures"], found["objectives"])
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {RECORD_NAME}: a folder of `slipstream build` has no figures to check; only those "
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
    """Check a folder. `speed` (`worker.speed`) starts the folder's engine and sends the traffic.
    `quality` (`worker.quality`) needs `original`."""
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
    """(measured quality, limits of the search that are exceeded)."""
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
