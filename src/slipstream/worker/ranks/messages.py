"""Messages between an executor and its ranks: msgpack over one Unix socket pair per rank. No torch.

1. To a rank: Begin, a step's messages, questions, UnloadAdapter, SwapExperts, End.
2. From rank 0: Meeting, Phase.
3. From the first rank of each stage: RankExpertLoad and Reply. To LoadAdapter, all ranks reply.
4. From the first rank of the last stage: RankResult.
5. From any rank: Started, RankTiers, RankFailed.

If ranks compute different requests, all ranks answer GetExpertLoad and ReportExpertLoad, and all
ranks of the last stage send a RankResult of each step. Answers come in the order of the questions, and
results in the order of the launches.
"""

from __future__ import annotations

import contextlib
import os
import socket
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import msgspec

from slipstream.config import DeviceInfo, EngineArgs
from slipstream.messages.logprobs import PromptLogprobs, SampledLogprobs
from slipstream.messages.routed_experts import RoutedExperts
from slipstream.messages.start import Failed, Phase, Started
from slipstream.messages.stats import AdapterStats, ExpertTokens
from slipstream.messages.steps import (
    Extra,
    RequestFailure,
    SamplerState,
    StepPlan,
    StepResult,
    StepTime,
)
from slipstream.messages.texts import PooledVector, TextsPlan, TextVectors
from slipstream.messages.tiers import BlockCopy
from slipstream.messages.weight_ops import WeightsOp
from slipstream.params.lora_request import LoRARequest


class BeginRank(msgspec.Struct, tag=True):
    """Starts a rank.

    `port` is where rank 0 listens for the other ranks. Rank 0 itself gets 0, chooses a port and
    reports it (Meeting). `device`: the CPU of all ranks, whose dtype and kernels are chosen once;
    None: one GPU per rank, which the rank detects itself. `mixed`: the first of two ranks has the
    CPU, the second a GPU.
    """

    args: EngineArgs
    rank: int
    size: int
    port: int
    device: DeviceInfo | None = None
    host: str = "127.0.0.1"  # where rank 0 is
    mixed: bool = False


class RankRefused(msgspec.Struct, tag=True):
    """Refuses a rank of another host."""

    why: str


class Launch(msgspec.Struct, tag=True):
    """Launches a plan, or the rank's part of it if ranks compute different requests."""

    plan: StepPlan


class LaunchTexts(msgspec.Struct, tag=True):
    plan: TextsPlan


class Constrain(msgspec.Struct, tag=True):
    """Carries the `TokenMask` of the newest launch."""

    positions: tuple[int, ...]
    bits: bytes
    which: tuple[int, ...] | None = None


class Forget(msgspec.Struct, tag=True):
    pass


class WarmUp(msgspec.Struct, tag=True):
    pass


class CaptureNext(msgspec.Struct, tag=True):
    pass


class GetExpertLoad(msgspec.Struct, tag=True):
    pass


class ReportExpertLoad(msgspec.Struct, tag=True):
    """Asks for expert load, without waiting for the answer.

    The first rank of each stage sends a RankExpertLoad. Where requests are distributed, all ranks
    do.
    """


class SwapExperts(msgspec.Struct, tag=True):
    """Swaps experts before the next launch. All ranks get it.

    Each entry is (layer, place, place): the experts at the two places change places.
    """

    swaps: list[tuple[int, int, int]]


class LoadRankAdapter(msgspec.Struct, tag=True):
    """Loads an adapter, for which the ranks have room."""

    request: LoRARequest


class ChangeRankWeights(msgspec.Struct, tag=True):
    """Carries out an operation on the weights. All ranks answer."""

    op: WeightsOp


class GetProposed(msgspec.Struct, tag=True):
    """Asks for the drafts (`Launched.proposed`) of the newest launch, which awaits a mask."""


class UnloadRankAdapter(msgspec.Struct, tag=True):
    adapter_id: int


class GetAdapterStats(msgspec.Struct, tag=True):
    pass


class CopyBlocks(msgspec.Struct, tag=True):
    """Starts copies between the tiers. All ranks get them."""

    copies: list[BlockCopy]


class ReportTiers(msgspec.Struct, tag=True):
    """Asks all ranks for a RankTiers, without waiting. With `keys` the answer lists the keys on the
    disk."""

    keys: bool = False


class ClearTiers(msgspec.Struct, tag=True):
    pass


class End(msgspec.Struct, tag=True):
    pass


OfStep: TypeAlias = Launch | LaunchTexts | Constrain | Forget
OfExperts: TypeAlias = ReportExpertLoad | SwapExperts
OfTiers: TypeAlias = CopyBlocks | ReportTiers | ClearTiers
Question: TypeAlias = (
    WarmUp
    | CaptureNext
    | GetExpertLoad
    | LoadRankAdapter
    | ChangeRankWeights
    | GetAdapterStats
    | GetProposed
)
ToRank: TypeAlias = (
    BeginRank | RankRefused | OfStep | OfExperts | OfTiers | Question | UnloadRankAdapter | End
)


class Join(msgspec.Struct, tag=True):
    """First message of a rank on another host.

    `local_rank` is the GPU of its host that it takes. `world_size` is the number of ranks that it
    expects, if it was told one.
    """

    version: str
    local_rank: int
    world_size: int | None


class Meeting(msgspec.Struct, tag=True):
    port: int


class RankResult(msgspec.Struct, tag=True):
    """A `StepResult`, with its extras by kind."""

    step_id: int
    token_ids: list[int]
    num_tokens: list[int] | None
    sampled: list[SampledLogprobs] = []
    prompts: list[PromptLogprobs] = []
    vectors: list[PooledVector] = []
    texts: list[TextVectors] = []
    states: list[SamplerState] = []
    failures: list[RequestFailure] = []
    experts: list[RoutedExperts] = []
    is_cold: bool = False

    @classmethod
    def of(cls, step: StepResult) -> RankResult:
        def those(kind: type) -> list[Any]:
            return [extra for extra in step.extras if isinstance(extra, kind)]

        of_tokens = those(SampledLogprobs), those(PromptLogprobs)
        kinds = (
            *of_tokens,
            those(PooledVector),
            those(TextVectors),
            those(SamplerState),
            those(RequestFailure),
            those(RoutedExperts),
        )
        num_tokens = None if step.num_tokens is None else list(step.num_tokens)
        return cls(step.step_id, list(step.token_ids), num_tokens, *kinds, is_cold=step.is_cold)

    @property
    def step(self) -> StepResult:
        of_tokens: tuple[Extra, ...] = (*self.sampled, *self.prompts)
        of_requests: tuple[Extra, ...] = (*self.vectors, *self.texts, *self.states, *self.failures)
        extras = (*of_tokens, *of_requests, *self.experts)
        return StepResult(self.step_id, self.token_ids, self.num_tokens, extras, self.is_cold)


class RankExpertLoad(msgspec.Struct, tag=True):
    """Reports the load of the experts that can change ranks, and the bytes of one expert's
    weights."""

    load: ExpertTokens
    expert_bytes: int


class RankExchange(msgspec.Struct):
    """Blocks that a rank hands over to other engines."""

    num_bytes: int
    limit_bytes: int
    num_expired: int
    num_evicted: int


class RankTiers(msgspec.Struct, tag=True):
    """Reports on a rank's tiers: the copies that ended since the last report, the tiers' sizes and,
    if asked for, the keys of the files on disk."""

    done: list[tuple[int, bool]]
    sizes: list[int]
    slots: list[int]
    num_bytes: int = 0
    limit_bytes: int = 0
    is_writer: bool = False
    keys: list[bytes] = []
    exchange: RankExchange | None = None


class Reply(msgspec.Struct, tag=True):
    """Answers a question.

    1. WarmUp: `step_times`.
    2. CaptureNext: `done` tells whether there was a size to capture.
    3. GetExpertLoad: `expert_load`.
    4. LoadAdapter: `version` of the adapter's files, or `refused`.
    5. GetAdapterStats: `adapters`.
    6. GetProposed: `proposed`, and their requests.
    7. ChangeRankWeights: `checksums`, or `refused`.
    """

    done: bool = True
    expert_load: ExpertTokens = ()
    step_times: tuple[StepTime, ...] = ()
    version: str = ""
    refused: Failed | None = None
    adapters: AdapterStats | None = None
    proposed: tuple[int, ...] = ()
    rank: int = 0
    checksums: dict[str, str] | None = None  # names begin with the rank


class RankFailed(Failed, tag=True):
    """Reports that the sending rank fails. `of_peer`: because another rank has gone."""

    of_peer: bool = False


FromRank: TypeAlias = (
    Join | Meeting | Phase | Started | RankResult | Reply | RankExpertLoad | RankTiers | RankFailed
)


class RankLink:
    """One end of the socket between the executor and a rank."""

    def __init__(self, connection: Connection, takes: Any) -> None:
        self._connection = connection
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(takes)

    def fileno(self) -> int:
        return self._connection.fileno()

    def encode(self, message: ToRank | FromRank) -> bytes:
        return self._encoder.encode(message)

    def send(self, message: ToRank | FromRank) -> None:
        """Send a message. OSError if the other end is closed."""
        self.send_bytes(self.encode(message))

    def send_bytes(self, encoded: bytes) -> None:
        self._connection.send_bytes(encoded)

    def receive(self) -> Any:
        """Wait for a message. EOFError or OSError if the other end is closed."""
        return self._decoder.decode(self._connection.recv_bytes())

    def cut(self) -> None:
        """Close the connection for all of its readers."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
