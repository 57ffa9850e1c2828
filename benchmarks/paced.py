"""An engine whose steps compute nothing: a step sleeps for a given time and gives random common tokens. All else is real.

    python benchmarks/paced.py STEP_MS serve smollm2 …        # `slipstream serve`, over such an engine

For what serving takes of the processor, on a machine that has something else to do (study `online_share`). On a CPU only.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

COMMON = range(300, 3300)
"""Tokens of answers: as many kinds as a text has, which stand in the first thousands of a vocabulary."""

CORE = "slipstream.engine.process.core_process"


def pace(step_s: float) -> None:
    """Engine processes that this process starts are paced."""
    from slipstream.engine.process import child_link

    def started(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        if command[1:3] == ["-m", CORE]:
            command = [command[0], __file__, str(step_s * 1e3), CORE, *command[3:]]
        return subprocess.Popen(command, **how)

    child_link.subprocess = type(
        "Started", (), {**vars(subprocess), "Popen": staticmethod(started)}
    )  # type: ignore[assignment]


def run_core(step_s: float, address: str) -> int:
    """The engine's process."""
    import numpy as np

    from slipstream.engine.process import core_process
    from slipstream.worker.in_flight import InFlightStep
    from slipstream.worker.model_runner import ModelRunner

    random = np.random.default_rng(0)

    def launch(runner: ModelRunner, plan: Any) -> InFlightStep:
        sampled = runner.prepare(plan).gathered.sampled
        time.sleep(step_s)
        tokens = random.integers(
            COMMON.start, min(COMMON.stop, runner.model.spec.vocab_size), len(sampled.rows)
        )
        runner.rows.write(sampled.rows, sampled.positions, tokens)  # type: ignore[arg-type]
        return InFlightStep(plan, sampled, tokens, None)  # type: ignore[arg-type]

    ModelRunner.launch = launch  # type: ignore[assignment,method-assign]
    sys.argv = [CORE, address]
    return core_process.main()


def main() -> int:
    step_s, verb = float(sys.argv[1]) / 1e3, sys.argv[2]
    if verb == CORE:
        return run_core(step_s, sys.argv[3])
    from slipstream.cli.main import main as slipstream

    pace(step_s)
    return slipstream(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
