"""What surrounds the search: traffic, limits, choosing, what is kept, the prior, and the whole command on a tiny model."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream.config import EngineArgs
from slipstream.errors import ConfigError, EngineError
from slipstream.optimize import run
from slipstream.optimize.prior import NOTHING, bits_of, simulated_prior
from slipstream.optimize.run import Measurer, QualityLoss, parse_quality_loss, parse_seconds
from slipstream.optimize.search import Candidate, Result, Space
from slipstream.optimize.traffic import Traffic, parse_traffic
from slipstream.plan.devices import find_device
from slipstream.spec.description import read_spec

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46,374,44
2023-11-16 18:15:47,9000,10
2023-11-16 18:15:48,8,0
"""
MOONCAKE = """{"timestamp": 0, "input_length": 67, "output_length": 50}
{"timestamp": 1, "input_length": 73, "output_length": 4}
"""


def test_traffic_of_lengths_and_of_traces(tmp_path):
    assert parse_traffic("128/64", "closed:2", num_requests=3, longest=200).lengths == ((128, 64),) * 3
    for name, text, wanted in (
        ("t.csv", AZURE, ((374, 44),)),
        ("t.jsonl", MOONCAKE, ((67, 50), (73, 4))),
        ("t.json", '{"lengths": [[5, 6]]}', ((5, 6),)),
    ):
        (tmp_path / name).write_text(text)
        assert parse_traffic(str(tmp_path / name), "burst", num_requests=9, longest=500).lengths == wanted
    found = parse_traffic(str(tmp_path / "t.csv"), "burst", num_requests=9, longest=500)
    assert (found.num_left_out, found.longest, found.mean_input) == (1, 418, 374)


@pytest.mark.parametrize("text", ["128", "0/4", "a/b", "no-such-file.csv"])
def test_traffic_that_is_none(text, tmp_path):
    with pytest.raises(ConfigError) as caught:
        parse_traffic(text, "burst", num_requests=1, longest=100)
    assert caught.value.field == "traffic"
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no trace"):
        parse_traffic(str(tmp_path / "x.csv"), "burst", num_requests=1, longest=100)
    with pytest.raises(ConfigError, match="fits into"):
        parse_traffic("90/20", "burst", num_requests=1, longest=100)


def test_limits_count_at_the_end_of_the_interval():
    limits = parse_quality_loss("kl=0.02,perplexity=2%")
    assert limits == QualityLoss(kl=0.02, perplexity=0.02)
    found = {"kl": 0.015, "kl_stderr": 0.001, "perplexity_ratio": 1.01, "perplexity_ratio_stderr": 0.001}
    assert limits.faults(found) == []
    (fault,) = limits.faults({**found, "kl_stderr": 0.003})
    assert "KL 0.015 (up to 0.02088)" in fault
    (fault,) = limits.faults({**found, "perplexity_ratio_stderr": 0.01})
    assert "perplexity +1.00% (up to +2.96%)" in fault
    assert len(limits.faults({**found, "kl": float("nan")})) == 1
    for text in ("kl", "kl=x", "task=0.1", "kl=-1"):
        with pytest.raises(ConfigError) as caught:
            parse_quality_loss(text)
        assert caught.value.field == "max_quality_loss"


def test_times():
    assert [parse_seconds(text) for text in ("90s", "20m", "1.5h")] == [90, 1200, 5400]
    for text in ("20", "m", "", "-1m"):
        with pytest.raises(ConfigError):
            parse_seconds(text)


def result(name, throughput, **p99):
    return Result(
        candidate=Candidate(name),
        throughput=throughput,
        tpot_s=0.1,
        kl=0,
        figures={f"{k}_p99": v for k, v in p99.items()},
    )


def test_the_fastest_that_meets_the_objectives_else_the_nearest():
    slow, fast = result("slow", 10, ttft_s=0.1, tpot_s=0.02), result("fast", 20, ttft_s=0.4, tpot_s=0.03)
    assert run.choose([slow, fast], {"ttft_s": 0.5}) is fast
    assert run.choose([slow, fast], {"ttft_s": 0.2}) is slow
    assert run.choose([slow, fast], {"ttft_s": 0.05, "tpot_s": 0.029}) is slow
    assert run.misses(fast, {"ttft_s": 0.2, "tpot_s": 0.05}) == {"ttft_s": (0.4, 0.2)}
    assert run.choose([], {}) is None


def measurer(folder, **more):
    traffic = Traffic(source="8/4", lengths=((8, 4),), arrivals="burst")
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    base = {"base": EngineArgs(str(model)), "traffic": traffic, "objectives": {}, "limits": QualityLoss(), "text": {}}
    return Measurer(**{**base, "folder": folder, **more})


def test_results_are_kept_by_their_conditions(tmp_path):
    space = Space(compressions=("none", "int8"), axes={"max_num_seqs": (1, 2)})
    ours, other = measurer(tmp_path), measurer(tmp_path, objectives={"ttft_s": 1.0})
    good = Result(
        candidate=Candidate("none", (("max_num_seqs", 2),)), throughput=5.0, tpot_s=0.1, kl=0.0, figures={"kl": 0.0}
    )
    unfit = Result(candidate=Candidate("int8", (("max_num_seqs", 2),)), kl=0.4, fits=False, error="KL")
    failed = Result(candidate=Candidate("none", (("max_num_seqs", 1),)), error="out of memory")
    for found in (good, unfit, failed):
        run.append_result(found, ours)
    with (tmp_path / run.RESULTS_NAME).open("a") as file:
        file.write('{"cut": ')
    assert run.read_results(ours, space) == [good, unfit]  # what failed is tried again
    assert run.read_results(other, space) == []
    assert run.read_results(ours, Space(compressions=("none",), axes={"block_size": (16,)})) == []


def test_a_process_that_fails_or_hangs_is_an_error(tmp_path):
    made = measurer(tmp_path, timeout_s=0.2)
    with pytest.raises(EngineError, match=r"it took more than 0\.2 s"):
        made._finish(["sleep", "30"], None, "speed")
    made.deadline = time.monotonic() + 0.05
    with pytest.raises(EngineError, match="the budget ended"):
        made._finish(["sleep", "30"], None, "speed")
    with pytest.raises(EngineError, match="speed ended with exit code 3: no room"):
        measurer(tmp_path)._finish(["sh", "-c", "echo begin >&2; echo slipstream: no room >&2; exit 3"], None, "speed")


def test_a_compression_that_loses_too_much_is_not_run(tmp_path, monkeypatch):
    made = measurer(tmp_path, limits=QualityLoss(kl=0.01))
    loss = {"kl": 0.2, "kl_stderr": 0.0, "perplexity_ratio": 1.2, "perplexity_ratio_stderr": 0.0}
    monkeypatch.setattr(
        Measurer, "_run", lambda self, job: loss if job["kind"] == "quality" else pytest.fail("it was run")
    )
    found = made(Candidate("int8", (("kv_cache_dtype", "auto"),)))
    assert (found.fits, found.kl) == (False, 0.2)
    assert found.point is None


def test_the_prior_knows_bits_and_batches():
    folder = Path(__file__).parents[2] / "benchmarks" / "configs" / "llama-3-8b"
    traffic = Traffic(source="2000/32", lengths=((2000, 32),) * 8, arrivals="closed:8")
    base = EngineArgs(model=str(folder), device="cpu", max_model_len=4096)
    prior = simulated_prior(base, read_spec(folder), traffic, find_device("h200"))

    def of(compression, size, cache="auto"):
        return prior(Candidate(compression, (("kv_cache_dtype", cache), ("max_num_seqs", size))))

    assert of("fp8", 8).throughput > of("none", 8).throughput
    assert of("none", 8).throughput > of("none", 1).throughput
    assert of("none", 8).tpot_s > of("none", 1).tpot_s
    assert of("none", 8, "fp8").tpot_s < of("none", 8).tpot_s
    assert of("none", 8).kl == 0 < of("none", 8, "fp8").kl < of("int4", 8).kl
    assert of("none", 8, "nothing") == NOTHING
    assert bits_of("recipe:int4-gptq") == (4, "int4")
    assert bits_of("recipe:2:4") == (16, None)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--budget=soon"], "budget"),
        (["--slo=ttft=1"], "slo"),
        (["--compressions=int9"], "recipe"),
        (["--compressions=none,none"], "compressions"),
        (["--arrivals=often"], "arrivals"),
        (["--traffic=1"], "traffic"),
        (["--num-requests=0"], "num_requests"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(tiny_model, tmp_path, capsys, words, field):
    assert main(["optimize", str(tiny_model), f"--out={tmp_path / 'out'}", *words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == field


@pytest.mark.slow
def test_the_whole_loop(tiny_model, tmp_path, capsys, monkeypatch):
    pytest.importorskip("optuna")
    small = Space(compressions=("none",), axes={"kv_cache_dtype": ("auto",), "max_num_seqs": (4,)})
    monkeypatch.setattr(run, "default_space", lambda **_: small)
    (tmp_path / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": f"A text of some words, number {i}, and so on."}) for i in range(300))
    )
    out = tmp_path / "best"
    words = [
        "optimize",
        str(tiny_model),
        f"--out={out}",
        "--traffic=24/8",
        "--arrivals=closed:4",
        "--num-requests=8",
        "--device=cpu",
    ]
    words += ["--compressions=none,int8", "--max-quality-loss=kl=1", "--slo=ttft_s=0.000001", "--num-threads=1"]
    words += [f"--text={tmp_path / 'text.jsonl'}", "--eval-windows=4", "--budget=10m", "--json"]
    assert main(words) == 1  # an objective that nobody can meet
    found = json.loads(capsys.readouterr().out)
    assert (found["num_measured"], found["num_candidates"]) == (2, 2)
    assert found["missed"]["ttft_s"]["wanted"] == 1e-6
    assert found["folder"]["output_throughput"] > 0
    kept = json.loads((out / "optimize.json").read_text())
    assert kept["chosen"] == found["chosen"]
    assert {"predicted_throughput", "predicted_tpot_s"} <= kept["chosen"]["figures"].keys()
    assert (out / "serve.yaml").is_file()
    assert "default-src 'none'" in (out / "optimize.html").read_text()
    assert main(["run", str(out), "One, two,", "--max-tokens=3", "--device=cpu"]) == 0
    capsys.readouterr()
    again = tmp_path / "again"
    (tmp_path / "best.search").rename(tmp_path / "again.search")
    assert main([w.replace("--budget=10m", "--budget=1s").replace(str(out), str(again)) for w in words]) == 1
    assert json.loads(capsys.readouterr().out)["front"] == found["front"]
