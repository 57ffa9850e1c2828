"""Blocks on a disk, through the whole engine: the same answers, after kill −9 as well, for every runner; what is refused."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import urllib.request
from types import SimpleNamespace

import pytest

from slipstream import LLM, SamplingParams
from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.costs.estimate import estimate
from slipstream.costs.memory import host_slots
from slipstream.errors import ConfigError, EngineError
from slipstream.kernels.cpu import native
from slipstream.spec.description import read_spec
from slipstream.worker.host_loading import HostLoaded
from slipstream.worker.ranks import process_executor
from slipstream.worker.ranks.block_store import RankBlockStore
from slipstream.worker.ranks.messages import RankTiers
from slipstream.worker.tiers.opening import open_tiers
from tests.support import tiny_models
from tests.support.waiting import PATIENCE_S, wait_for

SIZES = dict(
    device="cpu",
    dtype="float32",
    max_model_len=256,
    max_num_seqs=4,
    num_threads=1,
    skip_tokenizer_init=True,
)
PROMPTS = [{"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in (40, 100, 130)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiers") / "model"
    tiny_models.write(path, "llama")
    return path


def answers(llm):
    return [a.outputs[0].token_ids for a in llm.generate(PROMPTS, GREEDY, progress=False)]


def engine(model, folder, **more):
    return LLM(
        str(model),
        **{
            **SIZES,
            "kv_disk_bytes": 2**26,
            "kv_disk_path": str(folder),
            "kv_cache_bytes": 2**21,
            **more,
        },
    )


@pytest.mark.parametrize("torchless", [True, False])
def test_a_later_engine_finds_the_blocks(made, tmp_path, monkeypatch, torchless):
    if torchless and not native.has_cpu_kernels():
        pytest.skip("the C++ kernels are not built")
    if not torchless:
        monkeypatch.setattr("slipstream.worker.start.loading._host_loaded", lambda *_: None)
    with LLM(str(made), **SIZES) as llm:
        expected = answers(llm)
    for expected_hits in (0, 32 + 96 + 128):
        with engine(made, tmp_path) as llm:
            assert isinstance(llm.core.executor.runner.loaded, HostLoaded) == torchless
            assert answers(llm) == expected
            stats = llm.stats()
            assert stats.tiers.disk_hit_tokens == stats.prefix_hits == expected_hits
            assert stats.tiers.failed_blocks == stats.tiers.dropped_blocks == 0
            if expected_hits:
                assert stats.tiers.disk_bytes_per_s > 0
    with engine(made, tmp_path, block_size=32) as llm:  # other blocks
        assert answers(llm) == expected
        assert llm.stats().tiers.disk_hit_tokens == 0


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", dict(tensor_parallel_size=2)),
        ("llama", dict(pipeline_parallel_size=2)),
        ("llama", dict(context_parallel_size=2, block_size=8)),
        ("deepseek_v3", dict(tensor_parallel_size=2, context_parallel_size=2, block_size=8)),
        pytest.param("gemma2", dict(context_parallel_size=2, block_size=8), marks=pytest.mark.slow),
        pytest.param("lfm3", dict(context_parallel_size=2, block_size=8), marks=pytest.mark.slow),
        ("mixtral", dict(tensor_parallel_size=2, expert_parallel_size=2)),
        ("granitemoehybrid", dict(pipeline_parallel_size=2)),  # a stage has no attention
        ("jamba", dict(tensor_parallel_size=2)),
    ],
)
def test_each_rank_keeps_its_part(tmp_path, family, how):
    """Another engine finds what all ranks have; a file that is damaged on one of them is computed."""
    model, folder = tmp_path / "model", tmp_path / "kv"
    tiny_models.write(model, family)
    with LLM(str(model), **SIZES) as llm:
        expected = answers(llm)
    with engine(model, folder, **how) as llm:
        assert answers(llm) == expected
        wait_for(lambda: not llm.core.tend(), "blocks are not stored")
        assert llm.stats().tiers.stored_blocks > 8
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["rank-1-of-2", "rank-2-of-2"]
    files = [[*(folder / f"rank-{i}-of-2").rglob("*.kv")] for i in (1, 2)]
    assert [path.name for path in sorted(files[0])] == [path.name for path in sorted(files[1])]
    with engine(model, folder, **how) as llm:
        assert answers(llm) == expected
        assert llm.stats().tiers.disk_hit_tokens >= 128
        assert llm.stats().tiers.failed_blocks == 0
        disk = llm.core.executor.stores[0].disk
        assert disk.num_bytes == sum(p.stat().st_size for own in files for p in own)
    for path in files[1]:
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    with engine(model, folder, **how) as llm:
        assert answers(llm) == expected
        assert llm.stats().tiers.failed_blocks > 0
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("mixtral", {}),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.slow),
        pytest.param("lfm2_moe", {}, marks=pytest.mark.slow),
        pytest.param("mixtral", dict(pipeline_parallel_size=2), marks=pytest.mark.slow),
    ],
)
def test_requests_dealt_out_find_their_blocks_on_the_disk_of_a_rank(
    tmp_path, family, how, monkeypatch
):
    """A disk serves after a rank was killed, too, and whatever the order of the requests."""
    monkeypatch.setattr(process_executor, "available_cores", lambda: 4)  # they share what there is
    model, folder = tmp_path / "model", tmp_path / "kv"
    tiny_models.write(model, family)
    how = {"expert_parallel_size": 2, "max_num_seqs": 8, **how}
    with LLM(str(model), **SIZES) as llm:
        expected = answers(llm)
    with engine(model, folder, **how) as llm:
        assert answers(llm) == expected
        wait_for(lambda: not llm.core.tend(), "blocks are not stored")
        assert llm.stats().tiers.stored_blocks > 8
        os.kill(llm.core.executor.processes[1], signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1"):
            answers(llm)
    count = 2 * how.get("pipeline_parallel_size", 1)
    files = [
        {p.name for p in (folder / f"rank-{i + 1}-of-{count}").rglob("*.kv")} for i in range(count)
    ]
    assert all(files)
    assert files[0].isdisjoint(files[1])  # each has its own requests' blocks
    assert files[:2] == files[-2:]  # all stages alike
    for prompts in (PROMPTS, PROMPTS[::-1]):
        with engine(model, folder, **how) as llm:
            found = llm.generate(prompts, GREEDY, progress=False)
            wanted = expected if prompts is PROMPTS else expected[::-1]
            assert [a.outputs[0].token_ids for a in found] == wanted
            stats = llm.stats()
            assert stats.tiers.disk_hit_tokens == stats.prefix_hits == 32 + 96 + 128
            assert stats.tiers.failed_blocks == 0
            assert stats.num_free_blocks == stats.num_blocks


def test_window_groups_and_an_8_bit_cache(tmp_path):
    tiny_models.write(tmp_path / "model", "gemma3_text")
    for settings in ({}, {"kv_cache_dtype": "int8"}):
        with LLM(str(tmp_path / "model"), **SIZES, **settings) as llm:
            expected = answers(llm)
        for _ in range(2):
            with engine(tmp_path / "model", tmp_path / "kv", **settings) as llm:
                assert answers(llm) == expected
                hits = llm.stats().tiers.disk_hit_tokens
        assert hits > 0


def test_a_changed_model_is_another(tmp_path):
    model = tmp_path / "model"
    tiny_models.write(model, "llama", seed=1)
    with engine(model, tmp_path / "kv") as llm:
        first = answers(llm)
    tiny_models.write(model, "llama", seed=2)
    with engine(model, tmp_path / "kv") as llm:
        assert answers(llm) != first
        assert llm.stats().tiers.disk_hit_tokens == 0


def test_a_small_cache_lives_from_the_disk(made, tmp_path):
    """More prompts than the cache has blocks for: each comes back from the disk."""
    with engine(made, tmp_path, kv_cache_bytes=18 * 4096) as llm:
        first = answers(llm)
        llm.core.flush()
        for _ in range(3):
            assert answers(llm) == first
            llm.core.flush()
        assert llm.stats().tiers.disk_hit_tokens > 0
        llm.sleep()
        llm.wake_up()
        assert answers(llm) == first
        assert llm.stats().tiers.disk_hit_tokens > 0
        llm.reset_prefix_cache()
        assert not [*tmp_path.rglob("*.kv")]
        assert answers(llm) == first


GPU = DeviceInfo(
    device="cuda:0",
    name="a GPU",
    memory_bytes=80 * 2**30,
    free_bytes=79 * 2**30,
    best_dtype="bfloat16",
    compute_capability=(9, 0),
)


def test_ranks_allocate_as_many_slots_as_the_one_with_the_fewest(made):
    """A stage with fewer layers has room for more blocks in as many bytes."""
    description = read_spec(made)
    args = EngineArgs(str(made), kv_host_bytes=2**20, device="cuda", pipeline_parallel_size=2)
    config = resolve(args, description, GPU)

    def least(*numbers):  # of this rank and of one whose blocks are five times as large
        return [min(number, other) for number, other in zip(numbers, (102, 0), strict=True)]

    ranks = SimpleNamespace(all_ranks=SimpleNamespace(least=least, rank=0))
    runner = SimpleNamespace(
        loaded=SimpleNamespace(partition=ranks), open_store=lambda disk, slots, *more: slots
    )
    assert host_slots(config, (1024, 0)) == [512, 0]
    assert open_tiers(config, description, runner, (1024, 0)) == [102, 0]
    found = {rank: RankTiers([], [size, 0], [102, 0]) for rank, size in enumerate((1024, 5120))}
    store = RankBlockStore(lambda message: None, lambda rank: None, lambda find: find(), found)
    assert store.slots == [102, 0]
    assert store.sizes == [6144, 0]


def test_the_ledger_names_the_tiers(made):
    sizes = {"kv_host_bytes": 2**30, "kv_disk_bytes": 2**33, "kv_disk_path": "kv", "device": "cuda"}
    _, ledger = estimate(EngineArgs(str(made), **sizes), read_spec(made), GPU)
    assert ledger.disk_tier_bytes == 2**33
    assert 2**30 - ledger.block_bytes < ledger.host_tier_bytes <= 2**30
    assert any("of a disk" in line for line in ledger.describe())
    assert any("of the host's memory" in line for line in ledger.describe())


def test_a_folder_that_can_not_be_made_is_refused(made, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_disk_path"):
        engine(made, tmp_path / "file")


def start(model, folder):
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "serve",
        str(model),
        "--port=0",
        "--json",
        "--device=cpu",
    ]
    command += [
        "--dtype=float32",
        "--num-threads=1",
        "--max-model-len=256",
        f"--kv-cache-bytes={2**21}",
    ]
    command += ["--kv-disk-bytes=64MiB", f"--kv-disk-path={folder}"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=env,
        process_group=0,
    )
    return process, json.loads(process.stdout.readline())["url"]


def ask(url, path, body=None):
    request = urllib.request.Request(
        url.removesuffix("/v1") + path, method="GET" if body is None else "POST"
    )
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def metric(url, name):
    found = [
        line
        for line in ask(url, "/metrics").splitlines()
        if line.startswith(f"slipstream:{name}{{")
    ]
    return float(found[0].split()[-1])


def test_a_conversation_survives_kill_9_of_the_server(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path / "model", "llama")
    body = {
        "model": "model",
        "prompt": PROMPTS[2]["prompt_token_ids"],
        "max_tokens": 20,
        "temperature": 0,
    }
    found = []
    for expected in (0, 128):
        process, url = start(tmp_path / "model", tmp_path / "kv")
        try:
            body["model"] = json.loads(ask(url, "/v1/models"))["data"][0]["id"]
            found.append(json.loads(ask(url, "/v1/completions", body)))
            assert metric(url, "kv_disk_tier_hits_total") == expected
            if not expected:
                wait_for(
                    lambda url=url: metric(url, "kv_tier_stored_blocks_total") >= 8,
                    "they are not stored",
                )
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
    assert found[0]["choices"][0]["text"] == found[1]["choices"][0]["text"]
    assert found[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
