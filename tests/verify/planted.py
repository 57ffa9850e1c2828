"""Faults that a server of SmolLM2 may have, and servers with one of them."""

import contextlib
import dataclasses
import json

import httpx
import torch

from slipstream.compress.dense import load_dense
from slipstream.config import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from slipstream.hub import resolve_model
from slipstream.verify.served import Served
from tests.server.conftest import serving


def write_checkpoints(folder, model_name="smollm2"):
    """Write a model's weights in bfloat16, and checkpoints whose weights were changed."""
    model = load_dense(resolve_model(model_name), dtype=torch.float32, device=torch.device("cpu"))
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


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault: what is served, how, behind which proxy, and words of its cause."""

    words: str
    served: str = "base"
    against: str = "base"
    settings: dict = dataclasses.field(default_factory=dict)
    template: str | None = None
    change: object = None


FAULTS = {
    "wrong template": Fault("another chat template", template=OTHER_TEMPLATE),
    "4 bits as 16": Fault("rounding as of 4 bits", served="rounded"),
    "top_k ignored": Fault("the field is ignored", change=without_top_k),
    "dropped layer": Fault("a missing layer", served="dropped"),
    "stale version": Fault("other weights: a version", served="stale"),
    "8-bit cache": Fault(
        "8 bits in weights, activations or cache", settings={"kv_cache_dtype": "int8"}
    ),
    "cut context": Fault("the context is cut", change=cut),
    "temperature x 1.1": Fault("another temperature", change=hotter),
    "adapter missing": Fault("an adapter", against="adapted"),
    "wrong BOS": Fault("a BOS more or less", template="bos"),
    "random weights": Fault("other weights: another version", settings={"load_format": "dummy"}),
}


@contextlib.contextmanager
def served_with(folder, fault):
    """A server with a fault, as a client sees it. None: without."""
    fault = fault or Fault("")
    args = EngineArgs(
        model=str(folder / fault.served),
        dtype="bfloat16",
        device="cpu",
        max_model_len=2048,
        kv_cache_bytes=2**28,
        **fault.settings,
    )
    with serving(start=lambda: AsyncLLM.start(args), served_model_names=("m",)) as server:
        if fault.template is not None:
            own = server.engine.tokenizer.chat_template
            text = BEGUN + own if fault.template == "bos" else fault.template
            server.engine.tokenizer.set_chat_template(text)
        transport = None if fault.change is None else Between(fault.change)
        yield Served.connect(server.url, model="m", transport=transport)
