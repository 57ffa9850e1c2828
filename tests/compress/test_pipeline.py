"""Recipes that prune and distil, from the command to a checkpoint, and on after an interruption."""

from __future__ import annotations

import json
import random

import pytest
import torch

from slipstream.cli.main import main
from slipstream.compress.pipeline import layer_recipe, reshape, reshaped_spec
from slipstream.compress.recipe import parse, read_recipe
from slipstream.errors import ConfigError
from slipstream.spec.description import read_spec
from tests.model.harness import load, run
from tests.support import tiny_models

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A few words again and again, in sections that go to one side or the other."""
    rng = random.Random(0)
    words = ["hello", "the", "in", "er", "ou", "hell", "other", "letter"]
    sections = [" ".join(rng.choices(words, k=900)) for _ in range(12)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(sections))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_models.write_with_tokenizer(folder, num_hidden_layers=4, initializer_range=0.1)
    return folder


def steps(text, *more, **distil):
    chosen = {
        "num_steps": 4,
        "batch_size": 4,
        "micro_batch": 2,
        "dtype": "float32",
        "eval_every": 2,
        "save_every": 2,
        "text": text,
        "num_windows": 8,
        "context": 32,
        "held_out": 2,
        "max_tokens": 4,
        **distil,
    }
    calibrate = {"text": text, "num_windows": 4, "context": 32}
    return [
        {"calibrate": calibrate},
        {"prune": {"size": 0.6, "channels": 0.5}},
        {"distill": chosen},
        *more,
    ]


@pytest.mark.parametrize(
    ("more", "changes"),
    [
        ([], {"top_k": 16}),
        ([{"quantize": {"bits": 4, "group_size": 32}}], {"num_answers": 0, "state_weight": 0.1}),
    ],
    ids=["alone", "then rounded"],
)
def test_a_recipe_prunes_and_distils(more, changes, model, text, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(steps(text, *more, **changes)))  # JSON is YAML
    out = tmp_path / "out"
    words = [
        "compress",
        str(model),
        "--recipe",
        str(recipe),
        "--out",
        str(out),
        "--no-report",
        "--json",
        "--device",
        "cpu",
    ]
    assert main([*words, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes_after"] == planned["bytes_after"] < told["bytes_before"] / 1.5
    small = read_spec(out)
    assert small.spec == reshaped_spec(read_spec(model), parse(steps(text)))
    assert (small.quantization is None) == (not more)
    assert run(load(out), [5, 6, 7]).isfinite().all()
    assert json.loads((out / "slipstream-recipe.json").read_text())[1]["prune"]["size"] == 0.6
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []


def test_an_interrupted_recipe_goes_on(model, text, tmp_path, monkeypatch):
    source, recipe, told = read_spec(model), parse(steps(text)), []

    def stop(phase, done, total):
        told.append((phase, done, total))
        if phase.startswith("distilling") and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reshape(source, recipe, tmp_path / "out", device=CPU, progress=stop)
    first = len(told)
    made = reshape(
        source, recipe, tmp_path / "out", device=CPU, progress=lambda *said: told.append(said)
    )
    assert told[0] == ("pruning", 0, 0)
    assert ("pruning", 1, 1) in told
    assert not any(phase == "pruning" for phase, _, _ in told[first:])
    steps_done = [
        (done, total) for phase, done, total in told[first:] if phase.startswith("distilling")
    ]
    assert steps_done == [(3, 4), (4, 4)]
    history = json.loads((made.path / "distill.json").read_text())["history"]
    assert [r["step"] for r in history] == [0, 1, 2, 3]
    assert history[-1]["held_out_kl"] is not None
    with pytest.raises(ConfigError, match="interrupted run with another recipe"):
        reshape(source, parse(steps(text, seed=1)), tmp_path / "out", device=CPU)


def test_the_teacher_answers(model, tmp_path):
    rows = [{"prompt": f"hello {i}?", "completion": "the"} for i in range(12)]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = steps(str(path), num_windows=0, num_answers=2, rationale_weight=0.5, held_out=0)
    asked[0] = {"prune": {"drop_layers": [1]}}
    del asked[1]
    made = reshape(read_spec(model), parse(asked), tmp_path / "out", device=CPU)
    lines = (tmp_path / ".out.reshaped" / "examples.jsonl").read_text().splitlines()
    assert [json.loads(line)["weight"] for line in lines] == [1.0, 1.0, 0.5, 0.5]
    assert made.spec.num_layers == 3


def test_short_conversations_are_learnt_from_and_too_few_refused(model, text, tmp_path):
    """The last window of each document counts, however short. More windows than there are is an
    error, not a shorter run."""
    asked = steps(text, num_windows=10_000)
    with pytest.raises(ConfigError, match="windows, not 10000") as caught:
        reshape(read_spec(model), parse(asked), tmp_path / "out", device=CPU)
    assert caught.value.field == "num_windows"
    count = int(str(caught.value).split(" gives ")[1].split()[0])
    made = reshape(
        read_spec(model), parse(steps(text, num_windows=count)), tmp_path / "all", device=CPU
    )
    rows = (made.path.parent / "examples.jsonl").read_text().splitlines()
    lengths = [len(json.loads(row)["token_ids"]) for row in rows]
    assert len(lengths) == count
    assert max(lengths) == 32 > min(lengths) > 1


def test_a_draft_is_a_third(tmp_path):
    folder = tmp_path / "model"
    tiny_models.write(folder, num_hidden_layers=12)
    source, recipe = read_spec(folder), read_recipe("draft:1/3")
    small = reshaped_spec(source, recipe)
    assert small.num_parameters / source.spec.num_parameters == pytest.approx(1 / 3, abs=0.04)
    assert layer_recipe(recipe) is None
    with pytest.raises(ConfigError, match="neither a file nor a preset"):
        read_recipe("draft:3/2")


@pytest.mark.parametrize(
    ("steps", "match"),
    [
        (["quantize", {"prune": {"heads": 0.5}}], "come before"),
        (["distill"], "nothing to recover"),
        (["distill", {"prune": {"heads": 0.5}}], "comes after prune"),
    ],
)
def test_the_order_of_steps(steps, match):
    with pytest.raises(ConfigError, match=match):
        layer_recipe(parse(steps))
