"""Kernels compiled before a start: their list, its key, and Triton's cache over the folder that they are shipped in."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.errors import ConfigError
from slipstream.optimize import folder as folders
from slipstream.spec.description import read_spec
from slipstream.spec.devices.autotune_table import NO_TILES
from slipstream.spec.devices.gpu_archs import DESCRIBED_GPUS
from slipstream.worker.device import detect
from slipstream.worker.start import kernel_variants
from slipstream.worker.start.kernel_order import KernelOrder, kernel_key, read_manifest
from tests.support import tiny_models

GPU = DESCRIBED_GPUS[9, 0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("ahead") / "model"
    tiny_models.write(path)
    return path


def key_of(path, gpu=GPU, **settings):
    args = EngineArgs(model=str(path), skip_tokenizer_init=True, **settings)
    info = DeviceInfo(
        device="cuda:0",
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        free_bytes=gpu.memory_bytes,
        best_dtype="bfloat16",
        compute_capability=gpu.capability,
    )
    return kernel_key(resolve(args, read_spec(path), info), read_spec(path).spec, NO_TILES, gpu)


def test_a_key_follows_what_decides_kernels_and_not_where_the_model_lies(model, tmp_path):
    shutil.copytree(model, tmp_path / "moved")
    key = key_of(model)
    assert key == key_of(tmp_path / "moved") == key_of(model, seed=7, load_format="dummy")
    others = [
        key_of(model, max_num_seqs=3),
        key_of(model, quantization="fp8"),
        key_of(model, enforce_eager=True),
        key_of(model, gpu=dataclasses.replace(GPU, multiprocessors=114)),
    ]
    assert len({key, *others}) == 5


def test_a_kernel_that_this_process_has_is_not_loaded_again(monkeypatch):
    variants = pytest.importorskip("slipstream.kernels.triton.variants")
    loads, cache = [], {"there": "loaded before"}
    function = SimpleNamespace(device_caches={0: (cache,)}, preload=loads.append)
    monkeypatch.setitem(sys.modules, "some_kernels", SimpleNamespace(scale=function))
    active = variants.TargetDriver((9, 0))
    monkeypatch.setattr(variants, "driver", SimpleNamespace(active=active))
    data = json.dumps({"constant_vals": []})
    there, new = (
        variants.KernelVariant("some_kernels", "scale", key, data) for key in ("there", "new")
    )
    assert there.load() == "loaded before"
    assert loads == []
    new.load()
    assert loads == [data]


COMPILED_AND_MOVED = """
import json, shutil, sys
from pathlib import Path
import torch, triton
from triton import knobs
from slipstream.kernels.triton import rows, sampling
from slipstream.kernels.triton.kernel_cache import holds, use_layers
from slipstream.kernels.triton.variants import Compilers, TargetDriver, recording
from slipstream.platform import platform_of
from slipstream.spec.devices.gpu_archs import DESCRIBED_GPUS

folder, capability = Path(sys.argv[1]), tuple(json.loads(sys.argv[2]))
platform_of(torch.device("meta")).describe(DESCRIBED_GPUS[capability])
with recording(capability) as found:
    logits = torch.empty(3, 300, dtype=torch.bfloat16, device="meta")
    sampling.argmax(logits)
    sampling.argmax(logits[:, :299])
    ids = torch.empty(2, dtype=torch.int64, device="meta")
    rows.write_tokens(torch.empty(4, 9, dtype=torch.int32, device="meta"), ids, ids, ids)
with Compilers(capability, num_processes=2, folder=str(folder / "a")) as compilers:
    compilers.compile(found)
    names, failed = compilers.results()
shutil.move(folder / "a", folder / "b")
layers = [folder / "b"]
use_layers(layers)
knobs.cache.dir = str(folder / "own")
triton.runtime.driver.set_active(TargetDriver(capability))
compiled = []
knobs.compilation.listener = lambda *, cache_hit, **_: None if cache_hit else compiled.append(1)
for variant in found:
    variant.load()
print(json.dumps([len(found), len(compiled), failed, all(holds(n, layers) for n in names.values()),
    sorted({file.name.split(".")[0] for file in folder.glob("b/*/*.so")})]))
"""


HASHED_IN_TWO_ORDERS = """
from triton.runtime.jit import DependenciesFinder, JITFunction


def update_hash(self, func):  # as Triton 3.6 does
    self.used_global_vals.update(func.used_global_vals)
    self.hasher.update(func.cache_key.encode())


DependenciesFinder._update_hash = update_hash
from slipstream.kernels.triton import drawing
from slipstream.kernels.triton.kernel_cache import use_layers

functions = [x for x in vars(drawing).values() if isinstance(x, JITFunction)]


def keys(functions):
    for function in functions:
        function.hash, function.used_global_vals = None, {}
    return {function.__name__: function.cache_key for function in functions}


as_triton_does = keys(functions) == keys(functions[::-1])
use_layers([])
print(as_triton_does, keys(functions) == keys(functions[::-1]))
"""


def test_a_kernel_has_one_hash_whichever_kernel_is_hashed_first():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", HASHED_IN_TWO_ORDERS]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == ["False", "True"]


OTHERS = [pytest.param(capability, marks=pytest.mark.slow) for capability in ((8, 0), (10, 0))]


@pytest.mark.parametrize("capability", [(9, 0), *OTHERS], ids=str)
def test_kernels_compiled_without_a_gpu_are_found_in_a_moved_folder(tmp_path, capability):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED_AND_MOVED, str(tmp_path), json.dumps(capability)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    num_found, num_compiled, failed, held, modules = json.loads(ran.stdout.splitlines()[-1])
    assert num_found >= 2
    assert (num_compiled, failed, held) == (0, {}, True)
    assert "cuda_utils" in modules  # what loads and launches them, too


FOUND_IN_PARTS = """
import sys
import torch
from slipstream.config import EngineArgs
from slipstream.platform import platform_of
from slipstream.spec.devices.gpu_archs import DESCRIBED_GPUS
from slipstream.worker.start import kernel_variants

platform_of(torch.device("meta")).describe(DESCRIBED_GPUS[9, 0])
kernel_variants.available_cores = lambda: 2 * int(sys.argv[2])
args = EngineArgs(model=sys.argv[1], max_num_seqs=20, max_num_batched_tokens=128, enforce_eager=True)
taken = []
found = kernel_variants.find_kernels(args, (9, 0), taken.extend)
assert set(taken) == found.variants | found.sources
print(sorted((v.name, v.key, v.data) for v in found.variants), len(found.sources))
"""


@pytest.mark.slow
def test_processes_that_share_the_steps_find_what_one_finds(model):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = []
    for parts in ("1", "3"):
        command = [sys.executable, "-c", FOUND_IN_PARTS, str(model), parts]
        ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        found.append(ran.stdout)
    assert found[0] == found[1]
    assert "_decode_kernel" in found[0]


STUB = """
import json, sys
from pathlib import Path
order = json.loads(sys.stdin.read())
file = Path(order["manifest"])
file.parent.mkdir(parents=True, exist_ok=True)
file.write_text(json.dumps({"key": "k", "variants": [], "folders": [], "failed": {}, "order": order}))
"""


def test_a_built_folder_has_the_kernels_of_the_gpus_that_are_named(model, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "KERNEL_COMMAND", (sys.executable, "-c", STUB))
    args = EngineArgs(model=str(model), skip_tokenizer_init=True, device="cpu", max_num_seqs=4)
    built = folders.build_folder(args, tmp_path / "out", kernels=["sm_90", "sm_80"])
    assert built.kernels == ("sm_90", "sm_80")
    file = tmp_path / "out" / "kernels" / "sm_80.json"
    assert read_manifest(file, "k") is not None
    assert read_manifest(file, "another") is None
    order = json.loads(file.read_bytes())["order"]
    assert order["settings"]["max_num_seqs"] == 4
    assert order["gpu"]["capability"] == [8, 0]
    assert KernelOrder.parse(json.dumps(order)).gpu == DESCRIBED_GPUS[8, 0]


def test_kernels_of_an_unknown_gpu_are_refused_before_anything_is_written(model, tmp_path):
    args = EngineArgs(model=str(model), skip_tokenizer_init=True, device="cpu")
    with pytest.raises(ConfigError, match=r"'sm_70'.*sm_80, sm_89, sm_90, sm_100"):
        folders.build_folder(args, tmp_path / "out", kernels=["sm_70"])
    assert not (tmp_path / "out").exists()


def test_a_gpu_that_is_not_described_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"meta:35.*meta:80, meta:89, meta:90, meta:100"):
        detect("meta:35", tmp_path)


@pytest.mark.parametrize(
    ("search", "message"),
    [(lambda *_: os._exit(3), "ended early"), (lambda *_: time.sleep(60), "said nothing")],
)
def test_a_search_for_kernels_that_ends_or_hangs_is_an_error(monkeypatch, search, message):
    monkeypatch.setattr(kernel_variants, "MAX_SILENT_S", 0.5)
    steps, platform = SimpleNamespace(run_forwards=search), SimpleNamespace(cuda_sources=set())
    with pytest.raises(RuntimeError, match=message):
        list(kernel_variants._in_parts(steps, platform, []))
