"""Devices, operators, traffic and planned engines."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from slipstream.config import EngineArgs
from slipstream.config.forms import NgramDrafts
from slipstream.costs.analytic import binds
from slipstream.costs.devices import find_device, known_devices
from slipstream.costs.graph_sizes import GRAPH_BYTES, ladder, mixed_prompts, padding
from slipstream.costs.memory import weights_bytes
from slipstream.costs.offload import estimate_offload
from slipstream.costs.operators import products
from slipstream.costs.step_cost import MeasuredStep, StepCounts, fit_steps
from slipstream.costs.tables import find_table, identity, keep_table
from slipstream.errors import ConfigError, OutOfMemoryError
from slipstream.simulate.capacity import LatencyObjectives, find_capacity, keeps_up
from slipstream.simulate.drafts import parse_acceptance
from slipstream.simulate.engines import measured, plan_engine
from slipstream.simulate.recommend import OfferedLoad, as_data, plan_device
from slipstream.simulate.traffic import PREFIX_TOKENS, parse_workload, read_trace
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import SCHEMES

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


def planned(config="llama-3-8b", device="h200", num_gpus=1, **settings):
    args = EngineArgs(model=str(CONFIGS / config), **settings)
    return plan_engine(args, read_spec(CONFIGS / config), find_device(device), num_gpus=num_gpus)


@pytest.mark.parametrize(
    "config", ["llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite", "gemma-2-9b", "gpt-j-6b"]
)
@pytest.mark.parametrize("scheme", [None, "fp8", "int4"])
def test_products_have_the_ledgers_bytes_and_the_specs_parameters(config, scheme):
    spec = read_spec(CONFIGS / config).spec
    parts = weights_bytes(spec, 2, SCHEMES[scheme] if scheme else None)
    found = products(spec, parts)
    inside = sum(p.weight_bytes * p.count for p in found if p.name != "head")
    assert inside == pytest.approx(parts["attention"] + parts["mlp"])
    numbers = sum(p.rows * p.inner * p.copies * p.count for p in found if p.name != "head")
    shapes = [
        s
        for layer in spec.layers
        for n, s in layer.shapes(spec.hidden_size).items()
        if n.endswith(".weight") and len(s) == 2
    ]
    assert numbers == sum(a * b for a, b in shapes)


def test_of_experts_only_those_chosen_are_read():
    up = next(p for p in planned("mixtral-8x7b").analytic.products if p.name == "up")
    assert (up.copies, up.chosen) == (8, 2)
    assert up.read_bytes(1) == pytest.approx(up.weight_bytes / 4)
    assert up.read_bytes(1000) == pytest.approx(up.weight_bytes)


def test_the_records_of_an_h200_are_met():
    """Steps of results/mixed_steps.json and llama_table_*.json."""
    fp8 = planned(quantization="fp8", kv_cache_dtype="fp8").analytic
    bf16 = planned().analytic
    for cost, shape, ms in (
        (fp8, StepCounts.of((130,)), 2.36),
        (bf16, StepCounts.of((130,)), 3.85),
        (fp8, StepCounts.of((300,) * 64), 3.85),
        (fp8, StepCounts.of((400,) * 250, ((0, 260), (0, 240))), 13.97),
        (fp8, StepCounts.of((), ((0, 2048),)), 29.9),
    ):
        assert cost.seconds(shape) * 1e3 == pytest.approx(ms, rel=0.12)


def test_steps_that_no_graph_holds_are_launched_op_by_op():
    """The host's time is that of results/beams.json and of runs before it. Graphs are not longer than the context,
    and hold few prompts."""
    gpt_j, fp8 = planned("gpt-j-6b"), planned(quantization="fp8", kv_cache_dtype="fp8")
    assert 0.029 < gpt_j.simulated.cost.host.launch_s < 0.046
    for engine, longest in (
        (gpt_j, 2048),
        (fp8, 4096),
        (fp8.with_settings(max_model_len=1024), 1024),
    ):
        padded = engine.simulated.padded
        assert (padded(0, longest, 1), padded(0, longest + 1, 1)) == ((0, longest), None)
        assert padded(0, 1000, 64) is None
    assert fp8.with_settings(enforce_eager=True).simulated.padded is None


def test_ranks_have_graphs_of_long_steps():
    one, two = (planned(kv_cache_dtype="fp8", num_gpus=n).simulated for n in (1, 2))
    assert one.padded(0, 7000, 1) is None
    assert two.padded(0, 7000, 1) == (0, 7168)


@pytest.mark.parametrize("device", list(known_devices()))
def test_more_work_takes_longer_on_every_device(device):
    cost = planned(
        "llama-3-8b", device, kv_cache_bytes=None if known_devices()[device].is_gpu else 2**30
    ).analytic
    for small, large in (
        (StepCounts.of((100,)), StepCounts.of((100,) * 8)),
        (StepCounts.of((100,) * 8), StepCounts.of((4000,) * 8)),
        (StepCounts.of((), ((0, 128),)), StepCounts.of((), ((0, 512),))),
    ):
        assert 0 < cost.seconds(small) < cost.seconds(large)
    assert cost.label(StepCounts.of((100,))) == "estimated"


def test_weights_of_up_to_6_bits_have_a_rate_of_their_own_on_a_cpu():
    device = find_device("cpu-box")
    assert device.rate("int6") == device.rate("int8")
    found = measured(device, {"int8": 1e11, "int6": 2e11})
    assert found.rate("int6") == 2 * found.rate("int8")
    before = measured(device, {"int8": 1e11})  # kept by a version that did not measure int6
    assert before.rate("int6") == before.rate("int8") == found.rate("int8")
    assert planned(device="cpu-box", quantization="int4").analytic.product_type == "int6"
    assert planned(device="cpu-box", quantization="int8").analytic.product_type == "int8"


def test_gpus_that_share_a_model_are_faster_but_not_twice():
    one, two = planned().analytic, planned(num_gpus=2).analytic
    shape = StepCounts.of((500,) * 16)
    assert one.seconds(shape) / 2 < two.seconds(shape) < one.seconds(shape)
    assert two.parts(shape)["link"] > 0
    assert planned(num_gpus=2).ledger.num_blocks > 2 * planned().ledger.num_blocks


def test_the_ledger_has_adapters_and_what_two_gpus_copy():
    inputs, outputs = (3 + 1 + 2) * 4096 + 14336, 6144 + 4096 + 2 * 14336 + 4096
    own = planned(enable_lora=True, max_loras=4, max_lora_rank=16).ledger
    assert own.adapter_bytes == 4 * 32 * 16 * (inputs + outputs) * 2
    assert own.num_blocks < planned().ledger.num_blocks
    assert own.graph_bytes == 2 * planned().ledger.graph_bytes
    sizes = dict(max_num_batched_tokens=8192, max_num_seqs=1024)
    two = planned(num_gpus=2, enable_lora=True, max_loras=4, max_lora_rank=16, **sizes).ledger
    assert two.peer_copy_bytes == 2 * 2 * (8192 + 1024) * 4096 * 2
    assert (
        own.adapter_bytes < two.adapter_bytes < 2 * own.adapter_bytes
    )  # inputs that both have are there twice
    assert two.used_bytes <= two.allowed_bytes
    assert [line.split("  ")[0] for line in two.describe()[5:8]] == [
        "adapters",
        "peer copies",
        "left",
    ]
    assert (
        planned(**sizes).ledger.peer_copy_bytes
        == planned(num_gpus=4, **sizes).ledger.peer_copy_bytes
        == 0
    )
    assert (
        planned(
            num_gpus=2, **{**sizes, "max_num_batched_tokens": 1024, "max_num_seqs": 512}
        ).ledger.peer_copy_bytes
        == 0
    )


def test_names_of_devices():
    assert find_device("NVIDIA H200") is find_device("h200") is find_device("H200-SXM")
    assert find_device("4090").title == "NVIDIA GeForce RTX 4090"
    with pytest.raises(ConfigError, match=r"gpu='h201' is not one of .*did you mean h200"):
        find_device("h201")
    assert find_device("h100 80gb") is find_device("H100")
    assert find_device("Instinct MI300X") is find_device("mi300x")
    for other in (
        "h20",
        "NVIDIA H20",
        "NVIDIA A10",
        "L40",
        "RTX 40",
        "nvidia",
        "",
    ):  # GPUs whose names another's begins with
        with pytest.raises(ConfigError, match=f"gpu='{other}' is not one of"):
            find_device(other)


def test_graph_sizes_hold_what_they_are_asked_for():
    engine = planned(max_num_seqs=256)
    padded = padding(engine.config, engine.description.spec)
    for decodes, prompt in ((1, 0), (9, 0), (130, 0), (0, 30), (100, 300), (256, 4000)):
        more_decodes, more_prompt = padded(decodes, prompt, 1)
        assert more_decodes >= decodes
        assert more_prompt >= prompt
        assert (more_prompt > 0) == (prompt > 0)
    assert padded(130, 0, 0)[0] in ladder(256)
    assert padded(10, 5000, 3) is None


def test_the_longest_step_with_a_graph():
    """A mixture's is twice as long as others'. A decoder behind an encoder has none with prompts."""
    engine = planned("qwen3-30b-a3b", max_num_seqs=256, max_num_batched_tokens=16384)
    config, spec = engine.config, engine.description.spec
    assert mixed_prompts(config, spec)[-1] == 8192
    assert padding(config, spec)(10, 6000, 3) == (16, 6144)
    assert padding(config, spec)(10, 8193, 3) is None
    shorter = dataclasses.replace(
        config, model=dataclasses.replace(config.model, max_model_len=7000)
    )
    assert mixed_prompts(shorter, spec)[-1] == 6144
    for other in (
        "llama-3-8b",
        "deepseek-v2-lite",
    ):  # latent attention has a way of its own for long prompts, outside graphs
        assert mixed_prompts(config, planned(other).description.spec)[-1] == 4096
    assert not mixed_prompts(config, read_spec(CONFIGS / "t5-large").spec)


def test_a_step_that_verifies_drafts_is_padded_to_rows():
    """The step has 40 sequences, all or some with two drafts each, with and without a prompt."""
    speculation = NgramDrafts(num_speculative_tokens=8)
    engine = planned(max_num_seqs=64)
    padded = padding(
        dataclasses.replace(engine.config, speculation=speculation), engine.description.spec
    )
    assert padded(0, 120, 40, by_rows=True) == (128, 0)
    assert padded(10, 90, 30, by_rows=True) == (128, 0)
    assert padded(10, 90, 30) == (16, 128)
    assert padded(0, 513, 57, by_rows=True) == (576, 0)  # 512 drafts in a step at most
    assert padded(0, 577, 57, by_rows=True) == (0, 768)  # more rows than a decode graph has


def test_a_draft_models_chains_are_in_the_ledger():
    """The ledger has 256 sequences with the logits of one pass, twice, and 9 sizes for one depth of 4 passes of 16 layers."""
    configs = {"method": "draft", "model": str(CONFIGS / "llama-3.2-1b")}, {"method": "ngram"}
    description, rates, found = read_spec(CONFIGS / "llama-3-8b"), parse_acceptance("0.8"), []
    for config in configs:
        more = {"max_num_seqs": 256, "speculative_config": {**config, "num_speculative_tokens": 4}}
        args = EngineArgs(model=str(CONFIGS / "llama-3-8b"), **more)
        found.append(
            plan_engine(args, description, find_device("h200"), acceptance=rates).ledger.graph_bytes
        )
    activations = 2 * (512 * (2 * 8192 + 8 * 2048) + 256 * 128_256) * 2
    assert found[0] - found[1] == 2 * 9 * GRAPH_BYTES + activations


def test_graph_sizes_waste_little_and_fill_tiles():
    for most in (300, 512, 1000, 2048):
        sizes = ladder(most)
        assert sizes[-1] == most
        assert all(b - a <= max(8, (a + 1) / 8) for a, b in itertools.pairwise(sizes) if a >= 16)
        assert set(range(128, most + 1, 128)) <= set(sizes)


# --- Traffic ----------------------------------------------------------------------------------------------------------


def test_traces_give_arrivals_lengths_and_prefixes(tmp_path):
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    mooncake.write_text(
        '{"timestamp": 500, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    )
    first, second = read_trace(azure).requests
    assert (first.arrival, first.input_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrival == pytest.approx(4.314579, abs=1e-5)
    (only,) = read_trace(mooncake).requests
    assert (only.arrival, only.input_tokens, only.prefix) == (0.0, 700, (0, 1))
    assert len(only.prefix) * PREFIX_TOKENS >= 700
    laps = read_trace(azure).traffic(None, 5)
    assert [r.input_tokens for r in laps.requests] == [374, 396, 374, 396, 374]
    assert all(
        a.arrival < b.arrival for a, b in zip(laps.requests, laps.requests[1:], strict=False)
    )
    assert read_trace(azure).at_rate(10.0, 50).rate == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,x,44\n",
            "line 2: ValueError",
        ),
        ("a,b\n1,2\n", "line 2: KeyError"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
    ],
)
def test_a_bad_trace_is_named(tmp_path, text, message):
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse_workload(f"trace:{file}")


@pytest.mark.parametrize(
    "text", ["fixed", "fixed:5", "fixed:0/4", "uniform:9-4/1-2", "zipf", "trace:", "sharegpt:x"]
)
def test_a_bad_workload_is_named(text):
    with pytest.raises(ConfigError, match="workload="):
        parse_workload(text)


def test_workloads_give_the_lengths_they_name():
    assert {(r.input_tokens, r.output_tokens) for r in parse_workload("fixed:7/3").requests} == {
        (7, 3)
    }
    found = parse_workload("uniform:4-8/2-3", seed=1).requests
    assert {r.input_tokens for r in found} == {4, 5, 6, 7, 8}
    assert len(parse_workload("sharegpt").requests) >= 2000
    with pytest.raises(ConfigError, match="has no arrival times"):
        parse_workload("sharegpt").traffic(None, 3)


# --- Tables and plans -------------------------------------------------------------------------------------------------


def test_a_table_is_found_again_by_what_it_is_of(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = planned(quantization="fp8")
    of = identity(engine.config, engine.description.spec, 1000 * 2**20)
    shapes = [StepCounts.of((100,) * n) for n in (1, 2, 4, 8)]
    table = fit_steps(
        [MeasuredStep(s, 0.001 + s.num_tokens * 1e-4) for s in shapes], identity=of, made_by={}
    )
    path = keep_table(table)
    assert find_table(of) == table
    assert find_table({**of, "quantization": None}) is None
    path.write_text("{")
    with pytest.raises(ConfigError, match="measure again"):
        find_table(of)


def test_capacity_is_where_the_objectives_end():
    engine, workload = planned(quantization="fp8").simulated, parse_workload("fixed:200/40")
    strict, loose = (
        LatencyObjectives(limits={"tpot_s": most}, attainment=0.9) for most in (0.006, 0.02)
    )
    low, high = (find_capacity(engine, workload, o) for o in (strict, loose))
    assert low.rate < high.rate
    assert strict.met_by(low.run)
    assert keeps_up(high.run, high.rate)
    never = find_capacity(
        engine, workload, LatencyObjectives(limits={"tpot_s": 1e-4}, attainment=0.9)
    )
    assert never.rate is None
    assert (
        LatencyObjectives(limits={"tpot_s": 1e-4}, attainment=0.9).reached(never.alone)["tpot_s"]
        > 1e-3
    )


def test_a_plan_says_how_many_what_binds_and_why():
    args = EngineArgs(model=str(CONFIGS / "llama-3-8b"), quantization="fp8", kv_cache_dtype="fp8")
    load = OfferedLoad(
        workload=parse_workload("fixed:500/50"),
        objectives=LatencyObjectives(limits={"ttft_s": 0.5}, attainment=0.9),
        rate=60.0,
    )
    plan = plan_device(
        args, read_spec(CONFIGS / "llama-3-8b"), find_device("h200"), load, search=False
    )
    assert plan.replicas is not None
    assert load.objectives.met_by(plan.run)
    row = as_data(plan, load, 4.0)
    assert row["cost_per_million_output_tokens"] == pytest.approx(
        plan.num_gpus * 4.0 / 3600 / row["throughput"] * 1e6
    )
    assert {r["setting"] for r in row["recommended"]} >= {
        "max_num_seqs",
        "replicas",
        "gpu_memory_utilization",
    }
    assert all(r["reason"] for r in row["recommended"])
    assert row["binds"] in (
        "memory",
        "bandwidth",
        "products",
        "host",
        "fixed times of operators",
        "link",
    )
    json.dumps(row)


def test_a_model_that_fits_nowhere_says_what_would_help():
    args = EngineArgs(model=str(CONFIGS / "deepseek-v3"))
    load = OfferedLoad(
        workload=parse_workload("fixed:50/5"),
        objectives=LatencyObjectives(limits={}, attainment=0.9),
    )
    with pytest.raises(OutOfMemoryError, match="2 such devices are not enough either"):
        plan_device(args, read_spec(CONFIGS / "deepseek-v3"), find_device("l4"), load, max_gpus=2)


def test_two_gpus_hold_what_one_does_not():
    args = EngineArgs(model=str(CONFIGS / "mixtral-8x7b"), max_model_len=2048)
    load = OfferedLoad(
        workload=parse_workload("fixed:50/5"),
        objectives=LatencyObjectives(limits={}, attainment=0.9),
    )
    plan = plan_device(
        args,
        read_spec(CONFIGS / "mixtral-8x7b"),
        find_device("a100"),
        load,
        max_gpus=4,
        search=False,
    )
    assert plan.engine.num_gpus == 2
    assert any("does not hold the model" in note for note in plan.notes)
    assert any("several devices are estimated" in note for note in plan.notes)


def test_layers_that_are_copied_to_a_gpu_bound_its_steps():
    one, many = StepCounts.of([100] * 4), StepCounts.of(prompts=[(0, 512)] * 32)
    whole, bounded = planned(), planned(weights_bytes=8 * 2**30)
    offload = estimate_offload(bounded.config, bounded.description)
    assert offload.read_bytes > 7 * 2**30
    read_s = offload.read_bytes / 55e9
    assert bounded.analytic.seconds(one) == pytest.approx(read_s)
    assert sum(bounded.analytic.parts(one).values()) == pytest.approx(read_s)
    assert binds(bounded.analytic.parts(one)) == "reading layers"
    assert whole.analytic.seconds(one) < read_s / 10
    assert (
        bounded.analytic.seconds(many) == whole.analytic.seconds(many) > read_s
    )  # computed meanwhile
    assert bounded.table is None
    assert bounded.ledger.num_blocks > whole.ledger.num_blocks
    assert planned(weights_bytes=20 * 2**30).analytic.read_s == 0


def test_int4_reads_as_dense_beyond_one_token():
    int4, bf16, fp8 = (planned(quantization=q).analytic for q in ("int4", None, "fp8"))
    one, many = StepCounts.of((300,)), StepCounts.of((300,) * 16)
    assert int4.seconds(one) < fp8.seconds(one)
    assert int4.seconds(many) == pytest.approx(bf16.seconds(many), rel=0.01)
    assert int4.on(2).seconds(many) == pytest.approx(bf16.on(2).seconds(many), rel=0.01)


def test_fixed_times_of_a_gpu_by_what_a_step_holds():
    cost = planned().analytic
    fixed = [
        cost.parts(StepCounts.of(decodes, prompts))["fixed"]
        for decodes, prompts in (
            ((300,) * 8, ()),
            ((300,) * 64, ()),
            ((), ((0, 64),)),
            ((300,) * 8, ((0, 64),)),
        )
    ]
    assert fixed[0] < fixed[1] < fixed[3]
    assert fixed[1] == pytest.approx(fixed[2])
