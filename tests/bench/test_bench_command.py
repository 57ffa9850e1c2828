"""`slipstream bench`, each kind and adapter, over tiny dummy models."""

from __future__ import annotations

import json

import pytest
import torch

from slipstream.bench.adapters import EngineSetup, make_engine
from slipstream.bench.adapters.openai import ListedModel
from slipstream.bench.adapters.slipstream import OfflineSlipstream, greedy
from slipstream.bench.adapters.transformers import OfflineTransformers
from slipstream.bench.workload import BenchRequest, fixed
from slipstream.cli.bench import offline
from slipstream.cli.main import main
from slipstream.config import EngineArgs
from slipstream.costs.metrics import DEFINITIONS
from slipstream.errors import ConfigError
from tests.server.conftest import serving
from tests.server.fake_engine import FakeEngine

URL = "--url=http://127.0.0.1:1"
DUMMY = [
    "--load-format=dummy",
    "--device=cpu",
    "--dtype=float32",
    "--num-threads=1",
    "--kv-cache-bytes=8MiB",
]
SHORT = ["--num-requests=6", "--input-len=20", "--output-len=9"]


def result(capsys, *words, code=0):
    assert main(["bench", *map(str, words), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def check_document(found, kind):
    assert found["benchmark"] == kind
    assert found["definitions"] == DEFINITIONS
    assert set(found["versions"]) >= {"slipstream", "torch", "python", "triton", "transformers"}
    assert found["machine"]["host"]["num_cores"] >= 1


def test_latency_has_a_row_for_each_batch_size(config_only, capsys):
    words = [
        "latency",
        config_only,
        "--batch-sizes=1,3",
        "--input-len=8",
        "--output-len=6",
        "--repeat=2",
        *DUMMY,
    ]
    found = result(capsys, *words)
    check_document(found, "latency")
    assert [row["batch_size"] for row in found["results"]] == [1, 3]
    for row in found["results"]:
        assert 0 < row["ttft_s"] < row["e2e_s"]
        assert row["e2e_s"] == pytest.approx(row["ttft_s"] + 5 * row["tpot_s"], rel=0.5)


@pytest.mark.parametrize("policy", ["inflight", "dynamic", "static"])
def test_throughput_of_each_policy(config_only, capsys, policy):
    found = result(
        capsys,
        "throughput",
        config_only,
        *SHORT,
        *DUMMY,
        f"--scheduling-policy={policy}",
        "--repeat=2",
    )
    check_document(found, "throughput")
    assert found["engine"]["config"]["scheduling"]["policy"] == policy
    assert found["engine"]["config"]["cache"]["enable_prefix_caching"] is False
    assert (found["results"]["input_tokens"], found["results"]["output_tokens"]) == (120, 54)
    assert found["results"]["cached_tokens"] == 0
    assert found["results"]["output_throughput"] == min(
        found["output_throughput_of_each_run"]
    )  # of two, the lower


def test_throughput_random_and_lengths(config_only, capsys, tmp_path):
    found = result(
        capsys, "throughput", config_only, *SHORT, *DUMMY, "--workload=random", "--range-ratio=0.2"
    )
    assert found["workload"]["input_range"] == [4, 20]
    one = ["--num-requests=2", "--input-len=1", "--output-len=2", "--workload=random"]
    found = result(capsys, "throughput", config_only, *one, *DUMMY, "--range-ratio=0.2")
    assert found["workload"]["input_range"] == [1, 1]
    path = tmp_path / "lengths.json"
    path.write_text('{"lengths": [[3, 4], [5, 6]]}')
    words = ["--workload=lengths", f"--lengths-file={path}", "--num-requests=2"]
    found = result(capsys, "throughput", config_only, *DUMMY, *words)
    assert (found["results"]["input_tokens"], found["results"]["output_tokens"]) == (8, 10)


def test_shared_prefix_is_shared(config_only, capsys):
    words = ["--workload=shared-prefix", "--prefix-len=64", "--warmup=2", "--max-num-seqs=1"]
    found = result(capsys, "throughput", config_only, *SHORT, *DUMMY, *words)
    assert (
        found["results"]["cached_tokens"] == 5 * 64
    )  # all but the first, and nothing of the warm-up
    found = result(
        capsys, "throughput", config_only, *SHORT, *DUMMY, *words, "--no-enable-prefix-caching"
    )
    assert found["results"]["cached_tokens"] == 0


def test_runs_do_not_profit_from_earlier_ones(config_only):
    args = EngineArgs(
        model=str(config_only),
        load_format="dummy",
        device="cpu",
        skip_tokenizer_init=True,
        num_threads=1,
    )
    engine = OfflineSlipstream(args)
    workload = fixed(3, 40, 2, vocab_size=200)
    for _ in range(2):
        assert [r.cached_tokens for r in engine.run(workload.requests)] == [0, 0, 0]


def test_answers_have_exactly_the_length_asked_for():
    sampling = greedy(7)
    assert sampling.temperature == 0.0
    assert sampling.ignore_eos
    assert sampling.max_tokens == 7


def test_throughput_of_transformers_fails_no_request(config_only, capsys):
    words = ["--engine=transformers", "--batch-size=4", "--workload=random"]
    found = result(capsys, "throughput", config_only, *SHORT, *DUMMY[:-1], *words)
    assert found["engine"]["name"] == "transformers"
    assert found["engine"]["config"]["dtype"] == "float32"
    assert found["results"]["num_failed"] == 0
    assert found["results"]["output_tokens"] == found["workload"]["output_tokens"]


def test_transformers_batches_compute_what_single_requests_do(tiny_model, monkeypatch):
    """Left padding and the mask are right: in a batch of uneven prompts each gets the tokens it gets alone."""
    engine = OfflineTransformers(
        tiny_model, batch_size=3, dtype="float32", device="cpu", num_threads=1, dummy=False
    )
    made = []
    generate = engine.model.generate

    def spy(**arguments):
        made.append(generate(**arguments)[:, arguments["input_ids"].shape[1] :])
        return made[-1]

    monkeypatch.setattr(engine.model, "generate", spy)
    requests = [
        BenchRequest(prompt_token_ids=tuple(range(5, 5 + n)), output_tokens=m)
        for n, m in ((3, 6), (20, 9), (9, 4))
    ]
    records = engine.run(requests)
    (together,) = made
    assert [r.output_tokens for r in records] == [6, 9, 4]
    assert records[2].last_token < records[0].last_token < records[1].last_token
    made.clear()
    for row, request in enumerate(requests):
        engine.run([request])
        assert torch.equal(made[-1][0], together[row][: request.output_tokens])


def test_serve_in_process(config_only, capsys, tmp_path):
    output = tmp_path / "result.json"
    words = ["--arrivals=poisson:200", "--slo=e2e_s=60", f"--output={output}"]
    found = result(capsys, "serve", config_only, *SHORT, *DUMMY, *words)
    check_document(found, "serve")
    assert found["arrivals"] == {"kind": "poisson", "rate": 200.0}
    assert found["results"]["goodput"] == pytest.approx(found["results"]["requests_per_s"])
    assert found["results"]["itl_s"]["mean"] > 0
    assert found["engine"]["stats"]["num_free_blocks"] == found["engine"]["stats"]["num_blocks"]
    assert json.loads(output.read_text()) == found


def test_serve_a_url(capsys):
    engine = FakeEngine()
    with serving(engine, served_model_names=("tiny",)) as server:
        found = result(
            capsys, "serve", "--url", server.url, "--vocab-size=200", "--arrivals=closed:2", *SHORT
        )
        assert (found["engine"]["model"], found["arrivals"]["concurrency"]) == ("tiny", 2)
        assert (found["results"]["input_tokens"], found["results"]["output_tokens"]) == (120, 54)
        assert found["results"]["num_failed"] == 0
        measured = [
            sampling for prompt, sampling, _ in engine.seen if len(prompt["prompt_token_ids"]) == 20
        ]
        assert [(s.max_tokens, s.ignore_eos, s.temperature) for s in measured[-6:]] == [
            (9, True, 0.0)
        ] * 6
        words = ["--url", server.url, "--vocab-size=200", "--served-model-name=other"]
        told = result(capsys, "serve", *words, *SHORT, code=2)
        assert "404" in told["error"]["message"]


def test_the_server_says_how_many_token_ids_there_are(capsys):
    engine = FakeEngine()
    with serving(engine, served_model_names=("tiny",)) as server:
        result(capsys, "serve", "--url", server.url, *SHORT)
        assert 200 < max(max(prompt["prompt_token_ids"]) for prompt, _, _ in engine.seen) < 256


def test_one_that_does_not_say(capsys, monkeypatch):
    monkeypatch.setattr(ListedModel, "num_token_ids", property(lambda self: None))
    with serving(FakeEngine()) as server:
        told = result(capsys, "serve", "--url", server.url, *SHORT, code=2)
    assert told["error"]["field"] == "vocab_size"
    assert "MODEL --url" in told["error"]["message"]


def test_serve_compares_two_servers_in_turn(capsys):
    first, second = FakeEngine(), FakeEngine()
    with (
        serving(first, served_model_names=("a",)) as one,
        serving(second, served_model_names=("b",)) as two,
    ):
        words = [
            "--url",
            one.url,
            "--compare",
            two.url,
            "--compare-model=b",
            "--clients=2",
            "--concurrency=3",
        ]
        words += ["--vocab-size=200", "--rounds=3", "--warmup=1", *SHORT]
        found = result(capsys, "serve", *words)
        assert main(["bench", "serve", *words]) == 0
        table = capsys.readouterr().out
    assert (found["engine"]["model"], found["compared"]["engine"]["model"]) == ("a", "b")
    for part in (found, found["compared"]):
        assert part["clients"]["num_clients"] == 2
        assert len(part["output_throughput_of_each_round"]) == 3
        assert (
            part["results"]["output_throughput"]
            == sorted(part["output_throughput_of_each_round"])[1]
        )
    assert "first / second" in table
    # The warm-up and six requests a round, with other prompts in each round, and the same for both.
    prompts = [
        [tuple(prompt["prompt_token_ids"]) for prompt, _, _ in engine.seen]
        for engine in (first, second)
    ]
    assert len(prompts[0]) == 2 * 3 * 7
    assert len(set(prompts[0])) == 3 * 7
    assert set(prompts[0]) == set(prompts[1])


def test_serve_finds_a_rate(capsys):
    with serving(FakeEngine(), served_model_names=("tiny",)) as server:
        words = [
            "--url",
            server.url,
            "--vocab-size=200",
            "--request-rate=100",
            "--find-rate-runs=3",
            *SHORT,
        ]
        found = result(capsys, "serve", *words, "--find-rate=ttft_p99=60")
        (search,) = found["results"]
        assert found["benchmark"] == "find-rate"
        assert [run["rate"] for run in search["runs"]] == [100.0, 200.0, 400.0]
        assert search["rate"] == 400.0
        found = result(capsys, "serve", *words, "--find-rate=ttft_p99=1e-9", code=1)
        assert found["results"][0]["rate"] is None
        assert main(["bench", "serve", *words, "--find-rate=ttft_p99=60"]) == 0
        assert "the objectives hold at 400 requests/s" in capsys.readouterr().out


AGENTS = ["--workload=agents", "--sessions=3", "--max-context=300", "--turns=uniform:2-4"]
AGENTS += ["--system-tokens=32", "--task-tokens=20", "--turn-tokens=15", "--answer-tokens=6"]
AGENTS += ["--pause=0.01", "--subagent-rate=0.3", "--summary-tokens=8", "--subagent-turns=2"]


def test_serve_agents_in_process(config_only, capsys):
    words = ["--concurrency=1,3", "--slo=ttft_s=60", *DUMMY]
    found = result(capsys, "serve", config_only, *AGENTS, *words)
    assert found["benchmark"] == "agents"
    assert found["workload"]["num_sessions"] == 3
    assert found["workload"]["turn_tokens"] == "lognormal:15:1"
    assert found["engine"]["config"]["cache"]["enable_prefix_caching"] is True
    assert [level["arrivals"]["concurrency"] for level in found["levels"]] == [1, 3]
    for level in found["levels"]:
        got = level["results"]
        assert (got["num_complete"], got["turns"]["num_failed"], got["num_gpus"]) == (3, 0, 1)
        assert got["turns"]["num_requests"] == found["workload"]["num_turns"]
        assert got["turns"]["input_tokens"] == found["workload"]["input_tokens"]
        assert 0.3 < got["hit_rate"] <= got["cacheable_rate"] < 1
        assert got["interactivity"]["p50"] == pytest.approx(1 / got["turns"]["tpot_s"]["p50"])
        assert got["turns"]["goodput"] == pytest.approx(got["turns_per_minute"] / 60)
    assert "interactivity" in found["definitions"]
    assert main(["bench", "serve", str(config_only), *AGENTS, *words]) == 0
    shown = capsys.readouterr().out
    for part in (
        "prefix hits",
        "3 of 3 complete",
        "throughput and interactivity",
        "tok/s/user p50",
    ):
        assert part in shown


@pytest.mark.parametrize("api", ["auto", "completions", "chat"])
def test_serve_agents_to_two_servers(capsys, api):
    engines = FakeEngine(max_model_len=3000), FakeEngine(max_model_len=3000)
    with (
        serving(engines[0], served_model_names=("a",)) as one,
        serving(engines[1], served_model_names=("b",)) as two,
    ):
        words = ["--url", one.url, "--compare", two.url, "--rounds=2", f"--api={api}"]
        found = result(capsys, "serve", *words, "--num-gpus=2", *AGENTS)
        assert main(["bench", "serve", *words, *AGENTS]) == 0
    assert "b" in found["compared"]["engine"]["model"]
    used = "chat" if api == "chat" else "completions"
    for part in (found, found["compared"]):
        assert part["engine"]["api"] == used
        (level,) = part["levels"]
        assert len(level["output_throughput_of_each_round"]) == 2
        turns = level["results"]["turns"]
        assert turns["num_failed"] == 0
        assert level["results"]["num_gpus"] == 2
        assert level["results"]["hit_rate"] == pytest.approx(0.5, abs=0.02)  # as the fake says
        per_gpu = level["results"]["output_throughput_per_gpu"]
        assert per_gpu == pytest.approx(turns["output_throughput"] / 2)


def test_a_server_without_token_ids_gets_messages(capsys, monkeypatch):
    monkeypatch.setattr("slipstream.cli.bench.agents.PROBE", ())  # a prompt that it refuses
    with serving(FakeEngine(max_model_len=3000)) as server:
        found = result(capsys, "serve", "--url", server.url, *AGENTS)
        assert found["engine"]["api"] == "chat"
        assert found["engine"]["tokens_per_word"] > 3
        told = result(capsys, "serve", "--url", server.url, "--api=completions", *AGENTS, code=2)
        assert told["error"]["field"] == "api"


def test_the_servers_context_bounds_sessions(capsys):
    words = [word for word in AGENTS if not word.startswith("--max-context")]
    with serving(FakeEngine(max_model_len=200)) as server:
        found = result(capsys, "serve", "--url", server.url, *words)
        assert found["workload"]["max_context"] == 200
        assert found["workload"]["longest_context"] <= 200
        told = result(capsys, "serve", "--url", server.url, *AGENTS, code=2)
        assert told["error"]["field"] == "max_context"


def test_serve_a_trace(config_only, capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 60, "output_length": 4, "hash_ids": [1]},
        {"timestamp": 50, "input_length": 70, "output_length": 5, "hash_ids": [1]},
        {"timestamp": 60, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 90, "input_length": 30, "output_length": 5, "hash_ids": [3]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    words = ["--workload=trace", f"--trace-file={path}", "--max-context=400", *DUMMY]
    found = result(capsys, "serve", config_only, *words, "--time-scale=0.5", "--num-requests=3")
    (level,) = found["levels"]
    assert level["arrivals"] == {"kind": "trace"}
    assert level["results"]["turns"]["input_tokens"] == 130
    assert level["results"]["turns"]["cached_tokens"] == 48
    assert level["results"]["cacheable_rate"] == pytest.approx(60 / 130)
    found = result(capsys, "serve", config_only, *words, "--concurrency=2")
    assert found["levels"][0]["results"]["turns"]["num_requests"] == 3


def test_a_load_without_a_server_says_so(capsys):
    told = result(capsys, "serve", "--url=http://127.0.0.1:1", "--vocab-size=10", code=1)
    assert "no server listens" in told["error"]["message"]
    for api in ("auto", "chat"):
        words = ["--workload=agents", "--served-model-name=x", "--vocab-size=10", f"--api={api}"]
        words = [word for word in words if api == "auto" or not word.startswith("--vocab")]
        told = result(capsys, "serve", "--url=http://127.0.0.1:1", *words, code=1)
        assert "can't be reached" in told["error"]["message"]


def test_tables_are_printed_without_json(config_only, capsys):
    assert main(["bench", "throughput", str(config_only), *SHORT, *DUMMY]) == 0
    out = capsys.readouterr().out
    for part in ("TTFT, ms", "output throughput", "total throughput", "p99", *DEFINITIONS.values()):
        assert part in out
    assert (
        main(
            [
                "bench",
                "latency",
                str(config_only),
                "--batch-sizes=1",
                "--output-len=3",
                "--repeat=1",
                *DUMMY,
            ]
        )
        == 0
    )
    assert "decode, ms/token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["latency", "M", "--repeat=0"], "repeat"),
        (["throughput", "M", "--num-requests=0"], "num_requests"),
        (["throughput", "M", "--workload=lengths"], "lengths_file"),
        (["throughput", "M", "--workload=random", "--range-ratio=0"], "range_ratio"),
        (["throughput", "M", "--warmup=-1"], "warmup"),
        (["throughput", "M", "--engine=transformers"], "dtype"),
        (
            ["throughput", "M", "--engine=transformers", "--dtype=float32", "--load-format=gguf"],
            "load_format",
        ),
        (["throughput", "M", "--engine=llamacpp"], "engine"),  # its package is not there
        (["throughput", "M", "--engine=openvino"], "engine"),
        (["throughput", "M", "--engine=onnxruntime"], "engine"),
        (["serve", "M", "--vocab-size=9", URL], "vocab_size"),
        (["serve"], "model"),
        (["serve", "M", "--arrivals=x"], "arrivals"),
        (["serve", "M", "--slo=x"], "slo"),
        (["serve", "M", "--rounds=0"], "rounds"),
        (["serve", "M", "--find-rate=x", "--request-rate=1"], "find_rate"),
        (["throughput", "M", "--output-len=600", *DUMMY], "max_tokens"),
        (["serve", "M", *AGENTS, "--turns=x"], "turns"),
        (["serve", "M", *AGENTS, "--sessions=0"], "sessions"),
        (["serve", "M", *AGENTS, "--concurrency=1,9"], "sessions"),
        (["serve", "M", *AGENTS, "--concurrency=1,x"], "arrivals"),
        (["serve", "M", *AGENTS, "--concurrency=,"], "arrivals"),
        (["serve", "M", *AGENTS, "--find-rate=ttft_p99=1", "--request-rate=1"], "find_rate"),
        (["serve", "M", *AGENTS, "--rounds=0"], "rounds"),
        (["serve", "M", *AGENTS, "--num-gpus=0"], "num_gpus"),
        (["serve", "M", *AGENTS, "--warmup=-1"], "warmup"),
        (["serve", "M", *AGENTS, "--max-context=9000", *DUMMY], "max_context"),
        (["serve", *AGENTS, "--api=chat", "--vocab-size=9", URL], "vocab_size"),
        (["serve", "M", "--workload=trace"], "trace_file"),
        (["serve", "M", "--workload=trace", "--trace-file=nowhere"], "trace_file"),
        (["serve", "M", "--workload=trace", "--trace-file=x", "--time-scale=-1"], "time_scale"),
    ],
)
def test_wrong_options_name_their_field(config_only, capsys, words, field):
    found = result(capsys, *[config_only if w == "M" else w for w in words], code=2)
    assert found["error"]["field"] == field


@pytest.mark.parametrize(
    ("words", "owner"),
    [
        (["throughput", "M", "--batch-size=4"], "--engine transformers"),
        (["throughput", "M", "--range-ratio=0.5"], "--workload random"),
        (["throughput", "M", "--prefix-len=400", "--workload=random"], "--workload shared-prefix"),
        (["throughput", "M", "--lengths-file=x"], "--workload lengths"),
        (
            ["throughput", "M", "--input-len=128", "--workload=sharegpt"],
            "the workloads fixed, random, shared-prefix",
        ),
        (
            ["serve", "M", "--output-len=128", "--workload=lengths"],
            "the workloads fixed, random, shared-prefix",
        ),
        (["throughput", "M", "--max-num-seqs=4", "--engine=transformers"], "--engine slipstream"),
        (["throughput", "M", "--kernels=cpu", "--engine=transformers"], "--engine slipstream"),
        (["throughput", "M", "--dtype=bfloat16", "--engine=llamacpp"], "--engine slipstream"),
        (["throughput", "M", "--max-model-len=64", "--engine=onnxruntime"], "--engine slipstream"),
        (["throughput", "M", "--tokenizer=x"], "--workload sharegpt"),
        (["latency", "M", "--tokenizer=x"], "--workload sharegpt"),
        (["serve", "M", "--max-num-seqs=4", URL], "an engine started here"),
        (["serve", "M", "--no-enable-prefix-caching", URL], "an engine started here"),
        (["serve", "--download-dir=x", "--vocab-size=9", URL], "an engine started here"),
        (
            ["serve", "M", "--vocab-size=9", "--workload=sharegpt", URL],
            "workloads of random token ids",
        ),
        (["serve", "M", "--served-model-name=x"], "--url"),
        (["serve", "M", "--api-key=x"], "--url"),
        (["serve", "M", "--no-ignore-eos"], "--url"),
        (["serve", "M", "--clients=2"], "--url"),
        (["serve", "M", "--compare=http://x"], "--url"),
        (["serve", "--compare-model=x", "--vocab-size=9", URL], "--compare"),
        (["serve", "M", "--find-rate-runs=3"], "--find-rate"),
        (["serve", "M", "--sessions=3"], "--workload agents"),
        (["serve", "M", "--max-context=3"], "--workload agents"),
        (["serve", "M", "--turns=3", "--workload=trace"], "--workload agents"),
        (["serve", "M", "--trace-file=x", "--workload=agents"], "--workload trace"),
        (["serve", "M", "--num-requests=3", "--workload=agents"], "workloads other than agents"),
        (["serve", "M", "--api=chat", "--workload=agents"], "the workloads agents and trace with"),
        (["serve", "M", "--num-gpus=3"], "the workloads agents and trace"),
        (["serve", "--clients=3", "--workload=agents", URL], "--url with workloads other than"),
        (
            ["serve", "M", "--rounds=3", "--find-rate=ttft_p99=1", "--request-rate=1"],
            "runs without --find-rate",
        ),
    ],
)
def test_options_without_effect_are_refused(config_only, capsys, words, owner):
    error = result(capsys, *[config_only if w == "M" else w for w in words], code=2)["error"]
    assert f"belongs to {owner}" in error["message"]
    option = "--" + error["field"].replace("_", "-")
    assert error["message"].startswith(option)
    assert any(w.replace("--no-", "--").startswith(option) for w in words)


def test_output_that_cannot_be_written(config_only, capsys):
    words = ["throughput", config_only, *SHORT, *DUMMY, "--output=/no/such/folder/x.json"]
    assert result(capsys, *words, code=2)["error"]["field"] == "output"


@pytest.mark.parametrize(
    "name", [".", "/proc/self/x.json"]
)  # where root may write, too, as to the permissions
def test_an_output_is_tried_before_anything_is_measured(
    config_only, tmp_path, capsys, monkeypatch, name
):
    monkeypatch.setattr(
        "slipstream.bench.adapters.slipstream.OfflineSlipstream",
        lambda *_, **__: pytest.fail("it has begun"),
    )
    words = ["latency", config_only, *DUMMY, f"--output={tmp_path / name}"]
    assert result(capsys, *words, code=2)["error"]["field"] == "output"


def test_what_was_measured_is_shown_though_the_disk_is_full(config_only, capsys):
    words = [
        "latency",
        config_only,
        "--batch-sizes=1",
        "--output-len=3",
        "--repeat=1",
        *DUMMY,
        "--output=/dev/full",
    ]
    assert main(["bench", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert "ms/token" in out
    assert "No space left" in err


def test_batch_size_of_transformers(tiny_model):
    with pytest.raises(ConfigError, match="batch_size"):
        make_engine(
            EngineSetup(
                engine="transformers",
                model="tiny",
                path=tiny_model,
                batch_size=0,
                settings={"dtype": "float32"},
            )
        )


def test_roofline_measures_steps_and_ceilings(config_only, capsys, monkeypatch):
    for name, small in (("READ_BYTES", 2**20), ("MULTIPLY_ROUNDS", 1000), ("CEILING_SECONDS", 0.0)):
        monkeypatch.setattr(f"slipstream.worker.start.roofline.{name}", small)
    words = ["roofline", config_only, "--batch-sizes=2", "--prompt=8", "--context=8", *DUMMY]
    found = result(capsys, *words)
    check_document(found, "roofline")
    assert [step["name"] for step in found["results"]["steps"]] == ["decode 2", "prefill 8"]
    ceilings = found["results"]["ceilings"]
    assert set(ceilings) == {"read", "int6", "int8", "bfloat16", "float32"}
    assert min(ceilings.values()) > 0
    assert {o["operator"].split()[0] for o in found["results"]["steps"][0]["operators"]} >= {
        "linear",
        "attention",
        "norm",
    }
    assert main(["bench", *map(str, words)]) == 0
    out = capsys.readouterr().out
    for shown in ("bound by", "decode 2, 8 tokens each: ", "prefill 8 tokens: "):
        assert shown in out
    assert (
        main(["bench", "roofline", str(config_only), "--prompt=8", *DUMMY[:1], "--kernels=torch"])
        != 0
    )
    assert "kernels" in capsys.readouterr().err


def test_times_are_printed_in_milliseconds_and_unknown_ones_as_a_dash():
    assert [offline._ms(seconds) for seconds in (None, 0.0, 1.23456)] == ["–", "0.00", "1,234.56"]
