"""Forms of parallelism, and drafts next to forms of offloading."""

import pytest

from slipstream.config import EngineArgs, resolve
from slipstream.config.forms import (
    DealtRequests,
    HostAndGpu,
    NgramDrafts,
    OneDevice,
    Pipeline,
    StreamedLayers,
    TensorParallel,
    with_tensor_size,
)
from slipstream.costs.devices import find_device
from slipstream.errors import ConfigError
from slipstream.spec.description import read_spec
from slipstream.spec.parallel import Shard
from tests.support import tiny_models

GPU = find_device("h200").device_info()


@pytest.mark.parametrize(
    ("form", "num_ranks", "num_caches", "last"),
    [
        (OneDevice(), 1, 1, Shard(0, 1, tensor=False)),
        (TensorParallel(4, whole_experts=True), 4, 1, Shard(3, 4, experts=True)),
        (DealtRequests(2), 2, 2, Shard(1, 2, tensor=False, experts=True)),
        (Pipeline(TensorParallel(2), (3, 1)), 4, 1, Shard(1, 2, layers=(3, 4))),
        (Pipeline(DealtRequests(2), (2, 2)), 4, 2, Shard(1, 2, False, True, layers=(2, 4))),
        (HostAndGpu(3, 1), 2, 1, Shard(0, 1, tensor=False, layers=(3, 4))),
    ],
    ids=str,
)
def test_each_form_has_its_ranks_and_shards(form, num_ranks, num_caches, last):
    assert (form.num_ranks, form.stage.num_caches) == (num_ranks, num_caches)
    assert form.shard(num_ranks - 1) == last


def test_more_tensor_ranks_keep_the_rest_of_a_form():
    assert with_tensor_size(OneDevice(), 4) == TensorParallel(4)
    assert with_tensor_size(TensorParallel(2, sequence=True), 4) == TensorParallel(4, sequence=True)
    assert with_tensor_size(DealtRequests(2), 4) == TensorParallel(4, whole_experts=True)
    piped = Pipeline(TensorParallel(4), (3, 1))
    assert with_tensor_size(Pipeline(OneDevice(), (3, 1)), 4) == piped


@pytest.mark.parametrize("setting", ["weights_bytes", "cpu_layers"])
def test_offloading_goes_with_looked_up_drafts_and_refuses_learned_ones(tmp_path, setting):
    """However the method is given: short, or in `speculative_config`."""
    tiny_models.write(tmp_path, "llama", num_hidden_layers=4)
    model, value = read_spec(tmp_path), {"weights_bytes": 2**20, "cpu_layers": 2}[setting]
    for given in ({"speculative_model": "ngram"}, {"speculative_config": {"method": "ngram"}}):
        config = resolve(EngineArgs(model=str(tmp_path), **{setting: value}, **given), model, GPU)
        assert config.speculation == NgramDrafts()
        assert setting != "weights_bytes" or config.model.offload == StreamedLayers(value)
    for drafts in ({"method": "draft", "model": "m"}, {"method": "eagle", "model": "m"}):
        args = EngineArgs(model=str(tmp_path), **{setting: value}, speculative_config=drafts)
        with pytest.raises(ConfigError, match="drafts of a model") as error:
            resolve(args, model, GPU)
        assert error.value.field == setting
