"""Runs a sweep: one process per setup, one row per case, whatever fails.

If a process dies or takes too long, only its current case is lost, and another process is started for the
next one. If the model can't be loaded, all cases of the setup become rows with the same error."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slipstream.bench.adapters import AS_STORED, ENGINES, EngineSetup, check
from slipstream.bench.sweep.grid import Case, Grid, SetupSpec
from slipstream.bench.sweep.results import Row, append, read_rows
from slipstream.costs.decode_cost import decode_step
from slipstream.costs.environment import plain
from slipstream.errors import ConfigError, EngineError, SlipstreamError
from slipstream.hub import resolve_model
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.scheme import SCHEMES

OnRow = Callable[[str, int, int], None]
"""Called with the current measurement, the number of rows so far, and the total."""

LOG_TAIL = 600
CLOSE_S = 30.0


def run_sweep(
    grid: Grid, folder: Path, *, retry: bool = False, on_row: OnRow = lambda what, done, total: None
) -> list[Row]:
    """Measure the cases without a row in `folder`. Returns all rows of the grid, in its order. With
    `retry`, rows with an error are measured again."""
    known = {row["key"]: row for row in read_rows(folder) if not (retry and "error" in row)}
    jobs, total, order, done = list(grid.jobs()), grid.num_rows, list[str](), 0
    for setup, cases in jobs:
        keys = [grid.key(setup, case) for case in cases]
        order += keys
        waiting = [(key, case) for key, case in zip(keys, cases, strict=True) if key not in known]
        done += len(cases) - len(waiting)
        if not waiting:
            continue
        on_row(setup.name, done, total)
        for (key, case), found in zip(
            waiting, _measure(grid, setup, [case for _, case in waiting], folder), strict=True
        ):
            row = {**_identity(key, setup, case), **found}
            known[key] = row
            append(row, folder)
            done += 1
            on_row(setup.name, done, total)
    return [known[key] for key in order]


def _identity(key: str, setup: SetupSpec, case: Case) -> Row:
    return {
        "key": key,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "engine": setup.engine.engine,
        "label": setup.engine.label,
        "model": setup.model,
        "scheme": setup.scheme,
        "parallel": str(setup.parallel),
        **dataclasses.asdict(case),
    }


def _measure(grid: Grid, spec: SetupSpec, cases: list[Case], folder: Path) -> Iterator[Row]:
    """Yields the values of each case's row, in order."""
    try:
        setup, description = make_setup(grid, spec)
        vocab_size = grid.vocab_size if description is None else description.spec.vocab_size
        if vocab_size is None:
            raise ConfigError(
                f"{spec.engine.label} finds {spec.model!r} itself; say how many token ids there are: vocab_size",
                field="vocab_size",
            )
    except SlipstreamError as error:
        yield from ({"error": str(error)} for _ in cases)
        return
    worker: Worker | None = None
    shared = {
        "seed": grid.seed,
        "warmup": grid.warmup,
        "objectives": dict(grid.objectives),
        "vocab_size": vocab_size,
    }
    try:
        for number, case in enumerate(cases):
            try:
                if worker is None:
                    worker = Worker(setup, spec, folder / "logs")
                    worker.start(grid.start_timeout_s)
            except EngineError as error:
                yield from ({"error": str(error)} for _ in cases[number:])
                return
            try:
                found = worker.ask({**dataclasses.asdict(case), **shared}, grid.timeout_s)
            except EngineError as error:
                worker.kill()
                worker = None
                yield {"error": str(error)}
                continue
            yield {
                **worker.started,
                **found,
                **(_cost(description, spec, case, found) if description else {}),
            }
    except BaseException:  # interrupted, or the caller needs no more rows: a case may be running
        if worker is not None:
            worker.kill()
        raise
    if worker is not None:
        worker.close()


def make_setup(grid: Grid, spec: SetupSpec) -> tuple[EngineSetup, ModelDescription | None]:
    """The setup for the process. The model is found, or downloaded, here, unless the engine finds
    it itself."""
    kind, engine = ENGINES[spec.engine.engine], spec.engine
    settings = dict(engine.settings)
    download_dir = settings.get("download_dir") if engine.engine == "slipstream" else None
    path = None
    try:
        path = resolve_model(spec.model, download_dir=download_dir)
    except SlipstreamError:
        if not kind.remote:
            raise
    setup = EngineSetup(
        engine=engine.engine,
        model=spec.model,
        path=path,
        scheme=spec.scheme,
        parallel=spec.parallel,
        batch_size=max(grid.batch_sizes),
        max_model_len=grid.max_model_len,
        settings=settings,
    )
    check(setup)
    return setup, None if path is None else read_spec(path)


def _cost(description: ModelDescription, spec: SetupSpec, case: Case, found: Row) -> Row:
    """Estimated work of the row's decode steps for the roofline; empty without a decode step time."""
    tpot = found.get("tpot_s_p50")
    if not tpot or (spec.scheme != AS_STORED and spec.scheme not in SCHEMES):
        return {}
    cost = decode_step(
        description,
        batch_size=case.batch_size,
        context=case.input_len + case.output_len / 2,
        scheme=None if spec.scheme == AS_STORED else spec.scheme,
    )
    return {
        "step_bytes": cost.num_bytes,
        "step_flops": cost.num_flops,
        "flops_per_byte": cost.num_flops / cost.num_bytes,
        "achieved_bytes_per_s": cost.num_bytes / tpot,
        "achieved_flops_per_s": cost.num_flops / tpot,
    }


class Worker:
    """A process of `worker.py`, in a process group of its own with all processes that it starts.
    Its messages go to a file in `logs`."""

    def __init__(self, setup: EngineSetup, spec: SetupSpec, logs: Path) -> None:
        logs.mkdir(exist_ok=True)
        self.started: Row = {}
        self._setup = setup
        self._log = logs / f"{spec.engine.label}.log".replace("/", "_")
        # The other interpreter can import this package, and nothing else of this environment.
        self._source = tempfile.TemporaryDirectory(prefix="slipstream-sweep-")
        (Path(self._source.name) / "slipstream").symlink_to(Path(__file__).parents[2])
        ours = [] if spec.engine.python else filter(None, [os.environ.get("PYTHONPATH")])
        python = spec.engine.python or sys.executable
        with self._log.open("ab") as log:
            self._log_begin = log.tell()
            try:
                self._process = subprocess.Popen(
                    [python, "-m", "slipstream.bench.sweep.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join([self._source.name, *ours])},
                    start_new_session=True,
                    text=True,
                )
            except OSError as error:
                raise EngineError(f"{python!r} can't be started: {error.strerror}") from None
        self._replies: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def start(self, timeout_s: float) -> None:
        """Load the model. EngineError, with the process ended, if that takes too long."""
        try:
            self.started = self.ask(dataclasses.asdict(self._setup), timeout_s, what="start")
            if "error" in self.started:
                raise EngineError(self.started["error"])
        except EngineError:
            self.kill()
            raise

    def ask(self, message: Mapping[str, Any], timeout_s: float, what: str = "case") -> Row:
        """Send a message and return the reply. EngineError if it takes too long, or if the process
        dies."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message, default=plain) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it is dead: reported below
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            raise EngineError(f"timeout: the {what} took more than {timeout_s:g} s") from None
        if line is None:
            raise EngineError(
                f"the engine's process ended ({self._ending()}): {self._last_words()}"
            )
        found: Row = json.loads(line)
        return found

    def _ending(self) -> str:
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _last_words(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._log_begin)
            said = log.read().decode(errors="replace").strip()
        return said[-LOG_TAIL:].split("\n", 1)[-1] if said else "it said nothing"

    def close(self) -> None:
        """Ask the process to end; kill it if it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._source.cleanup()
