"""The real `AsyncLLM`, but what its process says is said by the test, step by step."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec

from slipstream import AsyncLLM
from slipstream.config import EngineArgs, resolve
from slipstream.engine.model_files import load_tokenizer
from slipstream.engine.process.core_messages import Abort, Add, Outputs, ToParent
from slipstream.engine.process.core_start import CoreSource
from slipstream.engine.requests.processor import InputProcessor
from slipstream.hub import machine_folder
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.outputs import TokenOutput
from slipstream.messages.stats import EngineStats
from slipstream.spec.description import read_spec
from slipstream.worker.device import detect

ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToParent)


class SteppedEngine(AsyncLLM):
    def __init__(self, path):
        args = EngineArgs(model=str(path), dtype="float32", device="cpu", num_threads=1)
        description = read_spec(path)
        super().__init__(
            args, description, load_tokenizer(args, description), CoreSource(connect=None)
        )
        self.config = resolve(args, description, detect("cpu", machine_folder(), num_threads=1))
        self._input = InputProcessor.for_model(
            description, self.config, self.tokenizer, ids=self._ids
        )
        self.keys: list[str] = []  # of engine requests, as they came
        self.aborted: list[str] = []
        self._core.link = SimpleNamespace(death=lambda: None, send=self._send, end=self._end)

    @property
    def running(self):
        return self.num_requests

    def _send(self, message):
        if isinstance(message, Add):
            self.keys += [request.request_id for request in message.requests]
        elif isinstance(message, Abort):
            self.aborted += message.request_ids
        return True

    async def _end(self):
        pass

    async def stats(self):
        return EngineStats()

    def step(self, news):
        """`news`: by engine request its new tokens, and whether they are the last."""
        outputs = [
            TokenOutput(key, tuple(tokens), FinishReason.LENGTH if last else None)
            for key, (tokens, last) in news.items()
        ]
        self.core_said(DECODER.decode(ENCODER.encode(Outputs.of(outputs))))
