"""Messages between a front end (or its supervisor) and an engine core's process, encoded as msgpack."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import msgspec

from slipstream.config import EngineArgs
from slipstream.engine.process.operation_messages import KnowAdapters, OperationNews, Question
from slipstream.messages.beams import BeamsOutput, BeamsRequest
from slipstream.messages.outputs import EngineOutput, TokenOutput
from slipstream.messages.requests import EngineRequest
from slipstream.messages.start import Failed, Phase, Started
from slipstream.messages.stats import EngineStats
from slipstream.messages.texts import TextsRequest, VectorOutput
from slipstream.messages.weights import FIRST_VERSION
from slipstream.params.lora_request import LoRARequest


class Start(msgspec.Struct, tag=True):
    args: EngineArgs
    low_priority: bool = False  # see `WakeUp`


class Add(msgspec.Struct, tag=True):
    requests: list[EngineRequest]


class AddTexts(msgspec.Struct, tag=True):
    request: TextsRequest


class AddBeams(msgspec.Struct, tag=True):
    request: BeamsRequest


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class GetStats(msgspec.Struct, tag=True):
    pass


class Attach(msgspec.Struct, tag=True):
    """Connect to a new client, which listens at `path` and may send requests from now on. `number`
    identifies it in later messages."""

    number: int
    path: str


class Detach(msgspec.Struct, tag=True):
    """Cancel all requests of a client that has gone. Unknown numbers are ignored."""

    number: int


class Stop(msgspec.Struct, tag=True):
    pass


ToChild: TypeAlias = (
    Start
    | Add
    | AddTexts
    | AddBeams
    | Abort
    | GetStats
    | Question
    | KnowAdapters
    | Attach
    | Detach
    | Stop
)


class Ready(Started, tag=True):
    """The core accepts requests. Sent after the start and after each wake-up."""

    adapters: list[LoRARequest] = msgspec.field(default_factory=list)
    processes: tuple[int, ...] = ()  # ids of the engine's process and of its ranks on this host
    weight_version: str = FIRST_VERSION
    used_versions: list[str] = msgspec.field(default_factory=lambda: [FIRST_VERSION])


class Outputs(msgspec.Struct, tag=True, gc=False):
    """The outputs of a step. Most are a single token: these come first, as two arrays."""

    request_ids: list[str] = []
    token_ids: bytes = b""  # int32 in native byte order, one for each of `request_ids`
    tokens: list[TokenOutput] = []
    vectors: list[VectorOutput] = []
    beams: list[BeamsOutput] = []

    @classmethod
    def of(cls, outputs: list[EngineOutput]) -> Outputs:
        request_ids: list[str] = []
        token_ids: list[int] = []
        tokens: list[TokenOutput] = []
        vectors: list[VectorOutput] = []
        beams = [output for output in outputs if isinstance(output, BeamsOutput)]
        # requests with a single token: their further outputs must come after it
        told: set[str] = set()
        for output in outputs:
            if not isinstance(output, TokenOutput):
                if isinstance(output, VectorOutput):
                    vectors.append(output)
                continue
            request_id, ids, reason, _, cached, logprobs, of_prompt, _, drafted, *_ = output
            if (
                drafted
                or reason
                or cached
                or logprobs
                or of_prompt
                or len(ids) != 1
                or request_id in told
            ):
                told.add(request_id)
                tokens.append(output)
            else:
                request_ids.append(request_id)
                token_ids.append(ids[0])
        return cls(request_ids, array("i", token_ids).tobytes(), tokens, vectors, beams)


class Rejected(msgspec.Struct, tag=True):
    """The scheduler refused a request; all requests of its Add are refused with it."""

    request_ids: list[str]
    error: str
    message: str
    field: str | None


class Stats(msgspec.Struct, tag=True):
    stats: EngineStats
    asked: bool  # True: the answer to a GetStats; False: a heartbeat


ToParent: TypeAlias = Phase | Ready | Outputs | Rejected | Stats | OperationNews | Failed
