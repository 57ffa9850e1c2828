"""Commands to paste at the end of `plan` and `bench`, and the warning about a busy machine."""

from __future__ import annotations

import argparse

import pytest

from slipstream.cli import plan
from slipstream.cli.bench import measurements
from slipstream.cli.main import build_parser, main


def test_bench_ends_with_the_command_that_serves_with_its_settings(tiny_model, capsys):
    words = [
        "--batch-sizes=1",
        "--input-len=4",
        "--output-len=2",
        "--device=cpu",
        "--dtype=float32",
    ]
    assert main(["bench", "latency", str(tiny_model), *words, "--num-threads=1"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    command = last.removeprefix("to serve it like this: slipstream ").split()
    assert build_parser().parse_args(command).num_threads == 1


def test_command_has_each_engine_option_that_was_given():
    given = {"kv_cache_dtype": "int8", "enable_prefix_caching": False, "num_threads": 2}
    args = argparse.Namespace(model="m", batch_sizes="1", **given)
    command = measurements.serve_command(args)
    assert command.startswith("slipstream serve m ")
    assert "--no-enable-prefix-caching" in command
    assert "--kv-cache-dtype int8" in command
    assert "batch" not in command


def test_plan_ends_with_a_command_of_the_given_options_and_the_recommended_settings():
    args = argparse.Namespace(model="m", rate=3.0, quantization="fp8", max_num_seqs=8)
    rows = [("max_num_seqs", 64), ("replicas", 2), ("tensor_parallel_size", 1)]
    found = plan.serve_command(args, [{"setting": n, "value": v} for n, v in rows])
    assert found is not None
    assert found.startswith("slipstream serve m ")
    words = found.removeprefix("slipstream ").split()
    served = build_parser().parse_args(words)
    assert (served.quantization, served.max_num_seqs, served.tensor_parallel_size) == ("fp8", 64, 1)
    assert not any("rate" in word or "replicas" in word for word in words)
    assert plan.serve_command(args, []) is None


@pytest.mark.parametrize(("busy", "warns"), [(0.1, False), (1.5, True)])
def test_busy_machine_is_said_before_a_measurement(monkeypatch, capsys, busy, warns):
    monkeypatch.setattr("slipstream.costs.hardware.busy_cores", lambda: busy)
    monkeypatch.setattr("slipstream.costs.hardware.available_cores", lambda: 2)
    measurements.warn_if_busy()
    assert ("other programs keep 1.5 of 2 cores busy" in capsys.readouterr().err) is warns
