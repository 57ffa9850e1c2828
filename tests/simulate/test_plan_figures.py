"""Figures of one plan of a known device, as recorded, and as its page shows them."""

import json

import pytest

from slipstream.cli.main import main
from tests.cli.test_plan import CONFIG

RECORDED = """
ledger.weights_bytes 9086705664; ledger.kv_bytes 122018594816; ledger.num_blocks 58183
ledger.num_kv_tokens 930912; ledger.num_full_sequences 113; max_concurrency 1024; replicas 1
alone.num_requests 100; alone.input_tokens 60000; alone.output_tokens 4000; alone.wall_s 10.83
alone.requests_per_s 9.233; alone.output_throughput 369.3; alone.ttft_s.p50 0.01637
alone.tpot_s.p50 0.002357; alone.e2e_s.p50 0.1083; capacity.requests_per_s 94.6
capacity.output_tokens_per_s 3784; saturated_output_tokens_per_s 3470; throughput 783.1
at_load.num_requests 400; at_load.wall_s 21.01; at_load.ttft_s.p50 0.02158
at_load.ttft_s.p99 0.04107; at_load.tpot_s.p50 0.003731; at_load.tpot_s.p99 0.005755
at_load.worst_gap_s.p50 0.01317; at_load.goodput 19.04; step.decodes 2.897
step.prompt_tokens 44.58; step.seconds 0.004431; step.parts_s.weights 0.001819
step.parts_s.attention 5.594e-05; step.parts_s.activations 0.000173; step.parts_s.fixed 0.002383
busy 0.9121; peak_cache_usage 0.008147; one_more_gib.kv_tokens 8192
one_more_device.requests_per_s 94.6; cost_per_million_output_tokens 1.419
joules_per_output_token 0.8125; balancer_weight 1; num_preemptions 0
"""
RECOMMENDED = {
    "tensor_parallel_size": 1,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 8192,
    "max_num_mixed_tokens": 1024,
    "gpu_memory_utilization": 0.15,
    "replicas": 1,
}
SHOWN = ("94.6", "783", "1.42", "fixed 53.8 %", "140.40 GiB", "4.4 ms", "left 14.04 GiB")
LOAD = ("--workload", "fixed:600/40", "--rate", "20", "--slo", "tpot_s=0.05", "--price", "4")


def test_a_plan_has_the_recorded_figures_and_shows_them(capsys, tmp_path):
    page = tmp_path / "plan.html"
    words = ("plan", CONFIG, "--gpu", "h200", "--quantization", "fp8", *LOAD)
    assert main([*words, "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["devices"]
    for name, value in (
        part.split() for part in RECORDED.replace("\n", ";").split(";") if part.strip()
    ):
        figure = row
        for key in name.split("."):
            figure = figure[key]
        assert figure == pytest.approx(float(value), rel=0.01), name
    assert {r["setting"]: r["value"] for r in row["recommended"]} == RECOMMENDED
    assert (row["binds"], row["objectives_met"], row["label"]) == (
        "fixed times of operators",
        True,
        "estimated",
    )
    assert row["step"]["seconds"] == pytest.approx(sum(row["step"]["parts_s"].values()))
    assert row["cost_per_million_output_tokens"] == pytest.approx(
        4 / 3600 * 1e6 / row["throughput"]
    )
    text = page.read_text()
    for shown in SHOWN:
        assert shown in text, shown
