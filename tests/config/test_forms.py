"""Forms of parallelism, and drafts next to forms of offloading."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest

from slipstream.config import EngineArgs, resolve
from slipstream.config.forms import (
    NO_DRAFTS,
    DealtRequests,
    HeadDrafts,
    HostAndGpu,
    NgramDrafts,
    OneDevice,
    Pipeline,
    StreamedLayers,
    TensorParallel,
    with_tensor_size,
)
from slipstream.config.parallel import _with_stacked
from slipstream.config.scheduling import _sequences_with_states
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
        (Pipeline(OneDevice(), (1, 2), True), 2, 1, Shard(0, 1, False, layers=(1, 3), embeds=True)),
        (HostAndGpu(3, 1), 2, 1, Shard(0, 1, tensor=False, layers=(3, 4))),
    ],
    ids=str,
)
def test_each_form_has_its_ranks_and_shards(form, num_ranks, num_caches, last):
    assert (form.num_ranks, form.stage.num_caches) == (num_ranks, num_caches)
    assert form.shard(num_ranks - 1) == last
    layers = [form.shard(i * form.stage.size).layers for i in range(form.num_stages)]
    ends = [0, *itertools.accumulate(form.stages)]
    assert not form.stages or layers == list(itertools.pairwise(ends))


@pytest.mark.parametrize(("given", "most", "limit"), [(None, 5, 5), (3, 5, 3), (None, 16, 16)])
def test_drafts_of_a_request_are_as_many_as_were_given_or_as_its_head_has(given, most, limit):
    drafts = HeadDrafts(method="eagle", model="m", num_speculative_tokens=given, most_drafts=most)
    assert drafts.limit == limit


def test_more_tensor_ranks_keep_the_rest_of_a_form():
    assert with_tensor_size(OneDevice(), 4) == TensorParallel(4)
    assert with_tensor_size(TensorParallel(2, sequence=True), 4) == TensorParallel(4, sequence=True)
    assert with_tensor_size(DealtRequests(2), 4) == TensorParallel(4, whole_experts=True)
    piped = Pipeline(TensorParallel(4), (3, 1), embeds=True)
    assert with_tensor_size(Pipeline(OneDevice(), (3, 1), embeds=True), 4) == piped


def test_drafts_of_a_model_or_head_are_refused_over_stages_on_gpus(tmp_path):
    tiny_models.write(tmp_path, "llama", num_hidden_layers=2)
    drafts = {"method": "eagle", "model": "m"}
    args = EngineArgs(str(tmp_path), pipeline_parallel_size=2, speculative_config=drafts)
    with pytest.raises(ConfigError, match="does not run over stages on GPUs; use 'ngram'") as told:
        resolve(args, read_spec(tmp_path), GPU)
    assert told.value.field == "pipeline_parallel_size"
    on_cpu = dataclasses.replace(args, device="cpu")
    info = dataclasses.replace(GPU, device="cpu", best_dtype="bfloat16", num_threads=2)
    assert resolve(on_cpu, read_spec(tmp_path), info).parallel.embeds


def test_a_run_of_drafts_may_have_one_length_alone(tmp_path):
    tiny_models.write(tmp_path, "llama")
    one = {"prompt_lookup_min": 4, "prompt_lookup_max": 4}
    args = EngineArgs(model=str(tmp_path), speculative_config={"method": "ngram", **one})
    assert resolve(args, read_spec(tmp_path), GPU).speculation == NgramDrafts(**one)


def test_a_first_stage_has_as_many_layers_as_take_an_encoders_states():
    assert _with_stacked((3, 1), 3) == (3, 1)
    with pytest.raises(ConfigError, match="first 4 layers"):
        _with_stacked((3, 1), 4)


@pytest.mark.parametrize(
    ("drafts", "most"), [(NO_DRAFTS, 512), (NgramDrafts(num_speculative_tokens=6), 128)]
)
def test_fewer_sequences_have_states_where_each_guess_needs_one(drafts, most):
    spec = SimpleNamespace(state_bytes=lambda element: 2**20)
    gpu = SimpleNamespace(is_cuda=True, memory_bytes=2**32)
    assert _sequences_with_states(spec, gpu, drafts) == most


def test_a_step_has_room_for_a_whole_prompt_of_each_rank(tmp_path):
    tiny_models.write(tmp_path, "mixtral")
    cpu = find_device("cpu-2-avx512").device_info()
    args = EngineArgs(
        model=str(tmp_path),
        max_model_len=256,
        expert_parallel_size=4,
        enable_chunked_prefill=False,
    )
    assert resolve(args, read_spec(tmp_path), cpu).scheduling.max_num_batched_tokens == 4 * 256


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


def test_the_last_stage_alone_has_the_embeddings_for_a_draft_head():
    form = Pipeline(TensorParallel(2), (2, 2, 1), embeds=True)
    assert [form.shard(rank).embeds for rank in range(6)] == [False] * 4 + [True] * 2
