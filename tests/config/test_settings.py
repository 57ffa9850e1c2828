"""Settings that `resolve` refuses, takes and chooses: the rows of settings.txt."""

import math
from operator import attrgetter
from pathlib import Path

import pytest

from slipstream.config import EngineArgs, resolve
from slipstream.config.engine_folder import Machine
from slipstream.costs.devices import find_device
from slipstream.errors import ConfigError, OutOfMemoryError
from slipstream.spec.description import read_spec
from tests.support import tiny_models

DEVICES = {
    "gpu": find_device("h200").device_info(),
    "cpu": find_device("cpu-2-avx512").device_info(),
}
NAMES = {"inf": math.inf, "MEMORY": DEVICES["cpu"].memory_bytes, "dict": dict}
ROWS = (Path(__file__).parent / "settings.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    models = {}

    def resolved(family, device, /, **settings):
        path = tmp_path_factory.getbasetemp() / f"settings-{family}"
        if family not in models:
            make = tiny_models.build_encoder if family == "bert" else tiny_models.write
            make(path, family)
            models[family] = read_spec(path)
        return resolve(EngineArgs(model=str(path), **settings), models[family], DEVICES[device])

    return resolved


@pytest.mark.parametrize("row", ROWS)
def test_settings_are_refused_by_name_or_chosen_as_the_row_says(row, resolved):
    """`family device: settings`, then `-> field: words` or `=> value; value`; neither: they are taken."""
    given, _, refusal = row.partition(" -> ")
    given, _, chosen = given.partition(" => ")
    model, _, settings = given.partition(": ")
    settings = eval(f"dict({settings})", NAMES)
    if not refusal:
        config = resolved(*model.split(), **settings)
        for name, value in (part.split("=", 1) for part in filter(None, chosen.split("; "))):
            assert repr(attrgetter(name)(config)) == value, name
        return
    field, _, words = refusal.partition(": ")
    with pytest.raises(ConfigError) as caught:
        resolved(*model.split(), **settings)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_context_is_lowered_to_what_the_cache_holds_unless_it_was_given(resolved):
    config = resolved("llama", "gpu")
    assert config.with_memory_limits(16, 1000) is config
    lowered = config.with_memory_limits(15, 1000)
    assert lowered.model.max_model_len == 240
    assert lowered.origins["max_model_len"].source == "memory"
    assert config.with_memory_limits(1, 1000).model.max_model_len == 16
    for given, blocks, field, words in (
        ({"max_model_len": 256}, 15, "max_model_len", r"256.00 MiB .* 240.00 MiB \(240 tokens\)"),
        ({}, 0, "kv_cache_bytes", "gpu_memory_utilization or kv_cache_bytes"),
    ):
        with pytest.raises(OutOfMemoryError, match=words) as caught:
            resolved("llama", "gpu", **given).with_memory_limits(blocks, 2**24)
        assert caught.value.field == field


def test_slots_that_fit_bound_the_drafts_that_the_engine_chooses(resolved):
    """A sequence has two slots and one for each draft; a quarter of all stays free."""
    for given, limit in ((None, 4), (9, 9)):
        config = resolved(
            "mamba2", "cpu", max_num_seqs=8, speculative_model="ngram", num_speculative_tokens=given
        )
        fitted = config.with_memory_limits(1000, 1, (64,))
        assert (fitted.cache.slots, fitted.speculation.limit) == ((64,), limit)
        assert config.with_memory_limits(1000, 1, (4096,)).speculation.limit == (given or 16)


def test_machines_differ_by_name_in_words():
    own = Machine(cpu="a", cpu_features=("x", "y"), num_cores=2, memory_gib=8)
    other = Machine(cpu="b", cpu_features=(), num_cores=4, memory_gib=8, gpus=("h",))
    assert own.differences(own) == []
    assert own.differences(other) == [
        "GPU: none, here h",
        "CPU: a, here b",
        "instructions: x, y, here none",
        "cores: 2, here 4",
    ]
