"""Plugin of pytest: stands in for what vLLM's HTTP tests import of vLLM, and starts `slipstream serve` where they start theirs.

The modules of `data["real"]` are vLLM's own files, since tests read answers with them. Every other name of the package is a
stand-in that does nothing: a test that calls one is a test of vLLM's own classes, and is set aside."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import json
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import marks
import pytest
from marks import GIVEN, aside

STOOD_FOR = ("vllm", "lm_eval", "mteb", "pybase64")


class Answer:
    """An answer's JSON as attributes. A field of `required` that isn't there fails the test."""

    required: tuple[str, ...] = ()

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self.__dict__.update({name: attributes(value) for name, value in fields.items()})

    def model_dump(self, exclude: Any = ()) -> dict[str, Any]:
        return {name: value for name, value in self._fields.items() if name not in exclude}

    @classmethod
    def model_validate(cls, value: Any) -> Answer:
        assert isinstance(value, dict), value
        missing = [name for name in cls.required if name not in value]
        assert not missing, f"no {missing} in {list(value)}"
        return cls(**value)

    @classmethod
    def model_validate_json(cls, text: str) -> Answer:
        return cls.model_validate(json.loads(text))


def attributes(value: Any) -> Any:
    if isinstance(value, dict):
        return Answer(**value)
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [attributes(item) for item in value]
    return value


class Platform:
    is_cpu = staticmethod(lambda: True)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: False


def model_path(name: str) -> str:
    for kind, parts in GIVEN["data"]["models"].items():
        if any(part in name for part in parts):
            return str(GIVEN["models"][kind])
    return str(GIVEN["models"]["text"])


def tokenizer(name: str = "", tokenizer_name: str = "", **_: Any) -> Any:
    from transformers import AutoTokenizer

    path = Path(model_path(tokenizer_name or name))
    if path.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return AutoTokenizer.from_pretrained(path)


class ModelConfig:
    def __init__(self, model: str, **_: Any) -> None:
        self.model = model

    def get_vocab_size(self) -> int:
        return len(tokenizer(self.model))


def answer_of(name: str, required: list[str]) -> type[Answer]:
    return type(name, (Answer,), {"required": tuple(required)})


def base64_module() -> dict[str, Any]:
    import base64

    return vars(base64)


def given(module: str) -> dict[str, Any]:
    """Stand-ins for the names of `module` that tests really use."""
    import logging

    own: dict[str, dict[str, Any]] = {
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.tokenizers": {"get_tokenizer": tokenizer},
        "vllm.config": {"ModelConfig": ModelConfig},
        "vllm.logger": {"init_logger": logging.getLogger},
    }
    if module == "pybase64":
        return base64_module()
    answers = GIVEN["data"]["answers"].get(module, {})
    return own.get(module, {}) | {name: answer_of(name, fields) for name, fields in answers.items()}


class Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = MagicMock(name=name)
        if name.endswith(("Request", "Serving", "Params", "Parser", "Renderer")):

            def refuse(*_: Any, **__: Any) -> None:
                aside(2, "vLLM's own classes, without HTTP")

            value = type(name, (), {"__init__": refuse, "model_validate": staticmethod(refuse)})
        elif name[:1].isupper():
            value = type(name, (MagicMock,), {})
        setattr(self, name, value)
        return value


class Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in ("tests.utils", "tests.conftest"):
            return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]
        if name.split(".")[0] not in STOOD_FOR:
            return None
        if name in GIVEN["data"]["real"]:
            file = Path(GIVEN["copy"]) / (name.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        made = Module(spec.name)
        if spec.name == "tests.utils":
            made.__dict__.update(
                VLLM_PATH=Path(GIVEN["copy"]), ROCM_EXTRA_ARGS=[], ROCM_ENV_OVERRIDES={}
            )
            names = ("RemoteOpenAIServer", "RemoteVLLMServer", "RemoteOpenAIServerCustom")
            made.__dict__.update(dict.fromkeys(names, Server))
            made.__dict__["multi_gpu_only"] = made.__dict__["requires_fp8"] = lambda *_, **__: (
                lambda test: test
            )
        elif spec.name == "tests.conftest":
            made.__dict__.update(HfRunner=Reference)
        else:
            made.__dict__.update(given(spec.name))
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        starts = any("server" in name or "client" in name for name in item.fixturenames)
        if not starts and "RemoteOpenAIServer" not in inspect.getsource(item.function):
            item.add_marker(pytest.mark.skip("ASIDE 2: vLLM's own classes, without HTTP"))


def translated(asked: list[str]) -> list[str]:
    """The suite's options without those that ours doesn't need. An option that only theirs has
    sets the test aside."""
    data, made = GIVEN["data"], list[str]()
    words = iter(word.replace("_", "-") if word.startswith("--") else word for word in asked)
    waiting = 0
    for word in words:
        if word.startswith("--"):
            name, has_value = word.partition("=")[::2]
            if name in data["options"]:
                aside(1, f"the option {name}: {data['options'][name]}")
            waiting = data["left out"].get(name, 0)
            if name in data["left out"]:
                waiting = 0 if has_value else waiting
                continue
        elif waiting:
            waiting -= 1
            continue
        made.append(word)
    return made


def names_of_adapters(asked: list[str]) -> list[str]:
    if "--lora-modules" not in asked:
        return []
    names = []
    for word in asked[asked.index("--lora-modules") + 1 :]:
        if word.startswith("--"):
            break
        names.append(json.loads(word)["name"] if word[0] == "{" else word.partition("=")[0])
    return names


def ended_by_length(request: httpx.Request) -> httpx.Request:
    """Tells our model to ignore its end of text: theirs ends no short text by itself."""
    if request.url.path != "/v1/completions" or request.method != "POST":
        return request
    body = json.loads(request.content)
    if {"ignore_eos", "stop_token_ids", "structured_outputs"} & set(body) or body.get("max_tokens", 16) >= 200:  # fmt: skip
        return request
    headers = [(k, v) for k, v in request.headers.raw if k.lower() != b"content-length"]
    content = json.dumps({**body, "ignore_eos": True}).encode()
    more = {"headers": headers, "content": content, "extensions": request.extensions}
    return httpx.Request(request.method, request.url, **more)  # type: ignore[arg-type]


class Sync(httpx.HTTPTransport):
    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return super().handle_request(ended_by_length(request))


class Async(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await super().handle_async_request(ended_by_length(request))


class Server:
    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, vllm_serve_args: list[str], *, env_dict: Any = None, **_: Any) -> None:  # fmt: skip
        asked = [str(word) for word in vllm_serve_args]
        path = model_path(model)
        names = [model, *names_of_adapters(asked)]
        options = translated(asked)
        if key := (env_dict or {}).get("VLLM_API_KEY"):
            options += ["--api-key", key]
        if "--served-model-name" not in options:
            options += [word for name in names for word in ("--served-model-name", name)]
        if "--max-model-len" in options:
            at = options.index("--max-model-len") + 1
            options[at] = str(min(int(options[at]), 8192 if path.endswith(".gguf") else 512))
        options += self.template(path, options)
        self.port = marks.free_port()
        log = Path(GIVEN["copy"]) / f"server-{self.port}.log"
        command = [sys.executable, "-m", "slipstream", "serve", path, *options]
        command += ["--port", str(self.port), "--num-threads", "1"]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        marks.wait_for(self.process, self.url_for("health"), log)

    def template(self, path: str, options: list[str]) -> list[str]:
        """A template that knows tools for the text model, as theirs does, but where tests count a prompt's tokens."""
        if "--chat-template" in options or path == GIVEN["models"]["vision"]:
            return []
        if path == GIVEN["models"]["text"]:
            if any("test_tokenization" in frame.filename for frame in inspect.stack()):
                return []
            return ["--chat-template", str(Path(GIVEN["copy"]) / GIVEN["data"]["template"])]
        plain = Path(GIVEN["copy"]) / "plain.jinja"
        plain.write_text(
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        )
        return ["--chat-template", str(plain)]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    @property
    def url_root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts)])

    def get_client(self, **options: Any) -> Any:
        import openai

        client = httpx.Client(transport=Sync(), timeout=600)
        return openai.OpenAI(**self.of_client(options), http_client=client)

    def get_async_client(self, **options: Any) -> Any:
        import openai

        client = httpx.AsyncClient(transport=Async(), timeout=600)
        return openai.AsyncOpenAI(**self.of_client(options), http_client=client)

    def of_client(self, options: dict[str, Any]) -> dict[str, Any]:
        own = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return {**own, **options}

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(**self.of_client(options) | {"base_url": self.url_root})

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**self.of_client(options) | {"base_url": self.url_root})


class Reference:
    """transformers on the same files, in float32."""

    def __init__(self, name: str, *, is_cross_encoder: bool = False, auto_cls: Any = None, **_: Any) -> None:  # fmt: skip
        import transformers

        path = model_path(name)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
        self.scores = is_cross_encoder
        kind: Any = transformers.AutoModel
        if is_cross_encoder or auto_cls is not None:
            kind = transformers.AutoModelForSequenceClassification
        self.model = kind.from_pretrained(path).float().eval()

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, *texts: str) -> Any:
        import torch

        with torch.no_grad():
            return self.model(**self.tokenizer(*texts, return_tensors="pt", truncation=True, max_length=512))  # fmt: skip

    def encode(self, texts: list[str], **_: Any) -> list[list[float]]:
        import torch

        means = [self.run(text).last_hidden_state[0].mean(0) for text in texts]
        return [torch.nn.functional.normalize(mean, dim=0).tolist() for mean in means]

    def predict(self, pairs: list[tuple[str, str]], **_: Any) -> Any:
        import torch

        if self.scores:
            return torch.tensor([float(torch.sigmoid(self.run(*pair).logits[0, 0])) for pair in pairs])  # fmt: skip
        both = [self.encode(list(pair)) for pair in pairs]
        return torch.tensor([sum(a * b for a, b in zip(*two, strict=True)) for two in both])


@pytest.fixture(scope="session")
def hf_runner() -> type[Reference]:
    return Reference


@pytest.fixture(scope="session")
def qwen3_lora_files() -> str:
    return "unused"


@pytest.fixture(scope="session")
def vllm_runner() -> None:
    aside(2, "vLLM's own classes, without HTTP")


@pytest.fixture(scope="session")
def local_asset_server() -> None:
    aside(5, "pictures of vLLM's own store")
