"""Whole output of commands for a result; then the other lines of one that lacks what it may lack. Blocks of printed.txt."""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.bench.report import print_summary, print_table
from slipstream.bench.session_metrics import AgentSummary
from slipstream.cli import compress, doctor, evaluate, optimize, plan
from slipstream.cli.bench import agents, folder, roofline, sweep
from slipstream.cli.bench.serve import _ServeBench
from slipstream.cli.serving import fleet_simulation
from slipstream.compress.report import QualityLimits, Report, Side
from slipstream.costs.metrics import DEFINITIONS, Summary
from slipstream.evals.text import TextSettings
from slipstream.fleet.simulation.report import CallTimes, FleetStudy
from slipstream.optimize.candidates import Candidate, TrialResult
from slipstream.optimize.check import Checked
from slipstream.verify import report as verified
from slipstream.worker.start.cpu_choice import CpuChoice
from slipstream.worker.start.diagnosis import Diagnosis
from slipstream.worker.start.roofline import Ceilings, Roofline

TEXT = (Path(__file__).parent / "printed.txt").read_text()
DEFINED = {f"{name}: {text}" for name, text in DEFINITIONS.items()}
BLOCKS = dict(block.split("\n", 1) for block in TEXT.split("## ")[1:])


def filled(kind: Any, whole: bool, **given: Any) -> Any:
    """An object of `kind` with other numbers in each field. Without `whole` what may lack does."""
    numbers, within = itertools.count(1), set()

    def of(kind: Any) -> Any:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if origin in (typing.Union, types.UnionType):
            made = of(args[0])
            return made if whole or type(None) not in args else None
        if origin is typing.Literal:
            return args[0]
        if origin is tuple and args[-1:] != (...,):
            return tuple(map(of, args))
        if isinstance(origin, type) and issubclass(origin, Mapping):
            made = {of(args[0]): of(args[1])}
            return made if whole else {}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            made = () if args[0] in within else (of(args[0]), of(args[0]))  # of itself
            return origin(made if whole else ())
        if dataclasses.is_dataclass(kind):
            within.add(kind)
            hints = typing.get_type_hints(kind, localns={"CpuChoice": CpuChoice})
            fields = {f.name: of(hints[f.name]) for f in dataclasses.fields(kind) if f.init}
            within.remove(kind)
            return kind(**fields)
        number = next(numbers)
        plain = {bool: whole, int: 1000 + number, float: number + 0.25, Path: Path(f"/p{number}")}
        return plain.get(kind, f"{number}th")

    hints = typing.get_type_hints(kind, localns={"CpuChoice": CpuChoice})
    names = [f.name for f in dataclasses.fields(kind) if f.name not in given]
    return kind(**{name: of(hints[name]) for name in names}, **given)


def show_folder(whole: bool) -> None:
    loss = {"kl": 0.0123, "perplexity_ratio": 1.0234, "not_measured": None}
    more = {
        "figures": {"output_throughput": 1234.5, **({"j_per_output_token": 1.5} if whole else {})},
        "made": {"output_throughput": 2000.0},
        "quality": loss if whole else {"not_measured": "random weights"},
        "canary": {"ok": False, "kl": 0.5, "most": 0.25} if whole else None,
        "quality_here": loss if whole else None,
    }
    folder._show(Path("/d/name"), filled(Checked, whole, **more))


def show_roofline(whole: bool) -> None:
    found = filled(
        Roofline,
        whole,
        num_threads=1 + whole,
        ceilings=Ceilings(read=1.5e9, int6=2e9, int8=3e9, bfloat16=4e9, float32=5e9),
    )
    roofline._show("M", found)


def show_eval(whole: bool) -> None:
    run_as = {
        "dtype": "T",
        "quantization": "Q" if whole else None,
        "kv_cache_dtype": "C",
        "kernels": "K",
    }
    a, b = (
        filled(Side, whole, run_as=run_as, file_bytes=n, tokens_per_s={1: n} if whole else {})
        for n in (5000, 3000)
    )
    more = {"original": a, "compressed": b, "canary": None, "text": TextSettings(), "recipe": None}
    found = filled(Report, whole, limits=QualityLimits(), info={}, **more)
    evaluate._print(found)
    print(*compress._report_rows(found) if whole else (), sep="\n")


def show_fleet(whole: bool) -> None:
    times = {name: CallTimes(2000, 1.5, 2.5, 3.5, 4.25, 5) for name in ("load", "changes")}
    study = filled(FleetStudy, whole)
    figures = dataclasses.replace(study.figures, gateway=times if whole else {})
    fleet_simulation.show(dataclasses.replace(study, figures=figures))


def show_sweep(whole: bool) -> None:
    row = {"label": "L", "model": "M", "scheme": "S", "parallel": "P", "input_len": 7}
    row |= {"output_len": 8, "batch_size": 9}
    found = {"output_throughput": 1234.5, "ttft_s_p50": 0.0125, "tpot_s_p50": 0.25, "power_w": 3.0}
    rows = [{**row, **found}, {**row, "error": "no"}, {**row, "error": "no"}]
    code = sweep._show(
        Namespace(json=False),
        rows if whole else rows[1:],
        Path("/page"),
        Path("/r") if whole else None,
    )
    print(code)


def show_optimize(whole: bool) -> None:
    figures = {"predicted_throughput": 1500.0, "ttft_s_p99": 0.0625, "kl_stderr": 0.01}
    figures |= {"kl": 0.0125, "perplexity_ratio": 1.02} if whole else {"not_measured": "random"}
    one = TrialResult(
        candidate=Candidate("int8", (("block_size", 16), ("x", None))),
        **({"throughput": 1234.5, "tpot_s": 0.0125, "kl": 0.0125} if whole else {}),
        figures=figures,
    )
    failed = TrialResult(candidate=Candidate("int4"), error="no room")
    search = Namespace(
        results=[one, failed],
        front=lambda: [one],
        points=lambda: [one],
        why_ended="time",
        space=Namespace(candidates=lambda: [one, failed, one]),
    )
    again = {"output_throughput": 900.0, "tpot_s_p99": 0.015}
    row = {"output_throughput": 2500.0, "ttft_s_p99": 0.125, "answers": 2}
    found = Namespace(
        search=search,
        chosen=one,
        at_start={"kv_cache_dtype": "a b", "num_threads": 2},
        again=again if whole else None,
        replicas=[{**row, "prompts": 0}, {**row, "prompts": 1, "tpot_s_p99": 0.25}]
        if whole
        else [],
    )
    study = Namespace(
        objectives={"tpot_s": 0.01, "ttft_s": 0.05} if whole else {}, out=Path("/out")
    )
    print(optimize._show(Namespace(json=False), study, found))
    print(optimize._line(one), optimize._line(failed), sep="\n")


def show_rates(whole: bool) -> None:
    run = {"ttft_p99": 0.0125 if whole else None, "results": Namespace(num_failed=3)}
    target = Namespace(
        name="T", tried=[{"rate": 2.5, "held": whole, **run}, {"rate": 1, "held": 1, **run}]
    )
    _ServeBench._print_search(
        None, target, Namespace(best=2.5 if whole else None), {"ttft_p99": 1}, print_table
    )


def show_agents(whole: bool) -> None:
    found = filled(AgentSummary, whole, num_gpus=2 if whole else 1, num_short=5 * whole)
    agents.print_agents("T", found)
    print(*agents.frontier_row(found), sep=" | ")
    print(agents._one_line("T", None, 1, found))


def show_verified(whole: bool) -> None:
    rare = {"one_in_answers": 8.5, "one_in_tokens": 70.0, "one_in_long_answers": 3.0}
    finding = filled(verified.Verdict, False, check="C", outcome="undecided" if whole else "sound")
    about = {
        "model": "M",
        "num_answers": 1234,
        "num_tokens": 23456,
        "num_prompt_tokens": 3456,
        "max_kl": 0.05,
        "rates": {"beta": 0.005},
        "excluded": {**(rare if whole else dict.fromkeys(rare)), "without_logprobs": 0.5},
        "scores": {"agreement": {"value": 0.75, "low": 0.5, "high": 0.875, "count": 1234}},
    }
    found = verified.document(about, [finding])
    print(found["verdict"], *verified.scores(found), *verified.summary(found), sep="\n")


def show_plan(whole: bool) -> None:
    told = {"hit_rate": 0.5 if whole else None, "cacheable_rate": 0.625, "turns_per_minute": 1234.5}
    told |= {"sessions_of_a_replica": 1500 if whole else None, "output_throughput_per_gpu": 2345.6}
    told["interactivity"] = {"p50": 12.5, "p90": 6.25} if whole else None
    print(*plan.agent_rows(told), sep="\n")


SHOWN = {
    "bench agents": show_agents,
    "bench folder": show_folder,
    "bench roofline": show_roofline,
    "bench serve": lambda whole: print_summary("T", filled(Summary, whole)),
    "bench serve --find-rate": show_rates,
    "bench sweep": show_sweep,
    "doctor": lambda whole: doctor._show(filled(Diagnosis, whole)),
    "eval": show_eval,
    "fleet simulate": show_fleet,
    "optimize": show_optimize,
    "plan --workload agents": show_plan,
    "verify": show_verified,
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_result_is_printed_as_the_block_says(name, capsys, monkeypatch):
    monkeypatch.setattr("slipstream.__version__", "V")
    monkeypatch.setattr("platform.python_version", lambda: "P")
    monkeypatch.setattr("sys.executable", "/python")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")

    def lines(of_all: bool) -> list[str]:
        SHOWN[name](of_all)
        told = "".join(capsys.readouterr())
        return [line.rstrip() for line in told.splitlines() if line not in DEFINED]

    whole, least = lines(True), lines(False)
    shown = "\n".join([*whole, "-- least:", *(line for line in least if line not in whole)])
    assert shown.strip() == BLOCKS[name].strip()
