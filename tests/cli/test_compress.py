"""The folder that `slipstream compress` makes when no `--out` names one."""

from __future__ import annotations

import pytest

from slipstream.cli.compress import default_out
from slipstream.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "recipe", "made"),
    [
        (".", "int8", "models-int8"),
        ("..", "int8", "home-int8"),
        ("smollm2:135m-bf16", "int8", "smollm2-135m-bf16-int8"),
        ("a/tiny.gguf", "draft:1/3", "tiny-draft-1-3"),
        ("org/name", "w4a16-mixed:3.5bpw", "name-w4a16-mixed-3.5bpw"),
        ("m", "r.yml", "m-r"),
        ("m", "r.json", "m-r"),
    ],
)
def test_the_default_folder_is_named_after_model_and_recipe(
    tmp_path, monkeypatch, model, recipe, made
):
    here = tmp_path / "home" / "models"
    here.mkdir(parents=True)
    for name in ("r.yml", "r.json"):
        (here / name).touch()
    monkeypatch.chdir(here)
    assert default_out(model, recipe) == made


@pytest.mark.parametrize("model", ["/", "-m", "./.hidden"])
def test_a_name_that_is_an_option_or_hidden_asks_for_out(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--out DIR") as caught:
        default_out(model, "int8")
    assert caught.value.field == "out"
