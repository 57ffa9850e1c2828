"""The rules and the board: every metric is there, promtool accepts the rules, they fire, and every panel has data.

promtool and prometheus are Debian's: `apt-get install -y --no-install-recommends prometheus`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from types import SimpleNamespace

import httpx
import pytest
import yaml

from slipstream.cli.main import main
from slipstream.messages.stats import EngineStats, TierStats
from slipstream.server.operations import metrics
from slipstream.server.operations.monitoring import BURNS, PANELS, ServiceObjectives, board, rules
from tests.support.waiting import PATIENCE_S

NAMES = re.compile(r"slipstream:([a-z0-9_]+)")
INSTALL = "not installed: apt-get install -y --no-install-recommends prometheus"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason=f"promtool is {INSTALL}"
)


@pytest.fixture
def folder(tmp_path, capsys):
    assert main(["monitoring", str(tmp_path), "--json"]) == 0
    capsys.readouterr()
    return tmp_path


def queries():
    return [(title, expr) for title, _, found in PANELS for expr, _ in found]


def test_every_metric_is_there(shared):
    httpx.post(
        shared.url + "/v1/completions",
        json={"prompt": "hello", "max_tokens": 3},
        timeout=PATIENCE_S,
    )
    served = set(NAMES.findall(httpx.get(shared.url + "/metrics", timeout=PATIENCE_S).text))
    asked = set(NAMES.findall(json.dumps(rules(ServiceObjectives())) + json.dumps(board())))
    assert asked
    # only with --self-check: tests/server/operations/test_server_self_check.py finds it there
    assert asked - served == {"self_check_ok"}
    recorded = {rule["record"] for rule in rules(ServiceObjectives())["groups"][0]["rules"]}
    assert (
        set(
            re.findall(r"slo:\w+:\w+", json.dumps(board()) + json.dumps(rules(ServiceObjectives())))
        )
        == recorded
    )


def test_totals_of_tiers_are_counters_and_what_they_hold_is_a_gauge():
    stats = EngineStats(tiers=TierStats(peer_hit_tokens=7, exchange_bytes=5))
    text = metrics.Metrics("m").render(stats).decode()
    assert 'slipstream:kv_handover_hits_total{model_name="m"} 7.0' in text
    assert 'slipstream:kv_handover_held_bytes{model_name="m"} 5.0' in text


def test_a_wait_for_a_slow_client_counts_while_it_lasts_and_no_longer(monkeypatch):
    now = 10.0
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now))
    stalls = metrics.Stalls()
    with stalls.waiting():
        now = 12.0
        assert stalls.total_s == 2
        with pytest.raises(ConnectionError), stalls.waiting():  # a client that leaves
            raise ConnectionError
    now = 20.0
    assert stalls.total_s == 2


def test_bounds_are_those_of_the_histograms(shared):
    httpx.post(
        shared.url + "/v1/completions",
        json={"prompt": "hello", "max_tokens": 3},
        timeout=PATIENCE_S,
    )
    text = httpx.get(shared.url + "/metrics", timeout=PATIENCE_S).text
    written = json.dumps(rules(ServiceObjectives())).replace("\\", "")
    for metric, bound in re.findall(r'slipstream:(\w+)_bucket\{le="([0-9.]+)"', written):
        assert re.search(rf'slipstream:{metric}_bucket\{{le="{re.escape(bound)}"', text), (
            metric,
            bound,
        )


def test_rules_and_a_grafana_board_are_written(folder):
    assert yaml.safe_load((folder / "slipstream-rules.yml").read_text()) == rules(
        ServiceObjectives()
    )
    found = json.loads((folder / "slipstream-dashboard.json").read_text())
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in found["panels"]]
    assert len(set(places)) == len(places) == len(PANELS)
    assert all(panel["targets"] for panel in found["panels"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--ttft-ms=999"], "--ttft-ms"),
        (["--itl-ms=1"], ""),
        (["--itl-ms=3"], "--itl-ms"),
        (["--objective=100"], "--objective"),
    ],
)
def test_objectives_are_taken_or_the_option_is_named(tmp_path, capsys, words, named):
    code = main(["monitoring", str(tmp_path), *words])
    assert code == (2 if named else 0)
    assert named in capsys.readouterr().err


@pytest.fixture
def composed(folder, capsys):
    words = ["monitoring", str(folder), "--compose", "--target", "llm.example:80", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["compose"].endswith("compose.monitoring.yaml")
    return folder, yaml.safe_load((folder / "compose.monitoring.yaml").read_text())


def test_containers_get_the_files_where_they_look_for_them(composed):
    folder, found = composed
    mounted = {}
    for service in found["services"].values():
        assert re.fullmatch(r"[\w./]+:v?\d+\.\d+\.\d+", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2]
            if source.startswith("./"):
                assert (folder / source).is_file()
                mounted[target] = folder / source
            else:
                assert source in found["volumes"]
    assert not re.search("password|secret", json.dumps(found), re.I)
    prometheus = yaml.safe_load(mounted["/etc/prometheus/prometheus.yml"].read_text())
    assert prometheus["scrape_configs"][0]["static_configs"] == [{"targets": ["llm.example:80"]}]
    for name in prometheus["rule_files"]:
        assert f"/etc/prometheus/{name}" in mounted
    places = "/etc/grafana/provisioning"
    (source,) = yaml.safe_load(mounted[f"{places}/datasources/slipstream.yml"].read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert source["type"] == board()["templating"]["list"][0]["query"]
    (provider,) = yaml.safe_load(mounted[f"{places}/dashboards/slipstream.yml"].read_text())[
        "providers"
    ]
    boards = [target for target in mounted if target.startswith(provider["options"]["path"] + "/")]
    assert [json.loads(mounted[target].read_text()) for target in boards] == [board()]
    grafana = found["services"]["grafana"]["environment"]
    assert grafana["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == boards[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--target", "a:1"], "--compose"), (["--compose", "--target", "http://a"], "HOST:PORT")],
)
def test_a_target_that_is_none_is_refused(tmp_path, capsys, words, said):
    assert main(["monitoring", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err


@needs_promtool
def test_promtool_accepts_the_configuration(composed):
    folder, _ = composed
    told = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout + told.stderr


@needs_promtool
def test_promtool_accepts_the_rules(folder):
    told = subprocess.run(
        ["promtool", "check", "rules", "slipstream-rules.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    count = sum(len(group["rules"]) for group in rules(ServiceObjectives())["groups"])
    assert f"SUCCESS: {count} rules found" in told.stdout


@needs_promtool
def test_the_alerts_fire_and_end(folder):
    """A fifth of the first tokens is late for an hour and a half: pages. One in 10,000 is late: nothing."""

    def histogram(late, label):
        labels = f'{{job="{label}", model_name="m", '
        metric = "slipstream:time_to_first_token_seconds"
        return [
            {"series": f'{metric}_bucket{labels}le="1.0"}}', "values": f"0+{10_000 - late}x400"},
            {"series": f'{metric}_count{{job="{label}", model_name="m"}}', "values": "0+10000x400"},
        ]

    labels = {"job": "bad", "model_name": "m"}
    wanted = [
        {"exp_labels": {**labels, "severity": severity, "window": long}}
        for _, long, _, _, severity in BURNS[:3]
    ]
    page = {"eval_time": "90m", "alertname": "SlipstreamTtftBurn", "exp_alerts": wanted}
    dead = {"exp_labels": {"severity": "page", "job": "x"}}
    down = {"eval_time": "5m", "alertname": "SlipstreamEngineDown", "exp_alerts": [dead]}
    tests = {
        "rule_files": ["slipstream-rules.yml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    *histogram(2000, "bad"),
                    *histogram(1, "good"),
                    {"series": 'slipstream:engine_up{job="x"}', "values": "0x20"},
                ],
                "alert_rule_test": [page, down],
            }
        ],
    }
    stripped = yaml.safe_load((folder / "slipstream-rules.yml").read_text())
    for group in stripped["groups"]:  # promtool compares annotations, too, which hold numbers
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (folder / "slipstream-rules.yml").write_text(yaml.safe_dump(stripped))
    (folder / "tests.yml").write_text(yaml.safe_dump(tests))
    told = subprocess.run(
        ["promtool", "test", "rules", "tests.yml"], cwd=folder, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason=f"prometheus is {INSTALL}")
def test_every_panel_has_data(tiny_server, folder):
    """A real Prometheus scrapes a real server with a tiny model."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    target = tiny_server.url.removeprefix("http://")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["slipstream-rules.yml"],
        "scrape_configs": [{"job_name": "slipstream", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        "--config.file=prometheus.yml",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    process = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"],
        cwd=folder,
        stderr=subprocess.DEVNULL,
    )
    try:
        client, base = tiny_server.client(), f"http://127.0.0.1:{port}"
        missing, until = {"not asked yet"}, time.monotonic() + PATIENCE_S
        while missing:
            assert time.monotonic() < until, missing
            prompt = (
                "One two three four five six seven eight nine ten eleven twelve thirteen fourteen"
            )
            client.completions.create(
                model="smollm2", prompt=prompt, max_tokens=8, extra_body={"ignore_eos": True}
            )
            time.sleep(0.5)
            missing = {title for title, expr in queries() if not has_data(base, expr)}
        problems = httpx.get(base + "/api/v1/rules", timeout=PATIENCE_S).json()["data"]["groups"]
        assert not [
            rule["lastError"]
            for group in problems
            for rule in group["rules"]
            if rule.get("lastError")
        ]
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def has_data(base, expr):
    expr = expr.replace("$__rate_interval", "15s").replace("$model", ".*")
    try:
        found = httpx.get(base + "/api/v1/query", params={"query": expr}, timeout=PATIENCE_S).json()
    except httpx.TransportError:
        return False  # it is starting
    assert found["status"] == "success", found
    return any(sample["value"][1] != "NaN" for sample in found["data"]["result"])
