"""Forward paths that `slipstream info` names: an engine finds the same with the loaded model."""

from __future__ import annotations

import pytest

from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.costs.estimate import estimate
from slipstream.kernels.cpu.native import has_cpu_kernels
from slipstream.spec.description import read_spec
from slipstream.worker.forward.forward_paths import fast_paths
from slipstream.worker.start.loading import load_runner
from tests.support import tiny_models

SIZES = dict(
    device="cpu",
    dtype="float32",
    max_model_len=64,
    max_num_seqs=4,
    num_threads=1,
    kv_cache_bytes=2**20,
)

GPU = DeviceInfo(
    device="cuda:0",
    name="a GPU",
    memory_bytes=2**37,
    free_bytes=2**37,
    best_dtype="bfloat16",
    compute_capability=(9, 0),
)


@pytest.mark.skipif(not has_cpu_kernels(), reason="the C++ kernels are not built")
@pytest.mark.parametrize(
    "settings", [{}, {"weights_bytes": 160_000}, {"kernels": "reference"}], ids=str
)
@pytest.mark.parametrize("family", ["llama", "granite", "olmo2", "mixtral"])
def test_info_says_what_an_engine_finds(tmp_path, family, settings):
    if "weights_bytes" in settings and family != "llama":
        pytest.skip("one family is enough for layers that are read as they are needed")
    tiny_models.write(tmp_path, family, num_hidden_layers=3)
    args = EngineArgs(model=str(tmp_path), **SIZES, **settings)
    said = fast_paths(estimate(args, read_spec(tmp_path))[0], read_spec(tmp_path).spec)
    _, runner, _ = load_runner(args, by_torch=True)
    paths = {path.name for path in runner.forwards.paths} & {"program", "one-token"}
    assert {name for name, reason in said.items() if reason is None} == paths
    if settings.get("kernels") != "reference":  # there "slipstream info" has nothing to say
        assert {
            name: str(reason) for name, reason in said.items() if reason is not None
        } == runner.forwards.refused


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {}, None),
        ("llama", {"tensor_parallel_size": 2}, None),
        ("mixtral", {"tensor_parallel_size": 2}, "several ranks has no experts"),
        ("llama", {"pipeline_parallel_size": 2}, "split over ranks"),
        ("llama", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "split over ranks"),
    ],
)
def test_the_one_token_kernel_of_several_gpus(tmp_path, family, settings, reason):
    tiny_models.write(
        tmp_path, family, hidden_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=64
    )
    description = read_spec(tmp_path)
    args = EngineArgs(model=str(tmp_path), device="cuda", max_model_len=64, **settings)
    found = fast_paths(resolve(args, description, GPU), description.spec)["one-token"]
    assert found is None if reason is None else reason in str(found)
