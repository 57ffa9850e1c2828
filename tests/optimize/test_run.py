"""Parts around the search: traffic, limits, choosing, records, the prior, and the whole command on
a tiny model."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from slipstream.cli.main import main
from slipstream.cli.optimize import _cells, _line
from slipstream.config import EngineArgs
from slipstream.costs.devices import find_device
from slipstream.costs.hardware import available_cores
from slipstream.errors import ConfigError, EngineError, SlipstreamError
from slipstream.evals.tasks import TaskResult
from slipstream.hub import machine_folder
from slipstream.optimize import prior as prior_module
from slipstream.optimize import run, worker
from slipstream.optimize.candidates import NOTHING, Candidate, Space, TrialResult
from slipstream.optimize.prior import bits_of, guessed_kl, simulated_prior
from slipstream.optimize.run import Measurer, QualityLoss, parse_quality_loss, parse_seconds
from slipstream.optimize.traffic import RecordedTraffic, parse_traffic
from slipstream.optimize.worker import task_loss
from slipstream.spec.description import read_spec
from slipstream.worker.device import detect
from tests.support.waiting import wait_for

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46,374,44
2023-11-16 18:15:47,9000,10
2023-11-16 18:15:48,8,0
"""
MOONCAKE = """{"timestamp": 0, "input_length": 67, "output_length": 50}
{"timestamp": 1, "input_length": 73, "output_length": 4}
"""


def test_traffic_of_lengths_and_of_traces(tmp_path):
    assert (
        parse_traffic("128/64", "closed:2", num_requests=3, longest=200).lengths == ((128, 64),) * 3
    )
    for name, text, wanted in (
        ("t.csv", AZURE, ((374, 44),)),
        ("t.jsonl", MOONCAKE, ((67, 50), (73, 4))),
        ("with-empty-line.jsonl", MOONCAKE + "\n", ((67, 50), (73, 4))),
        ("t.json", '{"lengths": [[5, 6]]}', ((5, 6),)),
    ):
        (tmp_path / name).write_text(text)
        assert (
            parse_traffic(str(tmp_path / name), "burst", num_requests=9, longest=500).lengths
            == wanted
        )
    found = parse_traffic(str(tmp_path / "t.csv"), "burst", num_requests=9, longest=500)
    assert (found.num_left_out, found.longest, found.lengths) == (1, 418, ((374, 44),))


@pytest.mark.parametrize("text", ["128", "0/4", "a/b", "no-such-file.csv"])
def test_traffic_that_is_none(text, tmp_path):
    with pytest.raises(ConfigError) as caught:
        parse_traffic(text, "burst", num_requests=1, longest=100)
    assert caught.value.field == "traffic"
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="is not a trace"):
        parse_traffic(str(tmp_path / "x.csv"), "burst", num_requests=1, longest=100)
    with pytest.raises(ConfigError, match="fits into"):
        parse_traffic("90/20", "burst", num_requests=1, longest=100)


def test_limits_count_at_the_end_of_the_interval():
    limits = parse_quality_loss("kl=0.02,perplexity=2%")
    assert limits == QualityLoss(kl=0.02, perplexity=0.02)
    found = {
        "kl": 0.015,
        "kl_stderr": 0.001,
        "perplexity_ratio": 1.01,
        "perplexity_ratio_stderr": 0.001,
    }
    assert limits.faults(found) == []
    (fault,) = limits.faults({**found, "kl_stderr": 0.003})
    assert "KL 0.015 (up to 0.02088)" in fault
    (fault,) = limits.faults({**found, "perplexity_ratio_stderr": 0.01})
    assert "perplexity +1.00% (up to +2.96%)" in fault
    assert len(limits.faults({**found, "kl": float("nan")})) == 1
    for text in ("kl", "kl=x", "task=0.1", "kl=-1", "task=x", "task=:1%", "task=x:y"):
        with pytest.raises(ConfigError) as caught:
            parse_quality_loss(text)
        assert caught.value.field == "max_quality_loss"


def test_limits_of_tasks_count_at_the_end_of_the_interval_of_the_difference():
    limits = parse_quality_loss("task=a/questions.jsonl:5%,kl=1,task=hellaswag:0.01")
    assert limits.tasks == (("a/questions.jsonl", 0.05), ("hellaswag", 0.01))
    original = TaskResult(name="q", metric="acc_norm", value=0.60, stderr=0.012, num_questions=400)
    found = dataclasses.replace(original, value=0.58, stderr=0.016)
    loss = task_loss(original, found)
    assert (loss["loss"], loss["stderr"]) == (pytest.approx(0.02), pytest.approx(0.02))
    figures = {"kl": 0.0, "kl_stderr": 0.0, "perplexity_ratio": 1.0, "perplexity_ratio_stderr": 0.0}
    figures |= {"tasks": {"a/questions.jsonl": loss, "hellaswag": {**loss, "loss": -0.05}}}
    (fault,) = limits.faults(figures)
    assert (
        fault
        == "a/questions.jsonl: acc_norm from 0.600 to 0.580, 0.020 lost (up to 0.059), at most 0.05 is wanted"
    )
    perplexity = dataclasses.replace(original, metric="word_perplexity", value=20.0, stderr=0.2)
    assert task_loss(perplexity, dataclasses.replace(perplexity, value=21.0))[
        "loss"
    ] == pytest.approx(0.05)
    wer = dataclasses.replace(original, metric="wer", value=0.20, stderr=0.002)
    assert task_loss(wer, dataclasses.replace(wer, value=0.25))["loss"] == pytest.approx(0.25)
    bleu = dataclasses.replace(original, metric="bleu", value=30.0, stderr=1.0)
    assert task_loss(bleu, dataclasses.replace(bleu, value=29.0))["loss"] == pytest.approx(0.01)
    own = dataclasses.replace(original, metric="own", higher_is_better=False, value=2.0)
    assert task_loss(own, dataclasses.replace(own, value=3.0))["loss"] == pytest.approx(0.5)
    with pytest.raises(SlipstreamError, match="more or less of own"):
        task_loss(own, dataclasses.replace(own, higher_is_better=None))
    with pytest.raises(SlipstreamError, match="no standard error"):
        task_loss(original, dataclasses.replace(found, stderr=None))


def test_times_are_parsed_with_their_unit():
    assert [parse_seconds(text) for text in ("90s", "20m", "1.5h")] == [90, 1200, 5400]
    for text in ("20", "m", "", "-1m"):
        with pytest.raises(ConfigError):
            parse_seconds(text)


def result(name, throughput, **p99):
    return TrialResult(
        candidate=Candidate(name),
        throughput=throughput,
        tpot_s=0.1,
        kl=0,
        figures={f"{k}_p99": v for k, v in p99.items()},
    )


def test_the_fastest_that_meets_the_objectives_else_the_nearest():
    slow = result("slow", 10, ttft_s=0.1, tpot_s=0.02)
    fast = result("fast", 20, ttft_s=0.4, tpot_s=0.03)
    assert run.choose([slow, fast], {"ttft_s": 0.5}) is fast
    assert run.choose([slow, fast], {"ttft_s": 0.2}) is slow
    assert run.choose([slow, fast], {"ttft_s": 0.05, "tpot_s": 0.029}) is slow
    assert run.misses(fast, {"ttft_s": 0.2, "tpot_s": 0.05}) == {"ttft_s": (0.4, 0.2)}
    assert run.choose([], {}) is None


def measurer(folder, **more):
    traffic = RecordedTraffic(source="8/4", lengths=((8, 4),), arrivals="burst")
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    base = {
        "base": EngineArgs(str(model)),
        "traffic": traffic,
        "objectives": {},
        "limits": QualityLoss(),
        "text": {},
    }
    return Measurer(**{**base, "folder": folder, **more})


def test_results_are_kept_by_their_conditions(tmp_path):
    space = Space(compressions=("none", "int8"), axes={"max_num_seqs": (1, 2)})
    ours, other = measurer(tmp_path), measurer(tmp_path, objectives={"ttft_s": 1.0})
    good = TrialResult(
        candidate=Candidate("none", (("max_num_seqs", 2),)),
        throughput=5.0,
        tpot_s=0.1,
        kl=0.0,
        figures={"kl": 0.0},
    )
    unfit = TrialResult(
        candidate=Candidate("int8", (("max_num_seqs", 2),)), kl=0.4, fits=False, error="KL"
    )
    failed = TrialResult(candidate=Candidate("none", (("max_num_seqs", 1),)), error="out of memory")
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
        measurer(tmp_path)._finish(
            ["sh", "-c", "echo begin >&2; echo slipstream: no room >&2; exit 3"], None, "speed"
        )


def test_a_candidate_that_needs_torch_says_how_to_have_it(monkeypatch, capfd):
    def speed(_):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(worker, "end_with_parent", lambda: None)
    monkeypatch.setattr(worker, "speed", speed)
    monkeypatch.setattr("sys.argv", ["worker"])
    monkeypatch.setattr("sys.stdin", io.StringIO('{"kind": "speed"}'))
    monkeypatch.setattr("os.dup2", lambda *_: None)
    worker.main()
    assert "[torch]" in json.loads(capfd.readouterr().out)["error"]


def test_random_weights_have_a_speed_and_no_quality(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Measurer,
        "_run",
        lambda self, job: (
            {"output_throughput": 5.0, "tpot_s_p99": 0.1} if job["kind"] == "speed" else 1 / 0
        ),
    )
    made = measurer(tmp_path, limits=QualityLoss(kl=0.001))
    made.base = dataclasses.replace(made.base, load_format="dummy")
    found = made(Candidate("int4", (("kv_cache_dtype", "auto"),)))
    assert (found.throughput, found.fits, found.kl) == (5.0, True, 0.05)
    assert "not measured" in found.figures["not_measured"]


def test_a_draft_model_stays_outside_of_the_folder(tmp_path):
    made = measurer(tmp_path)
    args, at_start = made.folder_args(
        Candidate("none", (("speculative_model", str(tmp_path)), ("max_num_seqs", 3)))
    )
    assert (args.speculative_model, args.max_num_seqs) == (None, 3)
    assert at_start == {"speculative_model": str(tmp_path)}
    assert made.folder_args(Candidate("none", (("speculative_model", "ngram"),)))[1] == {}
    assert run.check_drafts(["none", "suffix", str(tmp_path)]) == (None, "suffix", str(tmp_path))


def test_a_draft_head_is_given_with_its_method_and_stays_outside_too(tmp_path):
    made, head = measurer(tmp_path), f"eagle3:{tmp_path}"
    assert run.check_drafts([head, "mtp"]) == (head, "mtp")
    with_head, with_mtp = (
        Candidate("none", (("speculative_model", name), ("max_num_seqs", 3)))
        for name in (head, "mtp")
    )
    wanted = {"method": "eagle3", "model": str(tmp_path)}
    assert made.args_of(with_head)["speculative_config"] == wanted
    assert made.args_of(with_head)["speculative_model"] is None
    args, at_start = made.folder_args(with_head)
    assert (args.speculative_config, args.max_num_seqs, at_start) == (
        None,
        3,
        {"speculative_config": wanted},
    )
    args, at_start = made.folder_args(with_mtp)  # it is in the model
    assert (args.speculative_config, at_start) == ({"method": "mtp"}, {})
    with pytest.raises(ConfigError, match=r"mtp, eagle:FOLDER, eagle3:FOLDER, peagle:FOLDER"):
        run.check_drafts(["eagle3:/no/such/head"])


@pytest.mark.skipif(
    sys.platform != "linux", reason="a process that ends with its parent is Linux's"
)
def test_a_killed_search_leaves_nobody_behind():
    words = [sys.executable, "-m", "slipstream.optimize.worker", "http.server", "0"]
    code = f"import subprocess; p = subprocess.Popen({words!r}, start_new_session=True); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    command = Path(f"/proc/{child}/cmdline")
    wait_for(
        lambda: b"http.server\0" in (words := command.read_bytes()) and b"worker" not in words,
        "it does not begin",
    )
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    try:
        wait_for(lambda: not command.exists() or not command.read_bytes(), "it lives on")
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        raise


def test_a_compression_that_loses_too_much_is_not_run(tmp_path, monkeypatch):
    made = measurer(tmp_path, limits=QualityLoss(kl=0.01))
    loss = {"kl": 0.2, "kl_stderr": 0.0, "perplexity_ratio": 1.2, "perplexity_ratio_stderr": 0.0}
    monkeypatch.setattr(
        Measurer,
        "_run",
        lambda self, job: loss if job["kind"] == "quality" else pytest.fail("it was run"),
    )
    found = made(Candidate("int8", (("kv_cache_dtype", "auto"),)))
    assert (found.fits, found.kl) == (False, 0.2)
    assert found.point is None


def test_the_prior_knows_bits_and_batches():
    folder = Path(__file__).parents[2] / "benchmarks" / "configs" / "llama-3-8b"
    traffic = RecordedTraffic(source="2000/32", lengths=((2000, 32),) * 8, arrivals="closed:8")
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
    assert (
        guessed_kl("int4", "auto", 135e6)
        > guessed_kl("int4", "auto", 8e9)
        > guessed_kl("recipe:int4-gptq", "auto", 8e9)
    )
    assert guessed_kl("none", "auto", 135e6) == 0 < guessed_kl("none", "int8", 135e6)
    assert bits_of("recipe:int4-gptq") == (4, "int4")
    assert bits_of("recipe:2:4") == (3, "int8")  # half of the weights, and it costs


def test_the_prior_knows_forms(monkeypatch):
    engines = []
    monkeypatch.setattr(
        prior_module,
        "simulate",
        lambda engine, *given, _real=prior_module.simulate, **more: (
            engines.append(engine) or _real(engine, *given, **more)
        ),
    )
    folder = Path(__file__).parents[2] / "benchmarks" / "configs" / "llama-3-8b"
    traffic = RecordedTraffic(source="2000/32", lengths=((2000, 32),) * 16, arrivals="closed:16")
    base = EngineArgs(model=str(folder), max_model_len=4096)
    gpu, cpu = (
        simulated_prior(base, read_spec(folder), traffic, find_device(name))
        for name in ("h200", "cpu-2-avx512")
    )

    def of(prior, form, size=16):
        return prior(Candidate("none", (("max_num_seqs", size), ("parallel", form))))

    one, tensor, pipeline = (of(gpu, form) for form in ("tp1", "tp2", "tp1pp2"))
    assert engines[2].num_blocks < 1.2 * engines[0].num_blocks  # of one card's memory
    assert one == gpu(Candidate("none", (("max_num_seqs", 16),)))
    assert one.throughput < tensor.throughput < 2 * one.throughput
    assert one.throughput < pipeline.throughput < 2 * one.throughput
    assert tensor.tpot_s < one.tpot_s
    assert (
        of(gpu, "tp1pp2", 1).throughput > 1.5 * of(gpu, "tp1", 1).throughput
    )  # two requests are under way, one a stage
    assert of(gpu, "tp3") == NOTHING  # heads that can't be shared
    assert tensor.kl == pipeline.kl == one.kl
    assert of(cpu, "tp2") == of(cpu, "tp1")  # its cores are the same


def test_forms_become_settings_and_do_not_change_what_quality_is_of(tmp_path):
    made = measurer(tmp_path)
    candidate = Candidate(
        "int8", (("kv_cache_dtype", "auto"), ("max_num_seqs", 3), ("parallel", "tp2pp2"))
    )
    given = made.args_of(candidate)
    assert (
        given["tensor_parallel_size"],
        given["pipeline_parallel_size"],
        given["quantization"],
    ) == (2, 2, "int8")
    assert "parallel" not in given
    assert made.folder_args(candidate)[0].pipeline_parallel_size == 2
    assert (
        candidate.quality_key
        == Candidate("int8", (("kv_cache_dtype", "auto"), ("parallel", "tp1"))).quality_key
    )
    assert candidate.name == "int8 kv_cache_dtype=auto max_num_seqs=3 parallel=tp2pp2"


def test_what_several_ranks_cannot_do_is_left_out_in_the_engines_words(
    tiny_model, tmp_path, capsys, monkeypatch
):
    """A head over stages is refused on GPUs alone, which this machine is taken for."""
    gpu, resolved = find_device("h200").device_info(), run.resolve

    def on_gpu(args, description, info):
        return resolved(dataclasses.replace(args, device="auto"), description, gpu)

    monkeypatch.setattr(run, "resolve", on_gpu)
    description, info = read_spec(tiny_model), detect("cpu", machine_folder())
    base = EngineArgs(str(tiny_model), device="cpu")
    assert run.check_parallel(["tp2", "pp2"], base, description, info) == ("tp2", "tp1pp2")
    drafts = (None, "suffix", f"eagle3:{tmp_path}")
    space = Space(
        compressions=("none", "int8"),
        axes={"speculative_model": drafts, "parallel": ("tp1", "tp1pp2")},
    )
    refused = run.refusals(space, base, description, info)
    settings = (("speculative_model", f"eagle3:{tmp_path}"), ("parallel", "tp1pp2"))
    assert refused.keys() == {Candidate("none", settings), Candidate("int8", settings)}
    assert all("does not run over stages" in reason for reason in refused.values())
    words = [
        "optimize",
        str(tiny_model),
        f"--out={tmp_path / 'out'}",
        "--device=cpu",
        "--parallel=pp2",
        "--text",
        __file__,
    ]
    assert main([*words, "--eval-windows=1", f"--drafts=eagle3:{tmp_path}", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["field"] == "parallel"
    assert "no engine starts with any candidate" in error["message"]
    assert not (tmp_path / "out.search").exists()


def test_a_machine_without_so_many_gpus_is_told_before_anything_runs(
    tiny_model, tmp_path, monkeypatch
):
    monkeypatch.setattr("slipstream.worker.ranks.process_executor.gpus", lambda: ("one",))
    gpu = find_device("h200").device_info()
    with pytest.raises(
        ConfigError, match=r"2 ranks need a GPU each, and there are 1; lower it \(leave out tp2\)"
    ) as caught:
        run.check_parallel(["tp1", "tp2"], EngineArgs(str(tiny_model)), read_spec(tiny_model), gpu)
    assert caught.value.field == "parallel"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--budget=soon"], "budget"),
        (["--slo=ttft=1"], "slo"),
        (["--compressions=int9"], "compressions"),
        (["--compressions=none,none"], "compressions"),
        (["--arrivals=often"], "arrivals"),
        (["--traffic=1"], "traffic"),
        (["--num-requests=0"], "num_requests"),
        (["--parallel=two"], "parallel"),
        (["--parallel="], "parallel"),
        (["--parallel=tp0"], "parallel"),
        (["--parallel=tp1,tp2,tp2pp1"], "parallel"),
        (["--parallel=tp1,tp3"], "parallel"),
        (["--parallel=tp1,tp4096"], "parallel"),
        (["--parallel=pp99"], "parallel"),
        (["--drafts=none,no-such-folder"], "drafts"),
        (["--compressions=recipe:draft:1/3"], "compressions"),
        (["--load-format=dummy", "--compressions=recipe:int8"], "compressions"),
        (["--max-quality-loss=task=no-such.jsonl:1%"], "tasks"),
        (["--seed=-1"], "seed"),
        (["--kv-cache-dtypes=auto,int9"], "kv_cache_dtype"),
        (["--max-model-len=0"], "max_model_len"),
        (["--max-model-len=99999999"], "max_model_len"),
        (["--num-threads=0"], "num_threads"),
        (["--eval-windows=0"], "eval_windows"),
        (["--task-limit=0"], "task_limit"),
        (["--out=/proc/none/best"], "out"),
        (["--text=no-such-file.txt"], "text"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_runs(tiny_model, tmp_path, capsys, words, field):
    assert main(["optimize", str(tiny_model), f"--out={tmp_path / 'out'}", *words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == field


def test_a_limit_of_random_weights_is_refused_and_their_quality_is_not_shown(
    tiny_model, tmp_path, capsys
):
    words = [
        "optimize",
        str(tiny_model),
        f"--out={tmp_path / 'out'}",
        "--load-format=dummy",
        "--max-quality-loss=kl=1",
    ]
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == "max_quality_loss"
    figures = {
        "kl": 0.02,
        "kl_stderr": 0.0,
        "perplexity_ratio": 1.0,
        "ttft_s_p99": 0.1,
        "predicted_throughput": 1.0,
    }
    guessed = TrialResult(
        candidate=Candidate("int8"), kl=0.02, figures={**figures, "not_measured": "random weights"}
    )
    assert _line(guessed).endswith("KL –")
    assert _cells(guessed, False)[-3:-1] == ("–", "–")


def test_results_of_another_file_or_machine_are_not_gone_on_with(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "q.jsonl").write_text("{}")
    given = {
        "base": EngineArgs(model=str(tiny_model)),
        "traffic": parse_traffic("8/4", "burst", num_requests=1, longest=99),
    }
    measurer = Measurer(
        **given,
        objectives={},
        limits=QualityLoss(),
        folder=tmp_path,
        text={},
        files=[tmp_path / "q.jsonl"],
    )
    before = measurer.conditions
    assert measurer.conditions == before
    (tmp_path / "q.jsonl").write_text("{} ")
    changed = measurer.conditions
    other = dataclasses.replace(run._machine(), cpu="another")
    monkeypatch.setattr(run, "_machine", lambda: other)
    assert len({before, changed, measurer.conditions}) == 3


def test_a_mount_point_is_refused_before_anything_runs(tiny_model, tmp_path, capsys, monkeypatch):
    """The folder is made beside DIR and renamed at the end, which a mount point would refuse after the whole search."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "out")
    assert main(["optimize", str(tiny_model), f"--out={tmp_path / 'out'}", "--device=cpu"]) == 2
    assert "is a mount point" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_optuna_nothing_is_left_behind(tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    (tmp_path / "text.jsonl").write_text(
        "\n".join(
            json.dumps({"text": f"A text of some words, number {i}, and so on."})
            for i in range(300)
        )
    )
    words = [
        "--traffic=24/8",
        "--device=cpu",
        f"--text={tmp_path / 'text.jsonl'}",
        "--eval-windows=2",
    ]
    assert main(["optimize", str(tiny_model), f"--out={tmp_path / 'out'}", *words]) == 2
    assert "[optimize]" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


@pytest.mark.slow
def test_one_device_and_two_are_measured_and_the_folder_serves_the_form(
    tiny_model, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("optuna")
    if available_cores() < 2:
        pytest.skip("two ranks need a core each")
    small = Space(compressions=("none",), axes={"kv_cache_dtype": ("auto",), "max_num_seqs": (2,)})
    monkeypatch.setattr(run, "default_space", lambda **_: small)
    monkeypatch.setattr(
        run,
        "choose",
        lambda results, objectives: next(r for r in front if "parallel=tp2" in r.candidate.name),
    )
    front = []
    monkeypatch.setattr(run, "append_result", lambda result, measurer: front.append(result))
    (tmp_path / "text.txt").write_text("A text of some words, and so on. " * 500)
    out = tmp_path / "best"
    words = [
        "optimize",
        str(tiny_model),
        f"--out={out}",
        "--traffic=24/8",
        "--arrivals=closed:2",
        "--num-requests=4",
    ]
    words += [
        f"--text={tmp_path / 'text.txt'}",
        "--device=cpu",
        "--parallel=tp1,tp2",
        "--max-model-len=128",
    ]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_measured"], found["num_failed"], found["num_candidates"]) == (2, 0, 2)
    assert found["chosen"]["settings"]["parallel"] == "tp2"
    assert found["folder"]["output_throughput"] > 0
    document = json.loads((out / "optimize.json").read_text())
    assert [row["settings"]["parallel"] for row in document["results"]] == ["tp1", "tp2"]
    assert {row["figures"]["kl"] for row in document["results"]} == {0.0}
    assert '"parallel": "tp2"' in (out / "optimize.html").read_text().replace(
        '"parallel":"', '"parallel": "'
    )
    assert yaml.safe_load((out / "serve.yaml").read_text())["engine"]["tensor_parallel_size"] == 2
    assert (
        main(["bench", "folder", str(out), "--device=cpu", "--against", str(tiny_model), "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["holds"]


@pytest.mark.slow
def test_the_whole_loop(tiny_model, tmp_path, capsys, monkeypatch):
    pytest.importorskip("optuna")
    small = Space(compressions=("none",), axes={"kv_cache_dtype": ("auto",), "max_num_seqs": (4,)})
    monkeypatch.setattr(run, "default_space", lambda **_: small)
    (tmp_path / "text.jsonl").write_text(
        "\n".join(
            json.dumps({"text": f"A text of some words, number {i}, and so on."})
            for i in range(300)
        )
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
    words += [
        "--compressions=none,int8",
        "--max-quality-loss=kl=1",
        "--slo=ttft_s=0.000001",
        "--num-threads=1",
    ]
    words += [f"--text={tmp_path / 'text.jsonl'}", "--eval-windows=4", "--budget=10m", "--json"]
    speed = run.Measurer.speed

    def killed(self, args):
        if "folder" in args["model"]:
            raise KeyboardInterrupt
        return speed(self, args)

    with monkeypatch.context() as patch:  # when all is measured but the folder
        patch.setattr(run.Measurer, "speed", killed)
        assert main(words) == 130
        assert not out.exists()
        assert "the same command goes on from there" in capsys.readouterr().err
    (tmp_path / "best.search" / ".folder.cut").mkdir()  # of one that was killed a little before
    assert main(words) == 1  # an objective that nobody can meet
    assert not list((tmp_path / "best.search").glob("*folder*"))
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
    assert (
        main(["bench", "folder", str(out), "--device=cpu", "--json"]) == 1
    )  # the objective is missed here, too
    checked = json.loads(capsys.readouterr().out)
    (missed,) = checked["objectives"]
    assert (missed["name"], missed["wanted"], checked["holds"]) == ("ttft_s", 1e-6, False)
    assert missed["here"] > missed["wanted"]
    assert checked["figures"]["num_requests"] == 8
    assert checked["differences"] == []
    again = tmp_path / "again"
    (tmp_path / "best.search").rename(tmp_path / "again.search")
    assert (
        main(
            [w.replace("--budget=10m", "--budget=1s").replace(str(out), str(again)) for w in words]
        )
        == 1
    )
    assert json.loads(capsys.readouterr().out)["front"] == found["front"]
