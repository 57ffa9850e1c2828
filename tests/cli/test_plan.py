"""`slipstream plan`: on a config alone, on a model here, and with what can't be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli.main import build_parser, main
from tests.support import tiny_models
from tests.support.tiny_models import build

CONFIG = str(Path(__file__).parents[2] / "benchmarks" / "configs" / "llama-3-8b")
QUICK = ("--workload", "fixed:60/8", "--no-search")


def plan(capsys, *words):
    code = main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_devices_side_by_side(capsys, tmp_path):
    page = tmp_path / "plan.html"
    words = (
        CONFIG,
        "--gpu",
        "h200,l4",
        "--quantization",
        "fp8",
        "--slo",
        "tpot_s=0.05",
        "--price",
        "4,0.8",
        "--html",
        str(page),
    )
    code, found = plan(capsys, *words, *QUICK)
    assert code == 0
    h200, l4 = found["devices"]
    assert h200["label"] == l4["label"] == "estimated"
    assert h200["capacity"]["requests_per_s"] > 5 * l4["capacity"]["requests_per_s"]
    assert h200["balancer_weight"] + l4["balancer_weight"] == pytest.approx(1.0)
    assert h200["ledger"]["num_full_sequences"] > l4["ledger"]["num_full_sequences"]
    text = page.read_text()
    assert "NVIDIA H200" in text
    assert "<script" not in text
    assert "://" not in text


def test_what_no_device_can_keep_is_told_with_the_nearest(capsys):
    words = (CONFIG, "--gpu", "h200", "--max-gpus", "1", "--slo", "tpot_s=0.0001,ttft_s=1", *QUICK)
    code, found = plan(capsys, *words)
    (row,) = found["devices"]
    assert code == 0
    assert row["capacity"]["requests_per_s"] is None
    assert not row["objectives_met"]
    assert row["nearest"]["tpot_s"] > 0.001
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert "even a request alone misses the objectives: tpot_s is" in shown
    assert "--slo tpot_s=0.00" in shown


def test_a_plan_of_several_devices_says_how_many(capsys):
    words = (CONFIG, "--gpu", "h200", *QUICK)
    for more, titled in (
        (("--context-parallel-size", "2"), "2 × NVIDIA H200"),
        ((), "NVIDIA H200"),
    ):
        assert main(["plan", *words, *more]) == 0
        assert f"\n{titled} (" in capsys.readouterr().out


def test_a_toy_on_a_large_device(capsys, tmp_path):
    """The device has room for a billion blocks, more than this machine's memory could simulate,
    and the model's context is too short for the load."""
    config = json.loads((Path(CONFIG).parent / "tiny" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    words = ("plan", str(tmp_path), "--gpu", "h200", "--workload", "fixed:60/8", "--no-search")
    main([*words])
    out = capsys.readouterr().out
    assert "not met too many requests do not fit the context" in " ".join(out.split())
    assert "requests: prompt and answer are 68 tokens" in out
    assert "nearest" not in out
    assert "set max_num_seqs" not in out  # of no request that ran nothing follows
    main(
        [
            "plan",
            str(tmp_path),
            "--gpu",
            "h200",
            "--workload",
            "fixed:9000/8",
            "--no-search",
            f"--html={tmp_path / 'p.html'}",
        ]
    )
    assert "requests: prompt and answer are 9008 tokens" in capsys.readouterr().out
    assert "Settings" not in (tmp_path / "p.html").read_text()


def test_a_device_without_room_is_told_next_to_the_others(capsys):
    words = ("--gpu", "l4,h200", "--max-gpus", "1", "--gpu-memory-utilization", "0.6")
    code, found = plan(capsys, CONFIG, *words, *QUICK)
    assert code == 0
    assert [row["device"] for row in found["devices"]] == ["h200"]
    (refused,) = found["refused"]
    assert (refused["device"], refused["title"]) == ("l4", "NVIDIA L4")
    assert "GiB" in refused["error"]


def test_a_load_beyond_the_devices(capsys):
    words = (
        CONFIG,
        "--gpu",
        "l4",
        "--max-gpus",
        "1",
        "--quantization",
        "fp8",
        "--rate",
        "500",
        "--slo",
        "ttft_s=0.5",
        *QUICK,
    )
    code, found = plan(capsys, *words)
    (row,) = found["devices"]
    assert code == 0
    assert row["replicas"] is None
    assert row["nearest"]["ttft_s"] > 0.5


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--workload", "nothing"], "workload"),
        (["--workload", "trace:/no/such.csv"], "workload"),
        (["--slo", "tpot=1"], "slo"),
        (["--gpu", "h200,l4", "--price", "1,2,3"], "price"),
        (["--gpu", "h200", "--tensor-parallel-size", "2"], "tensor_parallel_size"),
        (["--speculative-model", "ngram", "--num-speculative-tokens", "2"], "draft_acceptance"),
        (["--draft-acceptance", "0.5"], "draft_acceptance"),
        (["--speculative-model", "ngram", "--draft-acceptance", "2"], "draft_acceptance"),
        (["--html", "/no/such/folder/x.html"], "html"),
    ],
)
def test_bad_input_is_named(capsys, words, field):
    code, found = plan(capsys, CONFIG, *words)
    assert code == 2
    assert found["error"]["field"] == field


@pytest.mark.slow
def test_this_machine_is_measured_and_the_table_found_again(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build(tmp_path / "m")
    words = (
        str(tmp_path / "m"),
        "--device",
        "cpu",
        "--max-num-seqs",
        "4",
        "--kv-cache-bytes",
        "8MiB",
    )
    load = ("--workload", "fixed:32/8", "--concurrency", "2", "--no-search")
    code, found = plan(capsys, *words, *load, "--measure")
    assert code == 0
    assert found["measured"]["num_steps"] > 5
    assert found["measured"]["ceilings"]["disk"] > 0
    assert found["devices"][0]["steps"] == "measured here"
    _, again = plan(capsys, *words, *load)
    assert again["devices"][0]["steps"] == "measured here"
    assert again["devices"][0]["at_load"]["ttft_s"] == found["devices"][0]["at_load"]["ttft_s"]
    _, other = plan(capsys, *words, "--quantization", "int8", *load)
    assert other["devices"][0]["steps"] == "from the analytic model"


def test_a_model_without_attention_gains_states_by_more_memory(tmp_path, capsys):
    """Blocks of such a model hold nothing."""
    tiny_models.write(tmp_path, "mamba2")
    words = ("plan", str(tmp_path), "--gpu", "h200", "--workload", "fixed:60/8", "--no-search")
    assert main([*words]) == 0
    assert " more states" in capsys.readouterr().out


def test_several_models_on_a_device_and_which_fit_together(capsys):
    words = [f"{name}={CONFIG}" for name in "abc"]
    options = (
        "--gpu",
        "h200",
        "--quantization",
        "fp8",
        "--max-model-len",
        "2048",
        "--kv-cache-bytes",
        "1GiB",
    )
    code, found = plan(capsys, *words, *options)
    assert code == 0
    assert (found["all_fit"], found["together"]) == (True, [["a", "b", "c"]])
    row = found["models"][0]
    parts = row["weights_bytes"] + row["kv_bytes"] + row["rest_bytes"]
    assert parts == row["total_bytes"] > 7 * 2**30
    assert 2 < row["swap_s"] < 5
    memory = str(int(2.5 * row["total_bytes"]))
    code, found = plan(capsys, *words, *options, "--models-memory", memory)
    assert (found["all_fit"], found["together"]) == (False, [["a", "b"], ["a", "c"], ["b", "c"]])
    assert main(["plan", *words, *options, "--models-memory", memory]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    served = build_parser(["serve"]).parse_args(command.split()[1:])
    assert (served.models_memory, served.quantization) == (int(memory), "fp8")
    assert served.max_model_len == 2048
    code, found = plan(capsys, *words, *options, "--models-memory", "1GiB")
    assert (code, "needs" in json.dumps(found)) == (2, True)
    for more in (
        ("--rate", "3"),
        ("--rate", "0"),
        ("--workload", "agents"),
        ("--max-gpus", "3"),
        ("--sessions", "4"),
    ):
        code, found = plan(capsys, *words, *options, *more)
        assert (code, "plan of one model" in json.dumps(found)) == (2, True)
    code, found = plan(capsys, *words, *options, "--device", "cpu")
    assert (code, "give one" in json.dumps(found)) == (2, True)
