"""The scheduler's state of one request. Stored state is minimal; properties derive the rest."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from slipstream.messages.requests import EngineRequest, ids_of

if TYPE_CHECKING:
    from slipstream.core.cache.cache_value import Run
    from slipstream.core.cache.kv_cache_manager import KVCacheManager
    from slipstream.core.cache.sessions import Session
    from slipstream.core.participants.base import Participant
    from slipstream.core.queue import Account
    from slipstream.messages.steps import TableUpdate


class Status(Enum):
    FORKING = auto()  # waits for the parent whose prompt it shares
    WAITING = auto()
    LOADING = auto()  # waits for blocks from a tier
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A request in the scheduler.

    Tokens [0, num_computed_tokens) are in the cache once the steps in flight are done.

    `num_pending` counts tokens that steps in flight sample. They are included in `num_tokens`, but
    only the device knows their values. A step with drafts counts as many as it has drafts:
    until its result is known nothing else of the request can be computed.

    `blocks[g]` is the block table of group g. All tables have the same length, except the table of an encoder's text.
    The first `num_passed[g]` entries of a window group are the null block, because these blocks were released.

    `kv` is the cache manager of the request's rank. With several ranks, one is chosen each time the
    request is admitted without blocks, unless its guide keeps it where it was.
    """

    spec: EngineRequest
    order: tuple[int, float, int]  # (priority, arrival, number); the smallest goes first
    root_key: bytes
    num_groups: InitVar[int]
    held: bool = False  # not scheduled until it is released
    request_id: str = field(init=False)
    kv: KVCacheManager = field(init=False)
    token_ids: array[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    # prompt tokens, and answer tokens that another engine has already generated
    num_given: int = field(init=False)
    end: int = field(init=False)  # maximum number of tokens
    stops: frozenset[int] = field(init=False)
    status: Status = Status.WAITING
    account: Account | None = None  # its owner's account, set by `WaitingQueue.enter`
    participants: tuple[Participant, ...] = ()  # participants whose hooks are called for it
    guide: Participant | None = None  # the participant that decides about each of its steps
    num_computed_tokens: int = 0
    num_pending: int = 0
    blocks: list[list[int]] = field(init=False)
    num_passed: list[int] = field(init=False)
    block_keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0  # number of leading blocks offered to the prefix cache
    looked_up: bool = False  # whether the tiers below the device were searched
    needs_copy: bool = False  # whether the next blocks to write may be shared
    # weights changed since it began: its blocks belong to no one set of weights, so none is shared
    is_mixed: bool = False
    # end of the positions at which it decodes without a check; see `KVCacheManager.lease`
    lease: int = 0
    # tokens proposed after the last one; the next step verifies them
    drafts: tuple[int, ...] = ()
    in_worker: bool = False
    mirostat_mu: float | None = None  # state of its Mirostat sampler after the last known token
    # requests that wait for its prompt to share it
    forks: list[Request] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_peer_tokens: int = 0  # tokens computed for it by another engine
    # tokens with cached keys and values, if other kinds of cache allowed fewer
    num_hit_tokens: int = 0
    # slots of other cache kinds that the worker doesn't know yet
    slot_updates: tuple[TableUpdate, ...] = ()
    session: Session | None = None  # its session, for eviction by value; None under LRU
    run: Run | None = None  # the run of its last cached block
    # sessions of earlier runs, which it shares with others
    shared: list[Session] = field(default_factory=list)
    num_shared: int = 0  # blocks of these runs
    passed: Run | None = None  # the run of blocks that it no longer needs
    num_preemptions: int = 0
    num_overtaken: int = 0  # number of requests admitted before it while it did not fit

    def __post_init__(self, num_groups: int) -> None:
        spec = self.spec
        self.request_id = spec.request_id
        self.token_ids = ids_of(spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids.extend(spec.answer_token_ids)
        self.num_given = len(self.token_ids)
        self.end = self.num_prompt_tokens + (1 if spec.pooled else spec.max_tokens)
        self.stops = frozenset((*spec.eos_token_ids, *spec.sampling.stop_token_ids))
        self.blocks = [[] for _ in range(num_groups)]
        self.num_passed = [0] * num_groups

    def key_at(self, position: int, block_size: int) -> bytes | None:
        """Key of the block that ends at `position`; None if no block ends there, if its tokens are
        not yet known, or if weights have changed since."""
        index, rest = divmod(position, block_size)
        return (
            None
            if self.is_mixed or rest or not 0 < index <= len(self.block_keys)
            else self.block_keys[index - 1]
        )

    def draft(self, tokens: Sequence[int]) -> None:
        """Set `tokens` as drafts after the last token.

        The next step computes them together with that token and samples at each position. `update`
        accepts the drafts before the first wrong one, and the token sampled there.
        """
        self.drafts = tuple(tokens)
        if self.lease:
            self.kv.drop_lease(self)

    def most_at(self, computed: int) -> int:
        """Maximum number of tokens that one step may compute from position `computed` on.

        This limits an answer that began on another engine and must be reproducible (greedy, or with
        a seed). It continues as if computed here: first the prompt, then token by token. The reason
        is that prefill and decode kernels round differently.
        """
        spec = self.spec
        if not spec.answer_token_ids or (
            spec.sampling.temperature > 0 and spec.sampling.seed is None
        ):
            return self.end
        if computed < self.num_prompt_tokens:
            return self.num_prompt_tokens - computed
        return 1 if computed < self.num_given else self.end

    @property
    def calls(self) -> bool:
        """Whether the answer calls a tool, or if its tokens don't show that, whether it may call one."""
        hints = self.spec.cache_hints
        answer = self.token_ids[self.num_prompt_tokens :]
        return hints.calls and (
            not hints.call_tokens or not frozenset(hints.call_tokens).isdisjoint(answer)
        )

    @property
    def num_tokens(self) -> int:
        """Number of known and pending tokens."""
        return len(self.token_ids) + self.num_pending

    @property
    def holds_blocks(self) -> bool:
        return bool(self.blocks[0])
