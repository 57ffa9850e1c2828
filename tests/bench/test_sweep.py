"""`slipstream sweep`: its file, its processes and what becomes of those that fail, its results, and going on where it was."""

from __future__ import annotations

import json
import os
import tomllib
from types import SimpleNamespace

import pytest

from slipstream.bench.adapters import EngineSetup, Parallel, check
from slipstream.bench.sweep import runner
from slipstream.bench.sweep.grid import parse_grid, read_grid
from slipstream.bench.sweep.results import (
    COLUMNS,
    append,
    columns_of,
    read_parquet,
    read_rows,
    write_parquet,
)
from slipstream.cli.main import main
from slipstream.errors import ConfigError
from tests.server.conftest import serving

pytest.importorskip(
    "pyarrow", reason="results are Parquet, which needs pyarrow (the extra `sweep`)"
)

BASE = """
models = ["m"]
lengths = [[8, 4]]
batch_sizes = [2, 1]
"""
SMALL = {
    "load_format": "dummy",
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "kv_cache_bytes": 8 * 2**20,
}


def grid_of(text, **more):
    return parse_grid({**tomllib.loads(BASE + text), **more}, name="g")


def test_grid_is_the_product_of_its_axes():
    grid = grid_of(
        """
        repeats = 3
        schemes = ["none", "int8"]
        parallel = ["tp1", "tp2pp2"]
        [[engines]]
        engine = "slipstream"
        [[engines]]
        engine = "llamacpp"
        schemes = ["none"]
        """
    )
    setups = list(grid.setups())
    assert [(s.engine.label, s.scheme, str(s.parallel)) for s in setups] == [
        *(
            ("slipstream", scheme, form)
            for scheme in ("none", "int8")
            for form in ("tp1", "tp2pp2")
        ),
        *(("llamacpp", "none", form) for form in ("tp1", "tp2pp2")),
    ]
    assert grid.num_rows == 6 * 2 * 3
    sizes = [case.batch_size for _, cases in grid.jobs() for case in cases]
    assert sizes[:6] == [1, 1, 1, 2, 2, 2]
    keys = {grid.key(setup, case) for setup, cases in grid.jobs() for case in cases}
    assert len(keys) == grid.num_rows


def test_alternating_repetitions_take_turns():
    text = 'repeats = 2\nalternate = true\n[[engines]]\nengine = "llamacpp"\n[[engines]]\nengine = "openvino"'
    jobs = list(grid_of(text).jobs())
    assert [(s.engine.label, {c.repeat for c in cases}) for s, cases in jobs] == [
        *((name, {r}) for r in (0, 1) for name in ("llamacpp", "openvino"))
    ]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('[[engines]]\nengine = "vlm"', "engines[0].engine"),
        ('[[engines]]\nengine = "slipstream"\nscheme = ["int8"]', "engines[0].scheme"),
        ('[[engines]]\nengine = "slipstream"\nschemes = ["int9"]', "engines[0].schemes"),
        ('[[engines]]\nengine = "openai"\nschemes = ["auto"]', "engines[0].schemes"),
        (
            '[[engines]]\nengine = "slipstream"\nsettings = {dtyp = "float32"}',
            "engines[0].settings",
        ),
        (
            '[[engines]]\nengine = "openvino"\nsettings = {dtype = "float32"}',
            "engines[0].settings.dtype",
        ),
        ('[[engines]]\nengine = "openvino"\nparallel = ["2"]', "engines[0].parallel"),
        ('[[engines]]\nengine = "openvino"\n[[engines]]\nengine = "openvino"', "label"),
        ('repeats = 0\n[[engines]]\nengine = "openvino"', "repeats"),
        ('objectives = {ttft = 1}\n[[engines]]\nengine = "openvino"', "objectives"),
        ('objectives = {ttft_s = 0}\n[[engines]]\nengine = "openvino"', "objectives"),
        ('batch_size = [1]\n[[engines]]\nengine = "openvino"', "batch_size"),
        ("repeats = 1", "engines"),
        ('repeats = 1000000000\n[[engines]]\nengine = "openvino"', "repeats"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_its_fault(text, field):
    with pytest.raises(ConfigError) as caught:
        grid_of(text)
    assert caught.value.field == field


def test_files_that_are_no_toml(tmp_path):
    (tmp_path / "x.toml").write_text("a = [")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    (tmp_path / "long.toml").write_text("a = " + "1" * 5000)
    broken = [(name, "can't be read as TOML") for name in ("x.toml", "deep.toml", "long.toml")]
    for name, told in (*broken, ("absent.toml", "cannot read the sweep .*: No such file")):
        with pytest.raises(ConfigError, match=told) as caught:
            read_grid(tmp_path / name)
        assert name in str(caught.value)


def test_what_an_engine_does_not_do_is_said_by_name():
    for setup, field in (
        (EngineSetup(engine="llamacpp", model="m", scheme="int8"), "scheme"),
        (EngineSetup(engine="transformers", model="m", parallel=Parallel(tensor=2)), "parallel"),
        (EngineSetup(engine="vllm", model="m", parallel=Parallel(context=2)), "parallel"),
        (EngineSetup(engine="openvino", model="m", settings={"url": "x"}), "url"),
        (EngineSetup(engine="none", model="m"), "engine"),
    ):
        with pytest.raises(ConfigError) as caught:
            check(setup)
        assert caught.value.field == field


def test_rows_survive_a_line_that_was_cut_off(tmp_path):
    for key in ("a", "b", "a"):
        append({"key": key, "output_throughput": float(len(read_rows(tmp_path)))}, tmp_path)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"key": "c", "outp')
    assert read_rows(tmp_path) == [
        {"key": "b", "output_throughput": 1.0},
        {"key": "a", "output_throughput": 2.0},
    ]
    append({"key": "c"}, tmp_path)
    assert [row["key"] for row in read_rows(tmp_path)] == ["b", "a", "c"]
    with pytest.raises(ValueError, match="no column"):
        append({"key": "d", "speed": 1}, tmp_path)


def test_parquet_gives_back_what_went_in(tmp_path):
    rows = [
        {"key": "a", "label": "x", "batch_size": 4, "tpot_s_p50": 0.25},
        {"key": "b", "label": "x", "batch_size": 8, "error": "no"},
    ]
    write_parquet(rows, tmp_path / "r.parquet", {"name": "n"})
    assert read_parquet(tmp_path / "r.parquet") == (rows, {"name": "n"})
    write_parquet([{**rows[0], "scheme": "auto"}], tmp_path / "old.parquet", {"name": "n"})
    assert read_parquet(tmp_path / "old.parquet")[0] == [
        {**rows[0], "scheme": "none"}
    ]  # the word of older sweeps
    assert columns_of(rows) == {
        "key": ["a", "b"],
        "label": ["x", "x"],
        "batch_size": [4, 8],
        "error": [None, "no"],
        "tpot_s_p50": [0.25, None],
    }
    import pyarrow
    import pyarrow.parquet

    assert pyarrow.parquet.read_schema(tmp_path / "r.parquet").names == list(COLUMNS)
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="is not a result"):
        read_parquet(tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="there is no file"):
        read_parquet(tmp_path / "missing.parquet")


def sweep(capsys, *words, code=0):
    assert main(["sweep", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def toml(value):
    return "{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in value.items()) + "}"


@pytest.fixture
def interpreter(tmp_path):
    """Makes a program that stands for an engine's interpreter."""

    def made(name, script):
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        return str(file)

    return made


def test_a_sweep_measures_and_keeps_what_fails_and_goes_on(
    config_only, tmp_path, capsys, interpreter, monkeypatch
):
    dying = interpreter(
        "dying", "read setup; echo '{\"start_s\": 1.0}'; read case; echo out of memory >&2; exit 3"
    )
    hanging = interpreter("hanging", "sleep 60")
    file, out = tmp_path / "s.toml", tmp_path / "out"
    file.write_text(f"""
models = ["{config_only}"]
lengths = [[8, 4]]
batch_sizes = [1, 3]
objectives = {{ttft_s = 60}}
start_timeout_s = 120
[[engines]]
engine = "slipstream"
parallel = ["tp1", "tp3"]
settings = {toml(SMALL)}
[[engines]]
engine = "llamacpp"
label = "dying"
python = "{dying}"
[[engines]]
engine = "llamacpp"
label = "hanging"
python = "{hanging}"
[[engines]]
engine = "transformers"
schemes = ["int8"]
[[engines]]
engine = "openvino"
models = ["no-such-model"]
""")
    real = runner.Worker.start
    monkeypatch.setattr(
        runner.Worker, "start", lambda w, limit: real(w, 0.3 if "hanging" in str(w._log) else limit)
    )
    found = sweep(capsys, file, f"--out={out}", "--no-ceilings")
    assert (found["num_rows"], found["num_failed"]) == (12, 10)
    errors = {
        (row["label"], row["parallel"], row["batch_size"]): row.get("error")
        for row in found["rows"]
    }
    assert errors["slipstream", "tp1", 3] is None
    assert "tensor_parallel_size: 3 ranks" in errors["slipstream", "tp3", 1]
    assert (
        errors["dying", "tp1", 1]
        == errors["dying", "tp1", 3]
        == "the engine's process ended (exit code 3): out of memory"
    )
    assert errors["hanging", "tp1", 1] == "timeout: the start took more than 0.3 s"
    assert "scheme='int8'" in errors["transformers", "tp1", 1]
    assert "no-such-model" in errors["openvino", "tp1", 1]
    row = next(
        row for row in found["rows"] if row["label"] == "slipstream" and row["batch_size"] == 3
    )
    assert (row["input_tokens"], row["output_tokens"], row["num_failed"]) == (24, 12, 0)
    assert row["output_throughput"] == pytest.approx(12 / row["wall_s"])
    assert row["total_throughput"] == pytest.approx(36 / row["wall_s"])
    assert row["goodput"] == pytest.approx(3 / row["wall_s"])
    assert row["achieved_flops_per_s"] == pytest.approx(row["step_flops"] / row["tpot_s_p50"])
    rows, meta = read_parquet(out / "results.parquet")
    assert rows == found["rows"]
    assert meta["name"] == "s"
    assert "Content-Security-Policy" in (out / "dashboard.html").read_text()

    lines = (out / "rows.jsonl").read_text().splitlines()
    (out / "rows.jsonl").write_text(
        "\n".join(line for line in lines if '"dying"' not in line) + "\n"
    )
    again = sweep(capsys, file, f"--out={out}", "--no-ceilings")
    assert [row["key"] for row in again["rows"]] == [row["key"] for row in rows]
    assert [
        a["time"] == b["time"]
        for a, b in zip(again["rows"], rows, strict=True)
        if a["label"] != "dying"
    ] == [True] * 10
    assert len((out / "rows.jsonl").read_text().splitlines()) == 12

    shown = sweep(
        capsys,
        out / "results.parquet",
        f"--baseline={out / 'results.parquet'}",
        f"--out={tmp_path / 'both'}",
    )
    assert shown["num_rows"] == 12
    assert "s (baseline)" in (tmp_path / "both" / "dashboard.html").read_text()


def test_an_interrupted_sweep_leaves_no_process(config_only, tmp_path, interpreter, monkeypatch):
    slow = interpreter(
        "slow", f"echo $$ > {tmp_path}/pid; read setup; echo '{{\"start_s\": 1.0}}'; sleep 60"
    )
    text = f'[[engines]]\nengine = "openvino"\npython = "{slow}"'
    grid = grid_of(text, models=[str(config_only)])
    real = runner.Worker.ask

    def ask(worker, message, limit, what="case"):
        if what == "case":
            raise KeyboardInterrupt
        return real(worker, message, limit, what)

    monkeypatch.setattr(runner.Worker, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        runner.run_sweep(grid, tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_an_endpoint_is_an_engine(tmp_path, capsys):
    with serving(served_model_names=("tiny",)) as server:
        (tmp_path / "s.toml").write_text(f"""
vocab_size = 200
{BASE}
[[engines]]
engine = "openai"
settings = {{url = "{server.url}"}}
[[engines]]
engine = "openai"
label = "no server"
settings = {{command = ["sh", "-c", "exit 7"]}}
""")
        found = sweep(capsys, tmp_path / "s.toml", "--no-ceilings")
    good, bad = (
        [row for row in found["rows"] if row["label"] == label] for label in ("openai", "no server")
    )
    assert [(row["batch_size"], row["num_requests"], row["num_failed"]) for row in good] == [
        (1, 1, 0),
        (2, 2, 0),
    ]
    assert {row["error"] for row in bad} == {
        "the server ended with exit code 7 before it was ready"
    }


@pytest.mark.slow
def test_a_server_that_a_command_starts(tiny_model, tmp_path, capsys):
    import sys

    words = [
        sys.executable,
        "-m",
        "slipstream",
        "serve",
        "{model}",
        "--port",
        "{port}",
        "--max-num-seqs",
        "{batch_size}",
    ]
    (tmp_path / "s.toml").write_text(
        BASE.replace('"m"', f'"{tiny_model}"').replace(
            "[[8, 4]]", "[[8, 128]]"
        )  # 4 tokens may come in one delivery
        + f'[[engines]]\nengine = "openai"\nsettings = {{command = {json.dumps(words)}}}'
    )
    found = sweep(capsys, tmp_path / "s.toml", "--no-ceilings")
    assert [row.get("error") for row in found["rows"]] == [None, None]
    assert all(row["itl_s_mean"] > 0 for row in found["rows"])


def test_dry_run_measures_nothing(tmp_path, capsys):
    (tmp_path / "s.toml").write_text(BASE + '[[engines]]\nengine = "openvino"')
    found = sweep(capsys, tmp_path / "s.toml", "--dry-run")
    assert found == {"name": "s", "setups": ["openvino · m · none · tp1"], "num_rows": 2}
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("code", "told"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal SIGKILL")]
)
def test_the_end_of_an_engines_process_is_told(code, told):
    worker = SimpleNamespace(_process=SimpleNamespace(wait=lambda: code))
    assert runner.Worker._ending(worker) == told
