"""The description in a compressed checkpoint, and the folder in which it is made."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from slipstream.compress.checkpoint import (
    Attempts,
    Names,
    WorkFolder,
    cache_config,
    fingerprint,
    quantization_config,
    stored_formats,
    work_folder,
)
from slipstream.compress.quantize.rounding import nearest
from slipstream.compress.recipe import RECIPE_NAME
from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.model.stored.parts import unpack_words
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import WeightFormat
from tests.support import tiny_models

INT4 = WeightFormat(bits=4, group_size=32)
INT4_ZEROS = WeightFormat(bits=4, group_size=32, symmetric=False)
INT8 = WeightFormat(inputs="int8")
FP8_STATIC = WeightFormat(kind="float", inputs="fp8", static_inputs=True, whole=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_models.write_with_tokenizer(folder, "llama", tie_word_embeddings=True)
    return read_spec(folder)


@pytest.fixture(scope="module")
def names(source):
    return Names(source)


def products(names):
    """Targets of the layers' products."""
    return sorted(
        {
            at.target
            for at in names.places.values()
            if at.target.startswith("layers.") and len(names.shapes[at.target]) == 2
        }
    )


def test_commonest_format_is_that_of_linear_and_the_others_are_named(names):
    first, *others = products(names)
    found = stored_formats(names, {**dict.fromkeys(others, INT4), first: INT8})
    (linear, own), (modules, other) = found.groups
    assert (linear, own, other) == (("Linear",), INT4, INT8)
    assert {f"{module}.weight" for module in modules} == set(names.of(first))
    assert found.ignore == ("lm_head",)  # a tied head is no module with a weight


def test_products_without_a_format_are_ignored_and_embeddings_are_no_products(names):
    first, *others = products(names)
    found = stored_formats(names, dict.fromkeys(others, INT4))
    assert set(found.ignore) == {"lm_head", *(n.removesuffix(".weight") for n in names.of(first))}
    assert not any("embed" in name or "norm" in name for name in found.ignore)


@pytest.mark.parametrize(
    ("fmt", "kind", "weights", "inputs"),
    [
        (INT4, "pack-quantized", (4, "int", True, "group", 32), None),
        (INT4_ZEROS, "pack-quantized", (4, "int", False, "group", 32), None),
        (INT8, "int-quantized", (8, "int", True, "channel", None), ("token", True)),
        (FP8_STATIC, "float-quantized", (8, "float", True, "tensor", None), ("tensor", False)),
    ],
    ids=str,
)
def test_config_of_a_format(names, fmt, kind, weights, inputs):
    config = quantization_config(stored_formats(names, dict.fromkeys(products(names), fmt)), None)
    assert (config["format"], config["quant_method"]) == (kind, "compressed-tensors")
    group = config["config_groups"]["group_0"]
    assert (group["targets"], group["format"]) == (["Linear"], kind)
    keys = ("num_bits", "type", "symmetric", "strategy", "group_size")
    assert tuple(group["weights"][key] for key in keys) == weights
    if inputs is None:
        assert group["input_activations"] is None
    else:
        given = group["input_activations"]
        assert (given["strategy"], given["dynamic"]) == inputs
        assert (given["num_bits"], given["type"]) == (8, fmt.kind)


def test_several_formats_are_mixed_precision_and_none_leaves_the_cache(names):
    first, *others = products(names)
    both = quantization_config(
        stored_formats(names, {**dict.fromkeys(others, INT4), first: INT8}), None
    )
    assert (both["format"], set(both["config_groups"])) == (
        "mixed-precision",
        {"group_0", "group_1"},
    )
    from slipstream.spec.stored.quantization_config import StoredFormats

    cache = cache_config("fp8", "tensor")
    none = quantization_config(StoredFormats((), ()), cache)
    assert (none["format"], none["config_groups"], none["kv_cache_scheme"]) == ("dense", {}, cache)


@pytest.mark.parametrize(
    ("form", "per", "kind", "strategy"),
    [("fp8", "tensor", "float", "tensor"), ("int8", "head", "int", "attn_head")],
)
def test_config_of_the_cache(form, per, kind, strategy):
    found = cache_config(form, per)
    assert (found["type"], found["strategy"], found["dynamic"]) == (kind, strategy, False)


def test_tensors_of_a_packed_weight_with_zero_points(names):
    """A module's rows of a merged weight: words, scales and packed zero points are its own."""
    target = next(t for t in products(names) if len(names.of(t)) > 1)
    weight = torch.randn(names.shapes[target], generator=torch.Generator().manual_seed(0))
    made = nearest(weight, INT4_ZEROS, torch.bfloat16, clip=True)
    tensors = dict(names.tensors({}, {target: made}, {target: 0.5}, torch.bfloat16))
    for name in names.of(target):
        module, at = name.removesuffix(".weight"), names.places[name]
        shape = tensors[f"{module}.weight_shape"].tolist()
        words, zero_words = (
            tensors[f"{module}.{part}"].numpy() for part in ("weight_packed", "weight_zero_point")
        )
        codes = torch.from_numpy(unpack_words(words, 4, shape[1]))
        zeros = torch.from_numpy(unpack_words(zero_words.T, 4, shape[0])).T
        begin = at.start or 0
        rows = slice(begin, begin + shape[0])
        assert torch.equal(codes, made.codes[rows])
        assert torch.equal(zeros, made.grid.zeros[rows])
        assert torch.equal(tensors[f"{module}.weight_scale"], made.grid.scales[rows])
        assert tensors[f"{module}.input_scale"].tolist() == [0.5]


def test_transposed_and_stacked_weights_have_no_format(tmp_path):
    for family in ("gpt2", "gpt_oss"):
        tiny_models.write(tmp_path / family, family)
        names = Names(read_spec(tmp_path / family))
        wanted = next(
            at.target
            for at in names.places.values()
            if at.copies is not None or type(at.transform).__name__ == "Transpose"
        )
        with pytest.raises(UnsupportedModelError, match="not the"):
            names.check({wanted: INT8})
        names.check({})


# --- The folder ---------------------------------------------------------------------------------------


def test_part_is_finished_with_its_note_and_a_damaged_one_is_made_again(tmp_path):
    work = WorkFolder(tmp_path / "out", {"a": 1}, restart=False)
    assert work.note("x") is None
    work.finish("x", [("t", torch.arange(6.0).view(2, 3).T)], {"n": 1})
    assert work.note("x") == {"n": 1}
    ((name, tensor),) = work.tensors(["x"])
    assert (name, tensor.tolist()) == ("t", [[0, 3], [1, 4], [2, 5]])
    whole = work.part("x").read_bytes()
    for damaged in (whole[:-4], b"", None):
        work.part("x").write_bytes(damaged) if damaged is not None else work.part("x").unlink()
        assert work.note("x") is None
    work.part("x").write_bytes(whole)
    (work.path / "x.json").write_text("{")
    assert work.note("x") is None


def test_part_without_its_tensors_has_no_note(tmp_path, monkeypatch):
    """Interrupted between the two, it is not finished."""
    work = WorkFolder(tmp_path / "out", {}, restart=False)

    def interrupted(*paths):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("slipstream.compress.checkpoint.os.replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            work.finish("x", [("t", torch.zeros(1))], {})
    assert not (work.path / "x.json").exists()
    assert not work.part("x").exists()


def test_work_of_another_plan_is_refused_and_restart_deletes_it(tmp_path):
    out = tmp_path / "out"
    WorkFolder(out, {"a": 1}, restart=False).finish("x", [("t", torch.zeros(1))], {})
    assert WorkFolder(out, {"a": 1}, restart=False).note("x") == {}
    with pytest.raises(ConfigError, match="--restart"):
        WorkFolder(out, {"a": 2}, restart=False)
    assert WorkFolder(out, {"a": 2}, restart=True).note("x") is None
    out.mkdir()
    WorkFolder(out, {"a": 2}, restart=False)  # an empty folder may be filled
    (out / "file").touch()
    with pytest.raises(ConfigError, match="exists"):
        WorkFolder(out, {"a": 2}, restart=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists"):
        WorkFolder(tmp_path / "file", {}, restart=False)


def test_published_folder_has_everything_and_the_work_is_gone(tmp_path, source):
    work = WorkFolder(tmp_path / "out", {}, restart=False)
    for name in ("a", "b"):
        work.finish(name, [(f"t.{name}", torch.ones(2))], {})
    done = []
    work.publish(source, ["a", "b"], {"model_type": "own", "more": 1}, [{"a": 1}], done.append)
    out = tmp_path / "out"
    assert set(load_file(out / "model.safetensors")) == {"t.a", "t.b"}
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["more"]) == ("own", 1)
    assert config["hidden_size"] == source.spec.hidden_size
    assert json.loads((out / RECIPE_NAME).read_text()) == [{"a": 1}]
    assert (out / "tokenizer.json").is_file()
    assert len(done) == 1
    assert not work_folder(out).exists()


def test_attempts_delete_the_layers_and_are_kept_until_a_restart(tmp_path):
    out = tmp_path / "out"
    attempts = Attempts(out, restart=False)
    work = WorkFolder(out, {}, restart=False)
    attempts.add({"bits": 4}, 0.25)
    assert not work.path.exists()
    assert Attempts(out, restart=False).cost({"bits": 4}) == 0.25
    assert Attempts(out, restart=True).cost({"bits": 4}) is None
    assert Attempts(out, restart=False).cost({"bits": 4}) is None


def test_fingerprint_changes_with_a_files_name_size_or_time(tmp_path):
    tiny_models.write(tmp_path / "model", "llama")
    source = read_spec(tmp_path / "model")
    before = fingerprint(source)
    assert fingerprint(source) == before
    weights, config = (tmp_path / "model" / name for name in ("model.safetensors", "config.json"))
    for file in (weights, config):
        told = file.stat()
        os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns + 1))
        assert fingerprint(source) != before
        os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns))
        assert fingerprint(source) == before
    told = config.stat()
    config.write_text(config.read_text() + " ")
    os.utime(config, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert fingerprint(source) != before


def test_a_module_is_ignored_by_its_name_in_a_nested_decoder():
    """Names that `compress` writes for Qwen2-Audio, whose decoder stands in `language_model`."""
    from slipstream.spec.stored.quantization_config import StoredFormats

    fmt = WeightFormat(bits=8, kind="int", group_size=None, symmetric=True)
    stored = StoredFormats(((("Linear",), fmt),), ("language_model.lm_head",))
    assert stored.of("lm_head") is None
    assert stored.of("language_model.lm_head") is None
    assert stored.of("model.layers.0.mlp.down_proj") == fmt
