"""The messages between an executor and its ranks: msgpack over a Unix socket pair to each rank. No torch.

To a rank: Begin, what a step needs, questions, UnloadAdapter, SwapExperts, End. From rank 0: Meeting, Phase. From the first
rank of each stage: RankExpertLoad, and Reply; to LoadAdapter from all ranks. From the first of the last stage: Result. From
any rank: Started, RankFailed. Where requests are dealt out, all ranks answer GetExpertLoad and ReportExpertLoad, and all of the
last stage send a Result of each step. Answers come in the order of the questions; results in that of the launches.
"""

from __future__ import annotations

import contextlib
import os
import socket
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import msgspec

from slipstream.config import DeviceInfo, EngineArgs
from slipstream.start_messages import Failed, Phase, Started
from slipstream.stats import AdapterStats, ExpertTokens
from slipstream.types import (
    Extra,
    LoRARequest,
    PooledVector,
    PromptLogprobs,
    RequestFailure,
    SampledLogprobs,
    SamplerState,
    StepPlan,
    StepResult,
    StepTime,
    TextsPlan,
    TextVectors,
)


class Begin(msgspec.Struct, tag=True):
    """`port`: where rank 0 listens for the others. Rank 0 gets 0, chooses a port and reports it (Meeting). `device`: the CPU of
    all ranks, whose type and kernels were chosen once. None: a GPU each, which the ranks look up. `mixed`: the first of two
    ranks has the CPU, the second a GPU."""

    args: EngineArgs
    rank: int
    size: int
    port: int
    device: DeviceInfo | None = None
    host: str = "127.0.0.1"  # where rank 0 is
    mixed: bool = False


class Refused(msgspec.Struct, tag=True):
    """To a rank of another host that can't take part."""

    why: str


class Launch(msgspec.Struct, tag=True):
    """A plan; where requests are dealt out, the rank's part of it."""

    plan: StepPlan


class LaunchTexts(msgspec.Struct, tag=True):
    plan: TextsPlan


class Constrain(msgspec.Struct, tag=True):
    """Of the newest launch: a `TokenMask`."""

    positions: tuple[int, ...]
    bits: bytes


class Forget(msgspec.Struct, tag=True):
    pass


class WarmUp(msgspec.Struct, tag=True):
    pass


class CaptureNext(msgspec.Struct, tag=True):
    pass


class GetExpertLoad(msgspec.Struct, tag=True):
    pass


class ReportExpertLoad(msgspec.Struct, tag=True):
    """The first rank of each stage sends a RankExpertLoad; all ranks do where requests are dealt out. Nobody waits for it."""


class SwapExperts(msgspec.Struct, tag=True):
    """Before the next launch: a layer, and two places whose experts exchange them. All ranks get it."""

    swaps: list[tuple[int, int, int]]


class LoadAdapter(msgspec.Struct, tag=True):
    """Ranks have room for it."""

    request: LoRARequest


class GetProposed(msgspec.Struct, tag=True):
    """Of the newest launch, which awaits a mask: `Launched.proposed`."""


class UnloadAdapter(msgspec.Struct, tag=True):
    adapter_id: int


class GetAdapterStats(msgspec.Struct, tag=True):
    pass


class End(msgspec.Struct, tag=True):
    pass


OfStep: TypeAlias = Launch | LaunchTexts | Constrain | Forget
OfExperts: TypeAlias = ReportExpertLoad | SwapExperts
Question: TypeAlias = (
    WarmUp | CaptureNext | GetExpertLoad | LoadAdapter | GetAdapterStats | GetProposed
)
ToRank: TypeAlias = Begin | Refused | OfStep | OfExperts | Question | UnloadAdapter | End


class Join(msgspec.Struct, tag=True):
    """The first words of a rank on another host. `local_rank`: which of its host's GPUs it takes. `world_size`: of how
    many ranks it is to be one, if it was told."""

    version: str
    local_rank: int
    world_size: int | None


class Meeting(msgspec.Struct, tag=True):
    port: int


class Result(msgspec.Struct, tag=True):
    """A `StepResult`, its extras by kind."""

    step_id: int
    token_ids: list[int]
    num_tokens: list[int] | None
    sampled: list[SampledLogprobs] = []
    prompts: list[PromptLogprobs] = []
    vectors: list[PooledVector] = []
    texts: list[TextVectors] = []
    states: list[SamplerState] = []
    failures: list[RequestFailure] = []
    is_cold: bool = False

    @classmethod
    def of(cls, step: StepResult) -> Result:
        def those(kind: type) -> list[Any]:
            return [extra for extra in step.extras if isinstance(extra, kind)]

        of_tokens = those(SampledLogprobs), those(PromptLogprobs)
        kinds = (
            *of_tokens,
            those(PooledVector),
            those(TextVectors),
            those(SamplerState),
            those(RequestFailure),
        )
        num_tokens = None if step.num_tokens is None else list(step.num_tokens)
        return cls(step.step_id, list(step.token_ids), num_tokens, *kinds, is_cold=step.is_cold)

    @property
    def step(self) -> StepResult:
        of_tokens: tuple[Extra, ...] = (*self.sampled, *self.prompts)
        extras = (*of_tokens, *self.vectors, *self.texts, *self.states, *self.failures)
        return StepResult(self.step_id, self.token_ids, self.num_tokens, extras, self.is_cold)


class RankExpertLoad(msgspec.Struct, tag=True):
    """Of the layers whose experts can change ranks, and the bytes of an expert's weights."""

    load: ExpertTokens
    expert_bytes: int


class Reply(msgspec.Struct, tag=True):
    """To WarmUp (the step times), CaptureNext (whether there was one), GetExpertLoad, LoadAdapter (the version of its files, or
    why it can't be), GetAdapterStats and GetProposed."""

    done: bool = True
    expert_load: ExpertTokens = ()
    step_times: tuple[StepTime, ...] = ()
    version: str = ""
    refused: Failed | None = None
    adapters: AdapterStats | None = None
    proposed: tuple[int, ...] = ()


class RankFailed(Failed, tag=True):
    """`of_peer`: it failed since another rank was gone."""

    of_peer: bool = False


FromRank: TypeAlias = (
    Join | Meeting | Phase | Started | Result | Reply | RankExpertLoad | RankFailed
)


class Link:
    """An end of the socket between the executor and a rank."""

    def __init__(self, connection: Connection, takes: Any) -> None:
        self._connection = connection
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(takes)

    def fileno(self) -> int:
        return self._connection.fileno()

    def encode(self, message: ToRank | FromRank) -> bytes:
        return self._encoder.encode(message)

    def send(self, message: ToRank | FromRank) -> None:
        """OSError if the other end is closed."""
        self.send_bytes(self.encode(message))

    def send_bytes(self, encoded: bytes) -> None:
        self._connection.send_bytes(encoded)

    def receive(self) -> Any:
        """Wait for a message. EOFError or OSError when the other end is closed."""
        return self._decoder.decode(self._connection.recv_bytes())

    def cut(self) -> None:
        """End the connection, whatever reads from it."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
