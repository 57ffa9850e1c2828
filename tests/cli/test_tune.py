"""`slipstream tune` but for the GPU: what it asks to be measured, and what it writes and says."""

from __future__ import annotations

import json

import pytest

from slipstream.cli.main import main
from slipstream.cli.serving.serve import Banner
from slipstream.config import DeviceInfo
from slipstream.costs.memory import MemoryLedger
from slipstream.hub import tiles_folder
from slipstream.spec.devices.autotune_table import Measured, file_name, load_tiles, read_tiles
from tests.costs.specs import CONFIGS

GPU = DeviceInfo(
    device="cuda:0", name="NVIDIA Test", memory_bytes=2**37, free_bytes=2**37, best_dtype="bfloat16",
    compute_capability=(9, 0),
)  # fmt: skip
KEYS = [("gemv", "bfloat16", (64, 64 * (i + 1))) for i in range(3)]
WORDS = [
    "tune",
    str(CONFIGS / "llama-3-8b"),
    "--quantization=fp8",
    "--kv-cache-dtype=fp8",
    "--max-num-seqs=256",
    "--json",
]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Stands for a GPU: what `tune_model` was asked. It finds what `asked["answer"]` says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(
        "TRITON_INTERPRET", "1"
    )  # as tests/kernels: whoever imports triton first decides
    from slipstream.kernels.triton.tuning import Tuning

    seen = {"answer": {KEYS[0]: Measured((2, 64, 4), 5.0, 9.0)}}

    def tune_model(spec, scheme, base, **settings):
        seen.update(settings, scheme=scheme, spec=spec)
        settings["progress"](2, 3)
        return Tuning(measured=tuple(KEYS[:2]), found=seen["answer"], num_left=1), "here"

    monkeypatch.setattr("slipstream.worker.device.detect", lambda *_: GPU)
    monkeypatch.setattr("slipstream.kernels.triton.tuning.tune_model", tune_model)
    return seen


def test_the_winners_are_kept_for_the_next_start(asked, capsys):
    assert main([*WORDS, "--seconds=7"]) == 0
    said = json.loads(capsys.readouterr().out)
    path = tiles_folder() / file_name(GPU.name)
    assert (said["path"], said["num_measured"], said["num_left"]) == (str(path), 2, 1)
    assert said["found"][0]["tile"] == [2, 64, 4]
    assert (asked["scheme"].name, asked["cache"], asked["dtype"], asked["seconds"]) == (
        "fp8",
        "fp8",
        "bfloat16",
        7.0,
    )
    assert (asked["block_size"], asked["max_model_len"], asked["max_num_seqs"]) == (16, 8192, 256)
    table = load_tiles("auto", GPU.name, tiles_folder())
    assert table.find(*KEYS[0][:2], *KEYS[0][2]) == (2, 64, 4)
    assert table.identity == said["identity"]

    asked["answer"] = {
        KEYS[1]: Measured((4, 64, 4), 5.0, 9.0)
    }  # measured again: the first key has no winner now
    assert main(WORDS[:-1]) == 0
    assert "no time or memory for" in capsys.readouterr().out
    assert list(read_tiles(path, GPU.name).entries) == [KEYS[1]]


@pytest.mark.parametrize(("ranks", "shapes"), [(1, (32, 28672, 128256)), (2, (16, 14336, 64128))])
def test_what_is_measured_is_one_ranks_part(asked, ranks, shapes):
    assert main([*WORDS, f"--tensor-parallel-size={ranks}"]) == 0
    layer, vocab_size = asked["spec"].layers[0], asked["spec"].vocab_size
    assert (layer.attention.num_heads, layer.mlp.up_rows, vocab_size) == shapes


def test_a_file_of_ones_own_choice(asked, tmp_path, capsys):
    path = tmp_path / "mine.json"
    assert main([*WORDS, f"--out={path}"]) == 0
    assert read_tiles(path, GPU.name).entries
    assert not tiles_folder().exists()
    path.write_text("nonsense")
    assert main([*WORDS, f"--out={path}"]) == 2
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["error"]["field"] == "tile_table"
    assert path.read_text() == "nonsense"
    assert main([*WORDS, "--seconds=0"]) == 2


def test_the_server_says_which_table_it_took():
    ledger = MemoryLedger(
        device="x", total_bytes=1, allowed_bytes=1, weights_bytes=1, activation_bytes=1, graph_bytes=1, kv_bytes=1,
        other_bytes=0, block_bytes=1, num_blocks=2, block_size=16, max_model_len=16,
    )  # fmt: skip
    banner = dict(
        url="u",
        models=("m",),
        start_s=1.0,
        device="NVIDIA Test",
        dtype="bfloat16",
        ledger=ledger,
        api_servers=1,
    )
    assert "bfloat16, tile table 0123 (4 tiles): weights" in str(
        Banner(**banner, tiles="0123 (4 tiles)")
    )
    assert "bfloat16: weights" in str(Banner(**banner, tiles=""))
    assert "bfloat16, 2 ranks, of which the first has: weights" in str(
        Banner(**banner, tiles="", num_ranks=2)
    )
