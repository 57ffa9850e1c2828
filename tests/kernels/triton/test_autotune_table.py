"""Tile tables: what is found, what is refused, how they are written; and the search for tiles, with a timer that is told what
to say. That the kernels take them: test_triton.py."""

from __future__ import annotations

import json
import math
import os
from itertools import product

import pytest
import torch

os.environ["TRITON_INTERPRET"] = (
    "1"  # as test_triton.py: whichever of them is imported first decides
)

from slipstream.cli.main import main
from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.errors import ConfigError
from slipstream.kernels.triton.tuning import SEARCH, Trial, search, tune
from slipstream.spec.description import read_spec
from slipstream.spec.devices.autotune_table import (
    NO_TILES,
    OPS,
    SHIPPED,
    Measured,
    TileTable,
    classed,
    file_name,
    load_tiles,
    read_tiles,
    write_tiles,
)
from tests.costs.specs import CONFIGS

DEVICE = "NVIDIA H200"
ENTRIES = {
    ("gemv", "bfloat16", (6144, 4096)): Measured((4, 512, 8), 10.5, 12.0),
    ("skinny_gemm", "fp8", (6144, 4096, 32)): Measured((64, 256, 2, 3)),
    ("decode", "fp8", (32, 8, 128, 16, 256)): Measured((32, 1, 3), 100.0, 110.0),
}
TABLE = TileTable(device=DEVICE, entries=ENTRIES, made_by="hand")


def test_tiles_are_found_by_shape_and_type():
    assert TABLE.find("gemv", "bfloat16", 6144, 4096) == (4, 512, 8)
    for tokens in (17, 31, 32):
        assert TABLE.find("skinny_gemm", "fp8", 6144, 4096, tokens) == (64, 256, 2, 3)
    for other in (
        ("fp8", 6144, 4096, 16),
        ("fp8", 6144, 4096, 33),
        ("int8", 6144, 4096, 32),
        ("fp8", 4096, 4096, 32),
    ):
        assert TABLE.find("skinny_gemm", *other) is None
    assert TABLE.find("decode", "fp8", 32, 8, 128, 16, 65) == (32, 1, 3)
    assert NO_TILES.find("gemv", "bfloat16", 6144, 4096) is None
    assert classed("decode", (1, 1, 1, 1, 99_999))[-1] == OPS["decode"].classes[-1]


def test_the_identity_is_of_the_choices_alone():
    again = TileTable(device=DEVICE, entries=dict(reversed([*ENTRIES.items()])), made_by="other")
    assert again.identity == TABLE.identity
    for key, measured in ENTRIES.items():
        other = {**ENTRIES, key: Measured((*measured.tile[:-1], measured.tile[-1] + 1))}
        assert TileTable(device=DEVICE, entries=other).identity != TABLE.identity
    faster = {key: Measured(m.tile, 1.0, 2.0) for key, m in ENTRIES.items()}
    assert TileTable(device=DEVICE, entries=faster).identity == TABLE.identity
    assert NO_TILES.identity == "none"


def test_written_and_read(tmp_path):
    path = tmp_path / "deep" / "table.json"
    write_tiles(TABLE, path)
    assert read_tiles(path, DEVICE) == TABLE
    assert [f.name for f in path.parent.iterdir()] == ["table.json"]
    write_tiles(TileTable(device=DEVICE), path)
    assert read_tiles(path, DEVICE).entries == {}


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    write_tiles(TABLE, path)

    def full(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError):
        write_tiles(TileTable(device=DEVICE), path)
    assert read_tiles(path, DEVICE) == TABLE
    assert [f.name for f in tmp_path.iterdir()] == ["table.json"]


def entry(**change):
    given = {
        "op": "skinny_gemm",
        "kind": "fp8",
        "shape": {"outer": 64, "inner": 64, "tokens": 16},
        "tile": {"block_n": 64, "block_k": 64, "splits": 1, "stages": 3},
        "us": None,
        "before_us": 2.5,
    }
    return {k: v for k, v in {**given, **change}.items() if v != "left out"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("", "Expecting value"),
        ('{"format": 1', "Expecting"),
        ("[]", "must be an object of format, device"),
        ({"format": 1}, "its format is 1"),
        ({"surprise": 1}, "must be an object of"),
        ({"device": 3}, "must be text"),
        ({"device": "NVIDIA A10"}, "is for 'NVIDIA A10'"),
        ({"entries": {}}, "must be a list"),
        ({"entries": [3]}, "entry 0 must be an object"),
        ({"entries": [entry(), entry()]}, "twice"),
        ({"entries": [entry(us="left out")]}, "entry 0 must be an object"),
        ({"entries": [entry(us="1")]}, "must be numbers above 0"),
        ({"entries": [entry(us=0)]}, "must be numbers above 0"),
        ({"entries": [entry(op="conv")]}, "op 'conv'"),
        ({"entries": [entry(op=[])]}, "can't be used"),
        ({"entries": [entry(kind="fp4")]}, "kind 'fp4'"),
        (
            {"entries": [entry(shape={"outer": 64, "inner": 64})]},
            "shape must be an object of outer, inner, tokens",
        ),
        (
            {"entries": [entry(shape={"outer": 64, "inner": 64, "tokens": 17})]},
            "tokens=17 is none of the classes",
        ),
        (
            {"entries": [entry(shape={"outer": 64, "inner": True, "tokens": 16})]},
            "whole numbers above 0",
        ),
        (
            {"entries": [entry(tile={"block_n": 48, "block_k": 64, "splits": 1, "stages": 3})]},
            "a power of two",
        ),
        (
            {"entries": [entry(tile={"block_n": 64, "block_k": 64, "splits": 1, "stages": 99})]},
            "stages=99",
        ),
        (
            {"entries": [entry(tile={"block_n": -64, "block_k": 64, "splits": 1, "stages": 3})]},
            "above 0",
        ),
        (
            {
                "entries": [
                    entry(
                        shape={"outer": 262144, "inner": 64, "tokens": 16},
                        tile={"block_n": 32, "block_k": 64, "splits": 2, "stages": 3},
                    )
                ]
            },
            "can't be counted",
        ),
    ],
    ids=str,
)
def test_a_file_that_is_not_right_is_refused_by_name(tmp_path, change, why):
    path = tmp_path / "table.json"
    whole = {"format": 2, "device": DEVICE, "made_by": "", "entries": [entry()]}
    path.write_text(json.dumps(whole))
    assert read_tiles(path, DEVICE).entries
    path.write_text(change if isinstance(change, str) else json.dumps({**whole, **change}))
    with pytest.raises(ConfigError, match=why) as caught:
        read_tiles(path, DEVICE)
    assert str(path) in str(caught.value)
    assert "slipstream tune" in str(caught.value)
    assert caught.value.field == "tile_table"


def test_which_table_is_taken(tmp_path):
    shipped = load_tiles("shipped", DEVICE, tmp_path)
    assert load_tiles("auto", DEVICE, tmp_path) == shipped
    assert load_tiles("none", DEVICE, tmp_path).identity == "none"
    assert load_tiles("auto", "NVIDIA Nothing", tmp_path).identity == "none"
    own = tmp_path / file_name(DEVICE)
    write_tiles(TABLE, own)
    merged = load_tiles("auto", DEVICE, tmp_path)
    assert merged.entries == {**shipped.entries, **ENTRIES}
    assert load_tiles("shipped", DEVICE, tmp_path) == shipped
    assert load_tiles(str(own), DEVICE, tmp_path / "elsewhere") == TABLE
    with pytest.raises(ConfigError, match="not a file"):
        load_tiles(str(tmp_path / "missing.json"), DEVICE, tmp_path)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda p: p.name)
def test_tables_that_are_shipped_can_be_read(path):
    device = json.loads(path.read_text())["device"]
    assert path.name == file_name(device)
    assert read_tiles(path, device).entries


def test_the_setting_chooses_a_table_on_a_gpu_alone():
    description = read_spec(CONFIGS / "llama-3-8b")
    gpu = DeviceInfo(
        device="cuda:0", name=DEVICE, memory_bytes=2**37, free_bytes=2**37, best_dtype="bfloat16"
    )
    cpu = DeviceInfo(
        device="cpu", name="a CPU", memory_bytes=2**37, free_bytes=2**37, best_dtype="bfloat16"
    )
    assert resolve(EngineArgs(model="m"), description, gpu).device.tile_table == "auto"
    assert (
        resolve(EngineArgs(model="m", kernels="reference"), description, gpu).device.tile_table
        == "none"
    )
    assert resolve(EngineArgs(model="m"), description, cpu).device.tile_table == "none"
    assert (
        resolve(EngineArgs(model="m", tile_table="shipped"), description, gpu).device.tile_table
        == "shipped"
    )
    for info, kernels in ((cpu, "auto"), (gpu, "reference")):
        with pytest.raises(ConfigError) as caught:
            resolve(EngineArgs(model="m", tile_table="shipped", kernels=kernels), description, info)
        assert caught.value.field == "tile_table"


def test_tune_needs_a_gpu(capsys):
    assert main(["tune", str(CONFIGS / "llama-3-8b"), "--device=cpu"]) == 2
    assert "this device is a CPU" in capsys.readouterr().err


# --- The search -------------------------------------------------------------------------------------------------------

KEY = ("gemv", "bfloat16", (4096, 4096))
BEFORE = 100.0


class Timer:
    """Says for each tile what `cost` says, and remembers what it was asked."""

    def __init__(self, cost):
        self.cost, self.asked = cost, []

    def __call__(self, tile):
        self.asked.append(tile)
        return BEFORE if tile is None else self.cost(tile)


def trial(key=KEY):
    return Trial(key, lambda key: lambda tile: [lambda: tile])


def far(tile, best):
    return sum(abs(math.log2(a / b)) for a, b in zip(tile, best, strict=True))


@pytest.mark.parametrize("best", list(product(*SEARCH["gemv"][1])))
def test_the_search_goes_downhill(best):
    timer = Timer(lambda tile: 50.0 + far(tile, best))
    assert search(trial(), timer) == Measured(best, 50.0, BEFORE)
    assert len(timer.asked) < 20


def test_what_is_hardly_faster_or_once_only_is_not_kept():
    assert search(trial(), Timer(lambda tile: 99.0)) is None
    assert search(trial(), Timer(lambda tile: math.inf)) is None
    lucky = iter([10.0])
    assert search(trial(), Timer(lambda tile: next(lucky, 100.0))) is None


def test_tiles_that_can_not_run_are_not_tried():
    key = ("skinny_gemm", "fp8", (262144, 256, 16))
    timer = Timer(lambda tile: 50.0)
    search(trial(key), timer)
    # 262,144 rows in tiles of 32 are too many to be counted, and a part has 128 inputs at least
    assert not [t for t in timer.asked if t and ((t[2] > 1 and t[0] < 64) or t[2] > 2)]
    assert [t for t in timer.asked if t]


def keys(count):
    return [("gemv", "bfloat16", (64, 64 * (i + 1))) for i in range(count)]


def run(count, *, seconds, cost=lambda tile: 50.0, agrees=lambda calls, tile: True, prepare=None):
    now = [0.0]

    def timer(calls):
        now[0] += 1.0
        tile = calls[0]()
        return BEFORE if tile is None else cost(tile)

    trials = [Trial(key, prepare or trial().prepare) for key in keys(count)]
    told = []
    tuning = tune(
        trials,
        timer,
        seconds=seconds,
        agrees=agrees,
        clock=lambda: now[0],
        progress=lambda *at: told.append(at),
    )
    assert told == [(i + 1, count) for i in range(len(tuning.measured))]
    return tuning


def test_tuning_ends_in_time_and_says_what_is_left():
    whole = run(3, seconds=1e9)
    assert whole.measured == tuple(keys(3))
    assert whole.num_left == 0
    assert set(whole.found) == set(keys(3))
    some = run(3, seconds=1.0)
    assert (some.measured, some.num_left) == (tuple(keys(1)), 2)
    assert run(3, seconds=1e9, agrees=lambda calls, tile: False).found == {}


def test_a_shape_without_memory_is_passed_over():
    def prepare(key):
        if key == keys(2)[0]:
            raise torch.OutOfMemoryError("too large")
        return trial().prepare(key)

    tuning = run(2, seconds=1e9, prepare=prepare)
    assert (tuning.measured, tuning.num_left) == (tuple(keys(2)[1:]), 1)


def test_a_key_that_is_measured_again_has_its_new_winner():
    """A key that was measured has its new winner, or none; other shapes keep theirs."""
    first, second, third = ENTRIES
    table = TABLE.tuned([first, second], {first: Measured((1, 512, 2), 5.0, 6.0)}, "now")
    assert table.entries == {first: Measured((1, 512, 2), 5.0, 6.0), third: ENTRIES[third]}
    assert table.made_by == "now"
