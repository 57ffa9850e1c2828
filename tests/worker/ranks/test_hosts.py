"""A model over two hosts, which are network namespaces of this machine: each has its own loopback, and a cable between them."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys

import pytest

needs_namespaces = pytest.mark.skipif(
    not shutil.which("unshare")
    or bool(subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode),
    reason="needs user namespaces",
)
pytestmark = [pytest.mark.slow, needs_namespaces]

SECOND_HOST = "unshare -n sleep 10000"
CABLE = f"""
{SECOND_HOST} >/dev/null 2>&1 & other=$!
trap 'kill $other $rank 2>/dev/null || true' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
set -e
ip link add here type veth peer name there
ip link set there netns $other
ip addr add 10.9.0.1/24 dev here
ip link set here up
ip link set lo up
nsenter -t $other -n sh -ec 'ip addr add 10.9.0.2/24 dev there; ip link set there up; ip link set lo up'
"""
HOSTS = f"""
{CABLE}
nsenter -t $other -n "$1" -m slipstream.worker.ranks.rank_process --join 10.9.0.1:29500 --world-size 2 & rank=$!
"$1" -c "$2" "$3" "$4"
wait $rank || echo "the rank of the other host ended with code $?" >&2
"""

PROGRAM = """
import sys
from slipstream import LLM, SamplingParams

how = dict(skip_tokenizer_init=True, device="cpu", dtype="float32", max_model_len=256, kv_cache_bytes=2**22)
prompts = [{"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in (3, 20, 70)]
greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
more = {}
if sys.argv[2:]:
    more = {sys.argv[2]: 2, "local_ranks": 1, "rank_address": "10.9.0.1:29500"}
with LLM(sys.argv[1], **how, **more) as llm:
    print([o.outputs[0].token_ids for o in llm.generate(prompts, greedy, progress=False)])
"""


@pytest.mark.parametrize("form", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_hosts_answer_as_one(tiny_model, form):
    command = [sys.executable, "-c", PROGRAM, str(tiny_model)]
    one = subprocess.run(command, capture_output=True, text=True, check=True)
    two = subprocess.run(
        ["unshare", "-rn", "sh", "-c", HOSTS, "sh", sys.executable, PROGRAM, str(tiny_model), form],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert two.returncode == 0, two.stderr
    assert ast.literal_eval(two.stdout) == ast.literal_eval(one.stdout)
