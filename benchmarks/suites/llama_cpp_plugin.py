"""Plugin of pytest: where llama.cpp's tests start their server, `slipstream serve` starts with what the options mean.

What llama.cpp sets for a whole server and ours takes of each request (temperature, seed, length) is given with each request.
Servers are kept for the next test that starts one alike."""

from __future__ import annotations

import atexit
import inspect
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import marks
import pytest
import requests
from marks import GIVEN, aside

FETCHER = sys.modules["wget"] = types.ModuleType("wget")  # what they fetch their models with
FETCHER.download = lambda *_, **__: aside(5, "a model or an adapter of theirs")  # type: ignore[attr-defined]
KEPT: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], int]] = {}
"""Options → (its server, port), the one used last at the end."""
MOST_KEPT = 3
NATIVE = ("/completion", "/completions", "/infill")
GENERATING = (*NATIVE, "/v1/completions", "/chat/completions", "/v1/chat/completions")
TEST: dict[str, bool] = {}
"""Properties of the running test: `sized` (it looks at the sizes of the context), `tools`, `lists`
(it reads the names of models)."""


@pytest.fixture(autouse=True)
def _looked_at(request: pytest.FixtureRequest) -> None:
    name = request.function.__name__
    text = inspect.getsource(request.function)
    TEST["sized"] = name in GIVEN["data"]["sized"]
    TEST["tools"], TEST["lists"] = "tool" in text, bool(re.search(r'"(/v1)?/models"', text))


def pytest_sessionstart() -> None:
    import utils

    taken, streamed = utils.ServerProcess.make_request, utils.ServerProcess.make_stream_request

    def make_request(self: Any, method: str, path: str, data: Any = None, *a: Any, **k: Any) -> Any:
        answer = taken(self, method, allowed(path), filled(self, path, data), *a, **k)
        answer.headers = requests.structures.CaseInsensitiveDict(answer.headers)
        return answer

    def make_stream_request(self: Any, method: str, path: str, data: Any = None, *a: Any, **k: Any) -> Any:  # fmt: skip
        return streamed(self, method, allowed(path), filled(self, path, data), *a, **k)

    utils.ServerProcess.start, utils.ServerProcess.stop = start, lambda self: None
    utils.ServerProcess.make_request = make_request
    utils.ServerProcess.make_stream_request = make_stream_request
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    matches, free = utils.match_regex, set(GIVEN["data"]["texts"])

    def match_regex(regex: str, text: str) -> bool:
        return bool(text) if regex in free else bool(matches(regex, text))

    utils.match_regex = match_regex
    get = requests.get

    def get_or_draw(url: str, *a: Any, **k: Any) -> Any:
        """Draws the two pictures that the suite takes from a hub."""
        if not url.endswith(("/11_truck.png", "/91_cat.png")):
            return get(url, *a, **k)
        import io

        from PIL import Image

        answer, file = requests.Response(), io.BytesIO()
        Image.effect_noise((64, 64), 40.0 if "cat" in url else 90.0).convert("RGB").save(file, "PNG")  # fmt: skip
        answer.status_code, answer._content = 200, file.getvalue()
        return answer

    requests.get = get_or_draw


def allowed(path: str) -> str:
    for route, why in GIVEN["data"]["routes"].items():
        if path.startswith(route):
            aside(1, f"the route {route}: {why}")
    return path


def filled(server: Any, path: str, data: Any) -> Any:
    if isinstance(data, dict) and path == "/apply-template" and server.reasoning:
        return {"chat_template_kwargs": {"enable_thinking": server.reasoning != "off"}, **data}
    if not isinstance(data, dict) or path not in GENERATING:
        return data
    defaults: dict[str, Any] = {"temperature": server.temperature, "seed": server.seed}
    if server.n_predict and server.n_predict > 0:
        defaults["n_predict" if path in NATIVE else "max_tokens"] = server.n_predict
    if not any(data.get(k) for k in ("grammar", "json_schema", "response_format", "tools")):
        defaults["ignore_eos"] = True  # the tests' own model ends no answer by itself
    return {**defaults, **data}


def model_of(server: Any) -> str:
    models, file, repo = GIVEN["models"], server.model_hf_file or "", server.model_hf_repo or ""
    if "bert" in file or "jina" in file:
        return str(models["embedding"])
    if server.model_draft:
        aside(5, "a draft model of their model's vocabulary")
    kind = "vision" if "gemma" in repo else "infill" if "infill" in repo else "text"
    return str(models[kind])


def options(server: Any) -> list[str]:
    data, models = GIVEN["data"], GIVEN["models"]
    for name, flag in data["options"].items():
        value = getattr(server, name)
        if value not in (None, False) and (value != 0 or name == "sleep_idle_seconds"):
            aside(1, f"the option {flag}")
    if server.model_hf_repo is None and server.model_file is None:  # their router
        named = {"tinygemma3-GGUF:Q8_0": "vision", "test-model-stories260K:F32": "text"}
        named["test-model-stories260K-infill:F32"] = "infill"
        made = [f"ggml-org/{name}={models[kind]}" for name, kind in named.items()]
        made += ["--models-memory", "6GiB", "--kv-cache-bytes", "200MiB", "--max-model-len", "1024"]
    else:
        model = model_of(server)
        context, slots = server.n_ctx or 2048, server.n_slots or 4
        if not TEST["sized"]:
            context, slots = 8192, 4  # so that most tests share one server
        length = context if server.kv_unified else context // slots
        most = 8192 if model.endswith(".gguf") else 512
        made = [model, "--max-num-seqs", str(slots), "--block-size", "16"]
        made += ["--max-model-len", str(max(64, min(length, most)))]
        names = [] if TEST["lists"] else data["names"]  # llama.cpp answers to any name
        for name in (server.model_alias or "tinyllama-2", *names):
            made += ["--served-model-name", name]
        made += template(server, model)
        if server.reasoning_format == "none":
            made += ["--reasoning-parser", "none"]
        if server.seed and server.seed > 0:
            made += ["--seed", str(server.seed)]
    if server.api_key:
        made += ["--api-key", server.api_key]
    return [*made, "--cors-origin", server.cors_origins or "*", "--num-threads", "1"]


def template(server: Any, model: str) -> list[str]:
    folder = Path(GIVEN["copy"]) / "models" / "templates"
    if server.chat_template_file:
        return ["--chat-template", str(folder / os.path.basename(server.chat_template_file))]
    named = GIVEN["data"]["templates"]
    text = server.chat_template
    if text in named:
        text = named[text]
        if text is None:
            return []
        if text.startswith("aside:"):
            aside(1, text.removeprefix("aside:"))
    elif not text and TEST["tools"] and model == GIVEN["models"]["text"]:
        return ["--chat-template", str(folder / "Qwen-Qwen2.5-7B-Instruct.jinja")]
    if not text:
        return []
    path = Path(GIVEN["copy"]) / f"template-{abs(hash(text))}.jinja"
    path.write_text(text, encoding="utf-8")
    return ["--chat-template", str(path)]


def start(self: Any, timeout_seconds: int = 120) -> None:
    asked = tuple(options(self))
    if asked not in KEPT:
        while len(KEPT) >= MOST_KEPT:
            end(next(iter(KEPT)))
        port = marks.free_port()
        log = Path(GIVEN["copy"]) / f"server-{port}.log"
        command = [sys.executable, "-m", "slipstream", "serve", *asked, "--port", str(port)]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        marks.wait_for(process, f"http://127.0.0.1:{port}/health", log)
        KEPT[asked] = (process, port)
    KEPT[asked] = KEPT.pop(asked)
    self.process, self.server_port = KEPT[asked]
    self.ready = True


def end(asked: tuple[str, ...]) -> None:
    process, _ = KEPT.pop(asked)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@atexit.register
def _end_all() -> None:
    for asked in list(KEPT):
        end(asked)
