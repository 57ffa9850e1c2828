"""Recipes: what is wrong is named with its place; presets and settings come back from their own data."""

from __future__ import annotations

import pytest

from slipstream.cli import compress
from slipstream.compress.quantize_step import Budget, Quantize
from slipstream.compress.recipe import PRESETS, more_bits, parse, preset, read_recipe
from slipstream.errors import ConfigError


@pytest.mark.parametrize("name", [*PRESETS, "w4a16-mixed:3.5bpw"])
def test_presets_come_back_from_their_own_data(name):
    recipe = read_recipe(name)
    assert recipe.name == name
    assert parse(recipe.as_data(), name=name) == recipe


def test_every_preset_is_in_the_help():
    assert [
        name
        for name in (*PRESETS, "w4a16-mixed:3.5bpw", "draft:1/3")
        if name not in compress.__doc__
    ] == []


def test_a_recipe_is_read_from_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    quantize = "- quantize:\n    bits: 3\n    group_size: 64\n    ignore: [layers.0.*]\n"
    file.write_text("- calibrate: {num_windows: 3}\n" + quantize + "- kv_cache\n")
    recipe = read_recipe(str(file))
    assert recipe.name == "mine.yaml"
    quantize = recipe.one(Quantize)
    assert (quantize.bits, quantize.group_size, quantize.ignore) == (3, 64, ("layers.0.*",))
    assert quantize.of("layers.0.mlp.up") is None
    assert quantize.of("head") is None
    assert quantize.of("layers.10.mlp.up") == quantize


def test_overrides_and_budget():
    data = [
        {
            "quantize": {
                "bits": {"average": 3.5},
                "overrides": {"layers.*.mlp.down": {"bits": 8, "group_size": "channel"}},
            }
        }
    ]
    quantize = parse(data).one(Quantize)
    assert quantize.bits == Budget(average=3.5)
    own = quantize.of("layers.2.mlp.down")
    assert (own.bits, own.group_size, own.rounding) == (8, "channel", quantize.rounding)
    assert own.format(96).group_size is None
    assert quantize.of("layers.2.mlp.up") == quantize


@pytest.mark.parametrize(
    ("steps", "field"),
    [
        ([], "steps"),
        ("int4", "steps"),
        (["calibrate"], "steps"),
        (["surprise"], "steps[0]"),
        (["quantize", "rotate"], "steps"),
        (["quantize", "sparsify"], "steps"),
        ([{"quantize": {"bits": {"average": 9.5}}}], "steps[0].quantize.bits.average"),
        ([{"quantize": {}, "kv_cache": {}}], "steps[0]"),
        ([{"quantize": []}, "kv_cache", "kv_cache"], "steps"),
        ([{"quantize": {"bitz": 4}}], "steps[0].quantize.bitz"),
        ([{"quantize": {"bits": "4"}}], "steps[0].quantize.bits"),
        ([{"quantize": {"bits": True}}], "steps[0].quantize.bits"),
        ([{"quantize": {"bits": 9}}], "steps[0].quantize.bits"),
        (
            [{"quantize": {"bits": {"average": 3, "choices": [3, 4]}}}],
            "steps[0].quantize.bits.average",
        ),
        ([{"quantize": {"bits": {}}}], "steps[0].quantize.bits.average"),
        ([{"quantize": {"group_size": 48}}], "steps[0].quantize.group_size"),
        ([{"quantize": {"bits": 8, "inputs": "fp8"}}], "steps[0].quantize.inputs"),
        ([{"quantize": {"bits": 4, "inputs": "int8"}}], "steps[0].quantize.inputs"),
        ([{"quantize": {"scaling": "smoothquant"}}], "steps[0].quantize.scaling"),
        ([{"quantize": {"rounding": "gtpq"}}], "steps[0].quantize.rounding"),
        ([{"quantize": {"damping": 2}}], "steps[0].quantize.damping"),
        (
            [{"quantize": {"overrides": {"layers.0.*": {"damping": 0.1}}}}],
            "steps[0].quantize.overrides.layers.0.*",
        ),
        ([{"quantize": {"overrides": {"a": {"bits": 1}}}}], "steps[0].quantize.overrides.a.bits"),
        ([{"kv_cache": {"form": "int4"}}], "steps[0].kv_cache.form"),
        ([{"calibrate": {"num_windows": 0}}, "kv_cache"], "steps[0].calibrate.num_windows"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(steps, field):
    with pytest.raises(ConfigError) as caught:
        parse(steps)
    assert caught.value.field == field


def test_neither_a_file_nor_a_preset(tmp_path):
    with pytest.raises(ConfigError, match="int4-awq"):
        read_recipe("int4-agq")
    (tmp_path / "bad.yaml").write_text("- quantize: {bits: [")
    with pytest.raises(ConfigError, match="YAML"):
        read_recipe(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(
    ("given", "likely"),
    [
        ("int88", "int8"),
        ("INT8", "int8"),
        ("awq", "int4-awq"),
        ("GPTQ", "int4-gptq"),
        ("W8A8", "int8"),
    ],
)
def test_a_misspelt_preset_is_answered_with_the_likely_one(given, likely):
    with pytest.raises(ConfigError, match=f"did you mean '{likely}'"):
        read_recipe(given)


def test_groups_fit_the_inputs():
    quantize = parse(preset("int4-gptq")).one(Quantize)
    assert [quantize.format(n).group_size for n in (4096, 576, 96, 100)] == [128, 64, 32, None]
    with pytest.raises(ConfigError, match="does not divide"):
        parse([{"quantize": {"group_size": 128}}]).one(Quantize).format(576)


def test_more_bits_are_the_next_recipes_of_the_same_kind():
    assert [r.one(Quantize).bits for r in more_bits(read_recipe("int4-awq"))] == [5, 6, 7, 8]
    assert [r.one(Quantize).bits.average for r in more_bits(read_recipe("w4a16-mixed:6.5bpw"))] == [
        7.0,
        7.5,
    ]
    assert more_bits(read_recipe("fp8")) == more_bits(parse(["kv_cache"])) == []
    assert more_bits(read_recipe("int4-awq"))[0].name == "int4-awq with 5 bits"


@pytest.mark.parametrize(
    ("steps", "windows"),
    [
        ("int8", 16),
        ([{"quantize": {"bits": 8, "inputs": "int8", "scaling": "smoothquant"}}], 16),
        ("int8-outliers", 64),
        ("int4-awq", 64),
        ("int4-gptq", 64),
        ("int4-awq-gptq", 64),
        ("int4-learned", 64),
        ("fp8-static", 64),
        ("2:4-int8", 64),
        ("w4a16-mixed:3.5bpw", 64),
    ],
)
def test_few_windows_calibrate_where_they_were_compared_alone(steps, windows):
    recipe = read_recipe(steps) if isinstance(steps, str) else parse(steps)
    assert recipe.calibration_windows == windows
    asked = parse([{"calibrate": {"num_windows": 7}}, *recipe.as_data()])
    assert asked.calibration_windows == 7


@pytest.mark.parametrize("own", [{"rounding": "gptq"}, {"static_inputs": True}])
def test_a_product_of_its_own_asks_for_many_windows(own):
    quantize = {"bits": 8, "inputs": "int8", "scaling": "smoothquant"}
    recipe = parse([{"quantize": {**quantize, "overrides": {"layers.0.mlp.down": own}}}])
    assert recipe.calibration_windows == 64
