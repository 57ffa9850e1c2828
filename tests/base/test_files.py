"""JSON and YAML from strangers: whatever is wrong with them is a ValueError, and soon."""

from __future__ import annotations

import json

import pytest

from slipstream.base.files import parse_json, read_yaml
from slipstream.bench.workload import read_lengths
from slipstream.cli.options import parse_object
from slipstream.compress.recipe import read_recipe, recipe_of
from slipstream.config.engine_folder import ENGINE_NAME, SERVE_NAME, read_engine_folder
from slipstream.errors import CheckpointError, ConfigError, SlipstreamError
from slipstream.evals.tasks import read_questions
from slipstream.fleet.config import read as read_fleet
from slipstream.optimize.traffic import read_trace
from slipstream.simulate.traffic import read_trace as read_planned
from slipstream.spec.pooling import read_pooling
from slipstream.worker.start.canary import CANARY_NAME, read_canary

DEEP = '{"a":' * 5000
TENFOLD = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
"""A kilobyte that stands for 10^12 values."""

WRONG_YAML = {
    "deep": "[" * 800,
    "tenfold": TENFOLD,
    "itself": "a: &a [*a]\n",
    "merged into itself": "a: &a\n  <<: *a\n",
    "date": "a: 2020-13-45\n",
    "long number": "a: " + "1" * 5000,
    "long number with colons": "a: " + "1:" * 100_000 + "1",
    "long fraction with colons": "a: " + "1:" * 500 + "1.5",
    "too long": "a: b\n" * 250_000,
    "no text": b"\xff\xfe\x00",
    "code": "!!python/object/apply:os.system [ls]\n",
    "nul": "a: \0\n",
}


@pytest.fixture(params=WRONG_YAML)
def wrong(request, tmp_path):
    path = tmp_path / "wrong.yaml"
    text = WRONG_YAML[request.param]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_yaml_that_is_none(wrong):
    with pytest.raises(ValueError) as caught:
        read_yaml(wrong)
    assert 0 < len(str(caught.value)) < 500


def test_so_of_recipes_fleets_and_engine_folders(wrong, tmp_path):
    for read in (read_recipe, read_fleet):
        with pytest.raises(ConfigError):
            read(str(wrong))
    machine = {"cpu": "x", "cpu_features": [], "num_cores": 1, "memory_gib": 1}
    data = {
        "format": 1,
        "machine": machine,
        "chosen": {},
        "versions": {},
        "measured": {},
        "graph_sizes": [],
    }
    (tmp_path / ENGINE_NAME).write_text(json.dumps(data))
    assert read_engine_folder(tmp_path).settings == {}
    wrong.rename(tmp_path / SERVE_NAME)
    with pytest.raises(ConfigError):
        read_engine_folder(tmp_path)


def test_yaml_says_the_line(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\nb: [\n")
    with pytest.raises(ValueError, match="line 3, column 1: not YAML"):
        read_yaml(path)


def test_yaml_with_usual_aliases(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: &a {x: 1, y: [2, 3]}\nb: {<<: *a, x: 5}\nc: [*a, *a]\n")
    a = {"x": 1, "y": [2, 3]}
    assert read_yaml(path) == {"a": a, "b": {"x": 5, "y": [2, 3]}, "c": [a, a]}
    path.write_text("")
    assert read_yaml(path) is None


@pytest.mark.parametrize("text", [DEEP, "[" * 5000, "", b"\xff", "1" * 5000])
def test_json_that_is_none(text):
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("x.json", read_lengths),
        ("x.jsonl", read_trace),
        ("x.jsonl", read_planned),
        ("x.jsonl", read_questions),
        (CANARY_NAME, lambda path: read_canary(path.parent, 100)),
        (ENGINE_NAME, lambda path: read_engine_folder(path.parent)),
        ("slipstream-recipe.json", lambda path: recipe_of(path.parent)),
        ("modules.json", lambda path: read_pooling(path.parent, {}, is_encoder=True)),
    ],
)
@pytest.mark.parametrize(
    "text",
    [DEEP, '{"lengths": [[Infinity, 1]]}', '{"machine": [], "format": 1}', "5", "[]", "\ufeff"],
)
def test_files_of_strangers(tmp_path, name, read, text):
    path = tmp_path / name
    path.write_text(text)
    if (name, text) == ("modules.json", "[]"):
        return  # no step is as no file
    with pytest.raises(SlipstreamError):
        read(path)


@pytest.mark.parametrize("folder", ["../outside", "/etc", "a/../../b"])
def test_a_step_of_pooling_lies_in_the_models_folder(tmp_path, folder):
    (tmp_path / "modules.json").write_text(f'[{{"type": "x.Pooling", "path": "{folder}"}}]')
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        read_pooling(tmp_path, {}, is_encoder=True)


def test_an_option_that_is_an_object():
    with pytest.raises(Exception, match="nested too deeply") as caught:
        parse_object(DEEP)
    assert len(str(caught.value)) < 500
