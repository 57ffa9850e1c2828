"""A fleet on Ray over two hosts, which are network namespaces of this machine: each has its own loopback, state and
Ray node, and a cable between them.

`pytest -m ray tests/fleet/test_ray_hosts.py`. All processes end with their namespace.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slipstream import LLM, SamplingParams
from tests.fleet.running import ENGINE
from tests.worker.ranks.test_hosts import CABLE, SECOND_HOST, needs_namespaces

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(2400), needs_namespaces]

RAY = "-m ray.scripts.scripts start --num-cpus 1 --object-store-memory 80000000 --disable-usage-stats --include-dashboard false"
FLEET = f"""
{CABLE.replace(SECOND_HOST, SECOND_HOST.replace("-n", "-nm"))}
ip route add default via 10.9.0.2 dev here  # Ray asks which address leads out
nsenter -t $other -n ip route add default via 10.9.0.1 dev there
nsenter -t $other -m mount -t tmpfs none "$2/ray"
"$1" {RAY} --head --node-ip-address 10.9.0.1 --port 6399 --temp-dir "$2/ray" >&2
nsenter -t $other -n -m "$1" {RAY.replace(" --include-dashboard false", "")} \
    --node-ip-address 10.9.0.2 --address 10.9.0.1:6399 >&2
"$1" -m slipstream fleet up "$2/fleet.json" --state-dir "$2/state" >&2 & head=$!
"$1" -c "$3" "$2" $head
kill -TERM $head
wait $head
"""
"""The second host has a folder of Ray's of its own, as another machine has."""

PROGRAM = """
import json, os, sys, time, urllib.request

def ask(path, body=None):
    made = urllib.request.Request("http://127.0.0.1:8000" + path, body and json.dumps(body).encode(),
        {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(made, timeout=300))

def serving():
    try:
        return [r for r in ask("/fleet/status")["models"]["tiny"][0]["replicas"] if r["state"] == "serving"]
    except OSError:
        os.kill(int(sys.argv[2]), 0)
        return []

while len(serving()) < 2:
    time.sleep(1)
answers = []
for prompt in ("Hello", "The capital", "in the hour", "of"):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answers.append(ask("/v1/completions", body)["choices"][0]["text"])
print(json.dumps({"urls": [r["url"] for r in serving()], "answers": answers}))
"""


def test_one_order_serves_from_the_replicas_of_two_hosts(tiny):
    pytest.importorskip("ray", reason="the extra fleet is not installed")
    pool = {"name": "main", "replicas": 2, "resources": {"cpus": 1}}
    version = {"name": "v1", "model": str(tiny), "engine": ENGINE, "pools": [pool]}
    file = {"port": 8000, "models": {"tiny": {"versions": [version]}}, "drain_timeout_s": 5}
    file |= {
        "backend": "ray",
        "ray_address": "10.9.0.1:6399",
        "tls": "auto",
        "start_timeout_s": 1500,
    }
    with tempfile.TemporaryDirectory(prefix="r") as folder:  # a short name: Ray's sockets are below
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "fleet.json").write_text(json.dumps(file))
        unshared = ["unshare", "-rnpf", "--mount-proc", "--kill-child"]
        done = subprocess.run(
            [*unshared, "sh", "-c", FLEET, "sh", sys.executable, folder, PROGRAM],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        shutil.rmtree(Path(folder) / "ray", ignore_errors=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {url.split("//")[1].split(":")[0] for url in found["urls"]} == {"10.9.0.1", "10.9.0.2"}
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(tiny), **ENGINE) as llm:
        prompts = ["Hello", "The capital", "in the hour", "of"]
        wanted = [o.outputs[0].text for o in llm.generate(prompts, greedy, progress=False)]
    assert found["answers"] == wanted
