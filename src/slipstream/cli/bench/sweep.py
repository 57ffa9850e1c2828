"""`slipstream sweep FILE`: measures engines × models × schemes × lengths × batch sizes × parallel
forms, and shows the results on a page.

FILE is a TOML file (docs/sweeps.md), or the Parquet file of an earlier sweep, from which only the
page is made again. An interrupted sweep continues. A failure is a row with its error; the exit code
is 1 if every row failed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.base.files import sole_writer, writing
from slipstream.cli.console import Progress, print_json, say, shown
from slipstream.cli.options import add_output_options
from slipstream.costs.environment import plain
from slipstream.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.bench.sweep.dashboard import SweepRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="what to measure (TOML), or results (Parquet) to show"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="where rows, results and the page go (default: FILE without its ending)",
    )
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        help="results (Parquet) of another sweep, to compare with on the page",
    )
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be measured, and measure nothing"
    )
    parser.add_argument(
        "--no-ceilings",
        action="store_true",
        help="leave out this machine's ceilings, for the roofline",
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    from slipstream.bench.sweep.results import PAGE_NAME, PARQUET_NAME, pyarrow, read_parquet

    file = Path(args.file).expanduser()
    baseline = _baseline(args)
    if file.suffix == ".parquet":
        folder = _folder(args.out or file.parent)
        rows, meta = read_parquet(file)
        with writing(folder, "out"):
            _write_page([*_runs(meta["name"], rows, meta), *baseline], folder / PAGE_NAME)
        return _show(args, rows, folder / PAGE_NAME, None)

    from slipstream.bench.sweep.grid import read_grid
    from slipstream.bench.sweep.runner import run_sweep

    grid = read_grid(file)
    if args.dry_run:
        return _dry_run(args, grid)
    pyarrow()  # raises an error before measuring if it is missing
    folder = _folder(args.out or file.with_suffix(""))
    with sole_writer(folder), shown(Progress(f"sweep {grid.name}")) as progress:
        try:
            rows = run_sweep(grid, folder, retry=args.retry, on_row=progress.update)
        except KeyboardInterrupt:
            say(
                "slipstream: interrupted; what was measured is kept, and the same command goes on from there"
            )
            raise
        ceilings = None
        if not args.no_ceilings:
            progress.update("ceilings", len(rows), len(rows))
            ceilings = measured_ceilings()

    from slipstream.bench.report import document
    from slipstream.bench.sweep.results import write_parquet

    meta = json.loads(
        json.dumps(document("sweep", name=grid.name, ceilings=ceilings), default=plain)
    )
    with writing(folder, "out"):
        write_parquet(rows, folder / PARQUET_NAME, meta)
        _write_page([*_runs(grid.name, rows, meta), *baseline], folder / PAGE_NAME)
    return _show(args, rows, folder / PAGE_NAME, folder / PARQUET_NAME)


def _folder(path: str | Path) -> Path:
    folder = Path(path).expanduser()
    with writing(folder, "out"):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write {folder}", field="out")
    return folder


def _runs(name: str, rows: list[dict[str, Any]], meta: dict[str, Any]) -> list[SweepRun]:
    from slipstream.bench.sweep.dashboard import SweepRun

    return [SweepRun(name=name, rows=rows, meta=meta)]


def _baseline(args: argparse.Namespace) -> list[SweepRun]:
    from slipstream.bench.sweep.results import read_parquet

    if args.baseline is None:
        return []
    rows, meta = read_parquet(Path(args.baseline).expanduser())
    return _runs(f"{meta['name']} (baseline)", rows, meta)


def _write_page(runs: list[SweepRun], path: Path) -> None:
    from slipstream.bench.sweep.dashboard import render

    path.write_text(render(runs), encoding="utf-8")


def _dry_run(args: argparse.Namespace, grid: Any) -> int:
    setups = [setup.name for setup in grid.setups()]
    if args.json:
        print_json({"name": grid.name, "setups": setups, "num_rows": grid.num_rows})
    else:
        print("\n".join(setups))
        print(f"{len(setups)} setups, {grid.num_rows} rows")
    return 0


def _show(
    args: argparse.Namespace, rows: list[dict[str, Any]], page: Path, parquet: Path | None
) -> int:
    from slipstream.bench.report import print_definitions, print_table

    failed = [row for row in rows if "error" in row]
    if args.json:
        print_json(
            {
                "num_rows": len(rows),
                "num_failed": len(failed),
                "results": parquet,
                "page": page,
                "rows": rows,
            }
        )
    else:
        names = ("output_throughput", "total_throughput", "ttft_s_p50", "tpot_s_p50", "power_w")
        columns = ("", "out tok/s", "all tok/s", "TTFT, ms", "TPOT, ms", "W")
        cells = []
        for row in rows:
            name = " · ".join(str(row[part]) for part in ("label", "model", "scheme", "parallel"))
            name += f" · {row['input_len']}/{row['output_len']} × {row['batch_size']}"
            values = [row.get(column) for column in names]
            scale = [1, 1, 1e3, 1e3, 1]
            cells.append(
                (
                    name,
                    *(
                        "–" if v is None else f"{v * s:,.2f}"
                        for v, s in zip(values, scale, strict=True)
                    ),
                )
            )
        print_table(f"{len(rows)} rows, {len(failed)} of them failed", columns, cells)
        for error in dict.fromkeys(row["error"] for row in failed):
            say(f"slipstream: {sum(row['error'] == error for row in failed)} rows: {error}")
        print_definitions()
        print(f"\npage     {page}" + (f"\nresults  {parquet}" if parquet else ""))
    return 1 if rows and len(failed) == len(rows) else 0


def measured_ceilings() -> dict[str, float] | None:
    """Measured limits of this machine's CPU: bytes read per second, and operations per second by
    dtype. None without the C++ kernels."""
    from slipstream.costs.hardware import available_cores
    from slipstream.kernels.cpu.thread_pool import ThreadPool
    from slipstream.worker.start.roofline import measure_ceilings

    try:
        found = measure_ceilings(ThreadPool(available_cores()))
    except SlipstreamError as error:
        say(f"slipstream: no ceilings: {error}")
        return None
    return dataclasses.asdict(found)
