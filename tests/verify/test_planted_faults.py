"""Ten faults that a server of SmolLM2 may have, found by `slipstream verify`, and servers without one."""

import dataclasses
import json

import httpx
import pytest
import torch

from slipstream.compress.dense import load_dense
from slipstream.config import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from slipstream.hub import resolve_model
from slipstream.verify.checks import Plan, Verification
from slipstream.verify.reference import Reference
from slipstream.verify.report import document
from slipstream.verify.served import Served
from tests.server.conftest import serving

pytestmark = pytest.mark.slow

NAME = "smollm2"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """The model's weights in bfloat16, and checkpoints whose weights were changed."""
    folder = tmp_path_factory.mktemp("dense")
    model = load_dense(resolve_model(NAME), dtype=torch.float32, device=torch.device("cpu"))
    model.write(folder / "base", dtype=torch.bfloat16)

    def write(name, change, **config):
        values = {key: value.clone() for key, value in model.parameters.items()}
        change(values)
        spec = dataclasses.replace(
            model.spec, layers=model.spec.layers[: config.get("num_hidden_layers")]
        )
        changed = dataclasses.replace(
            model, parameters=values, spec=spec, config={**model.config, **config}
        )
        changed.write(folder / name, dtype=torch.bfloat16)

    products = [
        key for key, value in model.parameters.items() if value.dim() == 2 and "embed" not in key
    ]
    last = len(model.spec.layers) - 1

    def drop(values):
        for key in [key for key in values if key.startswith(f"layers.{last}.")]:
            del values[key]

    def drift(values):
        chance = torch.Generator().manual_seed(0)
        for key in products:
            noise = torch.randn(values[key].shape, generator=chance)
            values[key] += 0.04 * values[key].std() * noise

    def adapt(values):
        chance = torch.Generator().manual_seed(1)
        for key in products:
            rows, inner = values[key].shape
            a, b = (torch.randn(n, 8, generator=chance) for n in (rows, inner))
            values[key] += 0.02 * values[key].std() * a @ b.T

    def to_four_bits(values):
        for key in products:
            groups = values[key].view(len(values[key]), -1, 64)
            step = groups.abs().amax(-1, keepdim=True) / 7
            values[key] = ((groups / step).round() * step).view_as(values[key])

    write("rounded", to_four_bits)
    write("dropped", drop, num_hidden_layers=last)
    write("stale", drift)
    write("adapted", adapt)
    return folder


class Between(httpx.HTTPTransport):
    """A proxy that changes requests."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def handle_request(self, request):
        if request.method == "POST":
            body = json.loads(request.content)
            self.change(body)
            headers = {k: v for k, v in request.headers.items() if k != "content-length"}
            request = httpx.Request(request.method, request.url, headers=headers, json=body)
        return super().handle_request(request)


def hotter(body):
    body["temperature"] *= 1.1


def cut(body):
    for message in body["messages"]:
        message["content"] = message["content"][-400:]


def without_top_k(body):
    body["top_k"] = -1


OTHER_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
BEGUN = "<|endoftext|>"

FAULTS = {  # name: (served checkpoint, its settings, the proxy's change, reference, words of the cause)
    "wrong template": ("base", {"template": OTHER_TEMPLATE}, None, "base", "another chat template"),
    "4 bits as 16": ("rounded", {}, None, "base", "rounding as of 4 bits"),
    "top_k ignored": ("base", {}, without_top_k, "base", "the field is ignored"),
    "dropped layer": ("dropped", {}, None, "base", "other weights"),
    "stale version": ("stale", {}, None, "base", "slightly other weights: a version"),
    "8-bit cache": ("base", {"kv_cache_dtype": "int8"}, None, "base", " bits"),
    "cut context": ("base", {}, cut, "base", "the context is cut"),
    "hotter": ("base", {}, hotter, "base", "another temperature"),
    "adapter missing": ("base", {}, None, "adapted", "an adapter"),
    "wrong BOS": ("base", {"template": "bos"}, None, "base", "a BOS more or less"),
}


@pytest.fixture(scope="module")
def references(dense):
    made = {}

    def get(name):
        if name not in made:
            args = EngineArgs(model=str(dense / name), dtype="bfloat16", device="cpu")
            made[name] = Reference.load(args, context=1600)
        return made[name]

    return get


def found_in(dense, references, served, settings, change, against):
    template = settings.get("template")
    engine = {key: value for key, value in settings.items() if key != "template"}
    args = EngineArgs(
        model=str(dense / served),
        dtype="bfloat16",
        device="cpu",
        max_model_len=2048,
        kv_cache_bytes=2**28,
        **engine,
    )
    with serving(start=lambda: AsyncLLM.start(args), served_model_names=("m",)) as server:
        if template is not None:
            own = server.engine.tokenizer.chat_template
            text = BEGUN + own if template == "bos" else template
            server.engine.tokenizer.set_chat_template(text)
        transport = None if change is None else Between(change)
        connected = Served.connect(server.url, model="m", transport=transport)
        plan = Plan(rounds=4, max_kl=0.001)
        findings = Verification(connected, references(against), plan).run()
    print(*findings, sep="\n")
    return findings


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_its_cause(dense, references, name):
    served, settings, change, against, words = FAULTS[name]
    findings = found_in(dense, references, served, settings, change, against)
    assert any(words in f.why for f in findings if f.outcome == "fault")
    assert document({}, findings)["verdict"] == "faulty"


def test_a_server_without_a_fault_is_sound(dense, references):
    findings = found_in(dense, references, "base", {}, None, "base")
    assert not [f for f in findings if f.outcome == "fault"]
