"""Every setting of the engine is an option, and none that is not given is set."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.base.other_engines import ONLY_PYTHON
from slipstream.cli import options
from slipstream.config import EngineArgs
from slipstream.params.sampling import SamplingParams


def parse(*words, **defaults):
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    options.add_engine_options(parser, without=("seed",), adapters=True)
    options.add_sampling_options(parser, **defaults)
    return parser.parse_args(["some-model", *words])


def test_every_field_is_explained():
    fields = {f.name for f in dataclasses.fields(EngineArgs)}
    assert set(options.ENGINE_HELP) == fields - ONLY_PYTHON.keys() < fields
    assert all(options.ENGINE_HELP.values())
    assert set(options.SAMPLING_HELP) <= {f.name for f in dataclasses.fields(SamplingParams)}


def test_nothing_given_means_the_defaults():
    assert options.engine_args(parse()) == EngineArgs(model="some-model")
    assert options.sampling_params(parse()) == SamplingParams()


ELSEWHERE = ("model", "seed", "lora_modules")  # the last one is `serve --lora`


def test_adapters_are_for_verbs_that_take_them():
    parser = argparse.ArgumentParser()
    options.add_engine_options(parser)
    assert not any("lora" in flag for flag in parser.format_help().split())


@pytest.mark.parametrize(
    "field", [f for f in dataclasses.fields(EngineArgs) if f.name not in {*ELSEWHERE, *ONLY_PYTHON}]
)
def test_every_field_can_be_set(field):
    flag = "--" + field.name.replace("_", "-")
    if "bool" in str(field.type):
        words = [flag if not field.default else flag.replace("--", "--no-", 1)]
        value = not field.default
    elif "dict" in str(field.type):
        words, value = [flag, '{"method": "suffix"}'], {"method": "suffix"}
    elif "str" in str(field.type) or field.metadata["choices"]:
        value = (field.metadata["choices"] or ("word",))[-1]
        words = [flag, value]
    elif field.type == "float":
        words, value = [flag, "0.25"], 0.25
    else:
        words, value = [flag, "7"], 7
    assert options.engine_args(parse(*words)) == dataclasses.replace(
        EngineArgs(model="some-model"), **{field.name: value}
    )


def test_what_the_verb_sets_gives_way_to_the_user():
    assert options.engine_args(parse(), max_num_seqs=1).max_num_seqs == 1
    assert options.engine_args(parse("--max-num-seqs", "4"), max_num_seqs=1).max_num_seqs == 4
    assert options.sampling_params(parse(), temperature=0.0).temperature == 0.0
    assert options.sampling_params(parse("--temperature=2"), temperature=0.0).temperature == 2.0


def test_stop_may_be_repeated():
    assert options.sampling_params(parse("--stop", "a", "--stop", "b")).stop == ("a", "b")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("123", 123),
        ("2GiB", 2**31),
        ("1.5g", 3 * 2**29),
        ("512MB", 2**29),
        ("4 kib", 4096),
        ("1t", 2**40),
        ("8b", 8),
    ],
)
def test_sizes_are_parsed_with_their_units(text, size):
    assert options.parse_bytes(text) == size


@given(st.integers(0, 2**50))
def test_a_size_without_a_unit_is_bytes(count):
    assert options.parse_bytes(str(count)) == count


@pytest.mark.parametrize("text", ["", "x", "-5", "1gg", "1 2", "GiB", "1e9"])
def test_texts_that_are_no_sizes_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no size"):
        options.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "why"), [("suffix", "is not JSON"), ("[1]", "is not a JSON object")]
)
def test_an_object_is_json(text, why, capsys):
    with pytest.raises(SystemExit):
        parse("--speculative-config", text)
    assert why in capsys.readouterr().err


def test_every_option_stands_under_one_heading():
    """The commonest settings first; what is in no group is there all the same."""
    named = [name for some in options.ENGINE_GROUPS.values() for name in some.split()]
    assert len(set(named)) == len(named)
    assert set(named) < set(options.ENGINE_HELP)
    parser = argparse.ArgumentParser()
    options.add_engine_options(parser)
    text = parser.format_help()
    places = [
        text.index(f"\n  --{name.replace('_', '-')}")
        for name in ("max_model_len", "speculative_config", "max_queue")
    ]
    assert places == sorted(places)
    assert places[-1] < text.index("rarely needed") < text.index("\n  --kernels")
