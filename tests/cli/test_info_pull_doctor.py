"""`info`, `pull` and `doctor`: what they say, by numbers that are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from slipstream.cli.library.info import describe
from slipstream.cli.main import main
from slipstream.compress.recipe import RECIPE_NAME, parse
from slipstream.costs.hardware import GpuInfo, HostInfo
from slipstream.costs.memory import weights_bytes
from slipstream.errors import install_command
from slipstream.hub import tiles_folder
from slipstream.spec.description import read_spec
from slipstream.spec.devices.autotune_table import (
    Measured,
    TileTable,
    file_name,
    load_tiles,
    write_tiles,
)
from slipstream.worker.start import diagnosis
from tests.support import tiny_models

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


@pytest.fixture(autouse=True)
def free_memory(monkeypatch):
    """Gives the machine a fixed amount of free memory, whatever other programs take."""
    for module in ("costs.hardware", "costs.estimate", "worker.device"):
        monkeypatch.setattr(f"slipstream.{module}.host_memory", lambda: (64 * 2**30, 32 * 2**30))


def test_info_llama_8b(capsys):
    assert (
        main(
            ["info", str(CONFIGS / "llama-3-8b"), "--json", "--device=cpu", "--max-model-len=4096"]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["num_parameters"] == 8_030_261_248
    assert sum(found["bytes_by_part"].values()) == 2 * found["num_parameters"]
    assert found["kv_bytes_per_token"] == 131_072
    ledger = found["memory_estimate"]
    assert ledger["block_bytes"] == 16 * 131_072
    assert ledger["max_model_len"] <= 4096
    assert ledger["kv_bytes"] == ledger["num_blocks"] * ledger["block_bytes"]


def test_info_names_no_slow_path_for_a_supported_model(capsys):
    assert main(["info", str(CONFIGS / "gpt-j-6b"), "--device=cpu", "--dtype=float32"]) == 0
    out = capsys.readouterr().out
    for part in (
        "6,050,882,784",
        "28 × MHA 16 heads",
        "917,504 B a token",
        "estimated",
        "one C++ program",
    ):
        assert part in out
    assert "op by op" not in out


def test_info_says_why_a_fast_way_does_not_cover_a_model(tmp_path, capsys):
    tiny_models.write(tmp_path, "opt", word_embed_proj_dim=16)
    assert main(["info", str(tmp_path), "--device=cpu"]) == 0
    assert "op by op, not one C++ program: embed_size" in capsys.readouterr().out
    assert main(["info", str(tmp_path), "--device=cpu", "--json"]) == 0
    assert "embed_size" in json.loads(capsys.readouterr().out)["fast_ways"]["program"]


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt-j-6b"])
def test_parts_add_up(name):
    spec = read_spec(CONFIGS / name).spec
    parts = weights_bytes(spec, 4)
    assert sum(parts.values()) == 4 * spec.num_parameters
    norms = sum(
        n.size * (2 if n.bias else 1) for layer in spec.layers for n in layer.norms.values()
    )
    assert parts["norms"] == 4 * (norms + spec.final_norm.size * (2 if spec.final_norm.bias else 1))
    assert "heads" in describe(spec.layers[0])


def test_info_names_zeros(tiny_model, tmp_path, capsys):
    """The zeros are those of a checkpoint that `compress` pruned, and of one whose config says that its zeros are left out."""
    config = json.loads((tiny_model / "config.json").read_text())
    made, foreign, unknown = (tmp_path / name for name in ("made", "foreign", "unknown"))
    for folder in (made, foreign, unknown):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    recipe = parse(
        [
            {"sparsify": {"method": "wanda", "ratio": 0.6}},
            {"quantize": {"bits": 8, "rounding": "nearest"}},
        ]
    )
    (made / RECIPE_NAME).write_text(json.dumps(recipe.as_data()))
    (unknown / RECIPE_NAME).write_text('[{"anneal": {}}]')
    sparsity = {
        "format": "sparse-24-bitmask",
        "global_sparsity": 0.5,
        "sparsity_structure": "2:4",
        "targets": ["Linear"],
    }
    stored = {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": sparsity}
    (foreign / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))

    def said(folder, *words):
        assert main(["info", str(folder), "--device=cpu", *words]) == 0
        return capsys.readouterr().out

    assert "60% of the numbers in the sparsified products (wanda), stored among the others" in said(
        made
    )
    assert "sparsify, quantize" in said(made)
    assert json.loads(said(made, "--json"))["recipe"][0]["sparsify"]["ratio"] == 0.6
    assert "50% of the numbers in the sparsified products, left out" in said(foreign)
    assert "zeros" not in said(tiny_model)
    assert "'anneal' is no step" in said(unknown)


def test_info_unsupported_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "frobnicator"}')
    assert main(["info", str(tmp_path)]) == 3
    assert "frobnicator" in capsys.readouterr().err


def test_info_cannot_fit(capsys):
    words = [
        "info",
        str(CONFIGS / "llama-3-8b"),
        "--device=cpu",
        "--max-model-len=8192",
        "--kv-cache-bytes=64MiB",
    ]
    assert main(words) == 1
    assert "max_model_len=8192" in capsys.readouterr().err


def test_pull_of_a_path_checks_it(tiny_model, capsys):
    assert main(["pull", str(tiny_model), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["family"]) == ("safetensors", "llama")
    assert found["bytes"] == sum(f.stat().st_size for f in tiny_model.iterdir())


def test_pull_of_nothing(tmp_path, capsys):
    assert main(["pull", str(tmp_path)]) == 3
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("absent", ["numpy", "pyarrow", None])
def test_doctor_exits_with_1_if_a_needed_package_is_missing(monkeypatch, capsys, absent):
    monkeypatch.setattr(diagnosis, "gpus", lambda: ())
    monkeypatch.setattr(diagnosis, "cpu_kernels_built", lambda: True)
    monkeypatch.setattr(diagnosis, "cpu_choice", lambda measure: None)
    monkeypatch.setattr(diagnosis, "will_use", lambda: {"device": "cpu"})
    monkeypatch.setattr(diagnosis, "package_version", lambda name: None if name == absent else "1")
    assert main(["doctor", "--json"]) == (1 if absent == "numpy" else 0)
    missing = json.loads(capsys.readouterr().out)["missing"]
    assert [m["what"] for m in missing if m["needed"]] == (["numpy"] if absent == "numpy" else [])
    assert absent is None or any(absent in m["what"] for m in missing)


def test_doctor_finds_this_machines_cores_device_and_torch(capsys):
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["host"]["num_cores"] >= 1
    assert found["will_use"]["device"].startswith(("cpu", "cuda"))
    assert found["packages"]["torch"]


def test_doctor_shows_the_tile_table_and_what_is_wrong_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(diagnosis, "gpus", lambda: (GPU, GPU))
    monkeypatch.setattr(
        diagnosis, "cpu_choice", lambda measure: None
    )  # these measure the machine for the empty folder
    monkeypatch.setattr(diagnosis, "will_use", lambda: {"device": "cpu"})
    own = tiles_folder() / file_name(GPU.name)
    entries = {("gemv", "bfloat16", (64, 64)): Measured((2, 64, 4))}
    write_tiles(TileTable(device=GPU.name, entries=entries), own)
    identity = load_tiles("auto", GPU.name, tiles_folder()).identity
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found["tile_tables"]) == [GPU.name]
    assert found["tile_tables"][GPU.name].startswith(identity)
    main(["doctor"])
    assert identity in capsys.readouterr().out
    own.write_text("{")
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert any(str(own) in m["what"] and m["needed"] for m in found["missing"])


@pytest.mark.parametrize("lacking", diagnosis.PACKAGES)
@pytest.mark.parametrize("cards", [False, True])
def test_doctor_does_not_say_that_nothing_is_missing_while_listing_what_is(
    monkeypatch, capsys, lacking, cards
):
    monkeypatch.setattr(diagnosis, "gpus", lambda: (GPU,) if cards else ())
    monkeypatch.setattr(
        diagnosis, "package_version", lambda name: None if name == lacking else "1.0"
    )
    if lacking == "torch":
        monkeypatch.setattr(diagnosis, "torch_info", lambda: None)
    else:
        monkeypatch.setattr(diagnosis, "torch_info", lambda: CUDA_TORCH)
    monkeypatch.setattr(diagnosis, "will_use", lambda: {"device": "cpu"})
    monkeypatch.setattr(diagnosis, "cpu_choice", lambda measure: None)
    monkeypatch.setattr(diagnosis, "cpu_kernels_built", lambda: True)
    monkeypatch.setattr("slipstream.hub.list_cached", lambda: {"smollm2": Path("model")})
    main(["doctor"])
    listed, _, verdict = capsys.readouterr().out.partition("\n\n")
    (line,) = (row for row in listed.splitlines() if row.startswith(f"{lacking} "))
    assert "not there" in line
    if lacking == "triton" and not cards:
        assert "only a GPU's kernels use it" in line
        assert verdict.endswith("nothing is missing\n")
    else:
        assert "only a GPU" not in line
        assert "nothing is missing" not in verdict
        assert "pip install" in verdict


HOST = HostInfo(
    system="Linux",
    cpu="x",
    cpu_features=(),
    num_cores=2,
    num_cpus=2,
    memory_bytes=2**34,
    free_bytes=2**33,
)
GPU = GpuInfo(name="NVIDIA H200", memory_bytes=2**37, free_bytes=2**37, driver="470.1")
CPU_TORCH = diagnosis.TorchInfo(version="2.13.0", cuda_build=None, sees_gpu=False)
CUDA_TORCH = diagnosis.TorchInfo(version="2.13.0", cuda_build="13.0", sees_gpu=True)
BLIND_TORCH = diagnosis.TorchInfo(version="2.13.0", cuda_build="13.0", sees_gpu=False)
ALL = {"triton": "3"}


@pytest.mark.parametrize(("gpus", "torch", "packages", "has_model", "words", "needed"), [
    ((), CPU_TORCH, ALL, True, [], False),
    ((), CUDA_TORCH, ALL, True, [], False),
    ((GPU,), CUDA_TORCH, ALL, True, [], False),
    ((), None, ALL, True, ["torch, for compression"], False),
    ((GPU,), CPU_TORCH, ALL, True, ["CUDA build"], False),
    ((GPU,), BLIND_TORCH, ALL, True, ["torch can use"], False),
    ((GPU,), CUDA_TORCH, {}, True, ["triton"], False),
    ((), CPU_TORCH, {}, False, ["default model"], False),
    ((), CPU_TORCH, {**ALL, "transformers": None, "triton": None}, True, ["transformers"], False),
    ((), CPU_TORCH, {**ALL, "numpy": None, "tokenizers": "1"}, True, ["numpy"], True),
])  # fmt: skip
def test_what_is_missing(gpus, torch, packages, has_model, words, needed):
    missing = diagnosis.find_missing(HOST, gpus, torch, packages, has_model=has_model)
    assert len(missing) == len(words)
    for item, word in zip(missing, words, strict=True):
        assert word in item.what
        assert item.command
    assert diagnosis.can_run(missing) is not needed


def test_info_says_what_copying_layers_to_a_gpu_allows(capsys, monkeypatch):
    monkeypatch.setattr("slipstream.costs.estimate.gpus", lambda: (GPU,))
    monkeypatch.setattr("slipstream.cli.library.info.host_memory", lambda: (64 * 2**30, 32 * 2**30))
    words = [
        "info",
        str(CONFIGS / "llama-3-8b"),
        "--device=cuda",
        "--weights-bytes=8GiB",
        "--max-model-len=4096",
    ]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["offload"]
    assert found["read_rate"] == 55e9
    assert found["read_bytes"] + found["resident_bytes"] > 15 * 2**30
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"{len(found['streamed'])} of 32 layers are read in each step" in out
    assert (
        f"at most {55e9 / found['read_bytes']:,.2f} steps a second (estimated), at 55 GB/s from host to GPU"
        in out
    )
    assert "(32.00 GiB) are free" in out
    monkeypatch.setattr(
        "slipstream.costs.estimate.gpus", lambda: (dataclasses.replace(GPU, name="a card"),)
    )
    assert main(words) == 0
    assert "how fast that is is not known of a card" in capsys.readouterr().out


def test_doctor_names_each_absent_extra_with_its_command():
    lacking = dict.fromkeys(diagnosis.EXTRAS)
    missing = diagnosis.find_missing(HOST, (), CPU_TORCH, lacking, has_model=True)
    assert len(missing) == len(lacking) >= 11
    for item, (extra, _) in zip(missing, diagnosis.EXTRAS.values(), strict=True):
        assert f"[{extra}]" in item.command
    assert diagnosis.can_run(missing)


@pytest.mark.parametrize(("recorded", "told"), [
    ('{"url": "file:///a/clone", "dir_info": {"editable": true}}', "pip install -e '/a/clone[x]'"),
    ('{"url": "file:///a%20b", "dir_info": {}}', "pip install '/a b[x]'"),
    ('{"url": "file:///s.whl", "archive_info": {}}', "pip install 'slipstream[x] @ file:///s.whl'"),
    (None, "pip install '.[x]' in a clone of Slipstream"),
])  # fmt: skip
def test_advice_to_install_an_extra_names_the_source(monkeypatch, tmp_path, recorded, told):
    of_pip(monkeypatch, tmp_path, recorded)
    assert install_command("x").startswith(told)


def of_pip(monkeypatch, prefix, recorded, installer="pip"):
    files = {"direct_url.json": recorded, "INSTALLER": installer}
    source = type("Distribution", (), {"read_text": lambda self, name: files[name]})
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: source())
    monkeypatch.setattr("sys.prefix", str(prefix))


@pytest.mark.parametrize(
    ("prefix", "mark", "told"),
    [
        ("venv", None, "uv pip install 'slipstream[x] @ file:///s.whl'"),
        ("venv", "pipx_metadata.json", "pipx install --force 'slipstream[x] @ file:///s.whl'"),
        ("venv", "uv-receipt.toml", "uv tool install --force 'slipstream[x] @ file:///s.whl'"),
        ("archive-v0/abc", None, "uvx --from 'slipstream[x] @ file:///s.whl' slipstream"),
    ],
)
def test_advice_to_install_an_extra_is_for_the_tool_that_installed(
    monkeypatch, tmp_path, prefix, mark, told
):
    (folder := tmp_path / prefix).mkdir(parents=True)
    if mark is not None:
        (folder / mark).touch()
    of_pip(monkeypatch, folder, '{"url": "file:///s.whl", "archive_info": {}}', "uv")
    assert install_command("x") == told
