"""Executor over worker processes, one per rank of a split model. No torch.

    ProcessExecutor ── plan, encoded once ──> rank 0, rank 1, …   (each a `LocalExecutor` with its part)
                    <─────── results ──────── rank 0

Where requests are distributed over ranks (`request_owners.py`), each rank gets its part of a plan
and sends its part of the result.

1. A rank is a child process connected by a Unix socket pair, so nothing has to be removed from the
   file system. Encoding a plan of 256 decodes takes 19 µs, and sending its 4 KB to a rank takes 8
   µs. Shared memory would only save these 8 µs, while the device works anyway.
2. A launch is a message and returns at once, so the next step is planned while the ranks compute.
3. When a rank ends, all are killed at once. A waiting or later call raises EngineError with the
   first rank's reason. The executor is then unusable.
4. A rank ends when its standard input closes. So none outlives this process, however it ends.
5. A thread reads the ranks' messages as they arrive (`rank_mailbox.py`). So no rank blocks on a
   full socket while this process waits to send to it, and a question does not delay results.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TypeAlias, TypeVar

from slipstream.base.deaths import KILLED
from slipstream.config import (
    DeviceInfo,
    EngineArgs,
    EngineConfig,
    num_ranks,
    resolve,
    split_setting,
    stage_args,
)
from slipstream.config.engine_folder import SERVE_NAME, is_engine_folder, read_engine_folder
from slipstream.config.forms import ContextParallel, DealtRequests, HostAndGpu, ParallelConfig
from slipstream.costs.estimate import resident_weights_bytes, this_device
from slipstream.costs.fit import check_weights_fit
from slipstream.costs.hardware import available_cores, gpus
from slipstream.costs.memory import MemoryLedger
from slipstream.errors import (
    AdapterError,
    ConfigError,
    EngineError,
    EngineKilledError,
    OutOfMemoryError,
    RequestError,
    SlipstreamError,
    install_command,
)
from slipstream.hub import machine_folder, resolve_model
from slipstream.messages.start import Phase, Started
from slipstream.messages.stats import AdapterStats, ExpertBalance, ExpertTokens
from slipstream.messages.steps import Plan, StepPlan, StepResult, StepTime, TokenMask
from slipstream.messages.texts import TextsPlan
from slipstream.messages.weight_ops import WHOLE, JoinWeightGroup, WeightsOp, undoing
from slipstream.messages.weights import GivenPiece, WeightState
from slipstream.params.lora_request import LoRARequest
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.spec.parallel import uneven_parts
from slipstream.worker.adapter_places import AdapterPlaces
from slipstream.worker.base import Executor, Launched
from slipstream.worker.device import detect
from slipstream.worker.experts.balance import ExpertBalancer
from slipstream.worker.ranks.block_store import RankBlockStore
from slipstream.worker.ranks.children import Rank, RankProcesses, spawn
from slipstream.worker.ranks.fork_server import ForkServer
from slipstream.worker.ranks.joining import accept_ranks, parse_address
from slipstream.worker.ranks.mailbox import REASONS_S, Mailbox, total_load
from slipstream.worker.ranks.messages import (
    BeginRank,
    CaptureNext,
    ChangeRankWeights,
    Constrain,
    End,
    Forget,
    GetAdapterStats,
    GetExpertLoad,
    GetProposed,
    Launch,
    LaunchTexts,
    LoadRankAdapter,
    Meeting,
    Question,
    Reply,
    ReportExpertLoad,
    ReportTiers,
    SwapExperts,
    ToRank,
    UnloadRankAdapter,
    WarmUp,
)
from slipstream.worker.ranks.request_owners import (
    RequestOwners,
    joined_drafts,
    joined_result,
    masks_of_parts,
)

_logger = logging.getLogger("slipstream.engine")

T = TypeVar("T")

OfRank: TypeAlias = tuple[EngineArgs, DeviceInfo | None]
"""(a rank's settings, its device: the CPU, or None for a GPU that the rank detects itself)."""

END_S = 5.0
"""Seconds in which ranks must end after the End message."""


@dataclass(slots=True)
class RemoteStep:
    """Handle of a step that was sent to the ranks."""

    executor: ProcessExecutor
    plan: Plan
    awaits_mask: bool
    parts: Sequence[StepPlan] = ()  # by rank of a stage, if ranks compute different requests
    is_done = False

    def proposed(self) -> Sequence[int]:
        return self.executor.proposed(self)

    def result(self) -> StepResult:
        return self.executor.result_of(self)


class ProcessExecutor(Executor):
    """Executor of a split model.

    `ledgers` has each rank's memory ledger. `ledger` is that of the rank with the most weights.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        progress: Callable[[str], None] = lambda phase: None,
        forks: ForkServer | None = None,
    ) -> None:
        """Start the ranks, and load the model. Raises the errors of `LocalExecutor.build`.

        `progress` is called as each phase begins. Ranks are forks of `forks`; None: of a process
        that ends with this executor.
        """
        progress("model")
        # once, not by all ranks at the same time
        path = resolve_model(args.model, download_dir=args.download_dir)
        self.description = read_spec(path).taking_media(args.max_images)
        self._parts, self._parallel = _check(args, self.description)
        self._ranks: list[Rank] = []
        self._dead: SlipstreamError | None = None
        # all ranks must get all messages in the same order
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._grammars: set[str] = set()  # requests that sample with a grammar
        # adapters that every rank has in its host memory
        self._adapters: AdapterPlaces | None = None
        self._balancer: ExpertBalancer | None = None  # for experts that are distributed over ranks
        self.weight_state = WeightState()
        self._group = RankProcesses()
        self._finalizer = weakref.finalize(self, self._group.kill)
        size, own = num_ranks(args), args.local_ranks or num_ranks(args)
        if args.rank_address is not None:
            progress("ranks")
        joined = (
            [] if args.rank_address is None else accept_ranks(args.rank_address, size, size - own)
        )
        parent = forks or ForkServer.start()
        self._own_forks = parent if forks is None else None
        for number in range(own):
            self._ranks.append(spawn(number, parent))
            self._group.add(self._ranks[-1])
        self._ranks += [Rank(own + i, None, link, at) for i, (link, _, at) in enumerate(joined)]
        self._host = (
            "127.0.0.1" if args.rank_address is None else parse_address(args.rank_address)[0]
        )
        stage = self._parallel.stage
        self._owners = RequestOwners(stage.size) if isinstance(stage, DealtRequests) else None
        self._mail = Mailbox(self._ranks, 1 if self._owners is None else self._owners.num_ranks)
        self.processes = tuple(process.pid for process in self._group.all)
        self._group.watch()
        try:
            self._start(args, progress)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, args: EngineArgs, progress: Callable[[str], None]) -> None:
        size, mixed = len(self._ranks), isinstance(self._parallel, HostAndGpu)

        def begin(rank: int, port: int) -> BeginRank:
            own, device = self._parts[rank]
            return BeginRank(own, rank, size, port, device, self._host, mixed)

        self._send(self._ranks[0], begin(0, 0))
        started: dict[int, Started] = {}
        while len(started) < size:
            rank, message = self._await(self._mail.next_of_start)
            if isinstance(message, Meeting):
                for other in self._ranks[1:]:
                    self._send(other, begin(other.number, message.port))
            elif isinstance(message, Phase):
                progress(message.name)
            else:
                started[rank.number] = message
        first, last = started[0], started[size - self._parallel.stage.size]
        self.ledgers: tuple[MemoryLedger, ...] = tuple(started[i].ledger for i in range(size))
        largest = (
            last.ledger if mixed else max(self.ledgers, key=lambda ledger: ledger.weights_bytes)
        )
        self.ledger = largest
        self.phases = first.phases
        self.tiles = first.tiles
        self.canary = last.canary
        config = resolve(args, self.description, last.device if mixed else first.device)
        self.config = config.with_most_drafts(last.most_drafts).with_memory_limits(
            self.ledger.num_blocks - 1, self.ledger.block_bytes, self.ledger.num_slots
        )
        if config.lora is not None:
            self._adapters = AdapterPlaces(config.lora.max_cpu_loras)
            for request in config.lora.requests:  # the ranks have these from their start
                self.load_adapter(request, tuple)
        if config.cache.has_tiers:
            self._broadcast(ReportTiers(keys=True))
            found = {n: self._await(partial(self._mail.next_tiers, n)) for n in range(size)}
            groups = 1 if self._owners is None else self._owners.num_ranks
            self.stores = [
                RankBlockStore(
                    partial(self._send_group, group, groups),
                    self._mail.next_tiers,
                    self._await,
                    {n: found[n] for n in range(group, size, groups)},
                )
                for group in range(groups)
            ]
        stage = config.parallel.stage
        if stage.share(0).experts and config.lora is None:  # an adapter may change the router
            self._balancer = ExpertBalancer(self.description.spec, stage.size)
        for number, ledger in enumerate(self.ledgers):
            _logger.info(
                "rank %d: weights %.2f GiB, KV cache %.2f GiB of %s",
                *(number, ledger.weights_bytes / 2**30, ledger.kv_bytes / 2**30, ledger.device),
            )

    # --- The executor's calls -----------------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> RemoteStep:
        self._balance_experts()
        self._mail.expect(plan.step_id)
        if isinstance(plan, TextsPlan):
            self._broadcast(LaunchTexts(plan))
            return RemoteStep(self, plan, awaits_mask=False)
        if self._owners is None:
            self._broadcast(Launch(plan))
            return RemoteStep(self, plan, awaits_mask=self._has_grammar(plan))
        parts = self._owners.parts(plan)
        self._send_each([Launch(part) for part in parts])
        return RemoteStep(self, plan, self._has_grammar(plan), parts)

    def constrain(self, step: Launched, mask: TokenMask) -> None:
        assert isinstance(step, RemoteStep)
        if not step.parts:
            self._broadcast(Constrain(mask.positions, bytes(mask.bits), mask.which))
        else:
            assert isinstance(step.plan, StepPlan)
            masks = masks_of_parts(step.parts, step.plan, mask)
            self._send_each([Constrain(own.positions, bytes(own.bits), own.which) for own in masks])
        step.awaits_mask = False

    def proposed(self, step: RemoteStep) -> Sequence[int]:
        """Drafts of `step`, the newest one. Each rank of the last stage proposes with the whole
        draft model: the same as all, or for its own requests."""
        if not step.parts:
            return max(self._ask(GetProposed()), key=lambda answer: answer.rank).proposed
        assert isinstance(step.plan, StepPlan)
        answers = self._ask(GetProposed(), len(self._ranks))
        answers.sort(key=lambda answer: answer.rank)
        last = answers[-len(step.parts) :]  # in a pipeline, those of the last stage
        return joined_drafts(step.parts, step.plan, [answer.proposed for answer in last])

    def max_in_flight(self, plan: Plan) -> int:
        return 1 + self.config.scheduling.pipeline_steps

    def forget(self) -> None:
        self._grammars.clear()
        if self._owners is not None:
            self._owners.forget()
        self._mail.expect(None)
        if self._dead is None:
            with contextlib.suppress(EngineError):  # the step's own error must be raised
                self._broadcast(Forget())

    def warm_up(self) -> Sequence[StepTime]:
        times = self._ask(WarmUp())[0].step_times
        if self._owners is None:
            return times
        ranks = self._owners.num_ranks  # each rank has run this many
        return [
            StepTime(ranks * time.num_seqs, ranks * time.num_tokens, time.seconds) for time in times
        ]

    def capture_next(self) -> bool:
        """Capture the next size of step. It is called while idle, so it also detects a dead rank."""
        if self.config.device.enforce_eager:
            self._raise_if_dead()
            return False
        return any(answer.done for answer in self._ask(CaptureNext()))

    def expert_load(self) -> ExpertTokens:
        is_apart = self._owners is not None or isinstance(self._parallel, ContextParallel)
        answers = self._ask(GetExpertLoad(), len(self._ranks) if is_apart else None)
        return total_load(answer.expert_load for answer in answers)

    def expert_balance(self) -> ExpertBalance | None:
        return None if self._balancer is None else self._balancer.stats

    def load_adapter(self, request: LoRARequest, keep: Callable[[], Collection[int]]) -> str:
        """Load an adapter; every rank reads its part.

        The ranks get messages only for an adapter that they don't have, and for the one to evict.
        All ranks refuse for the same reasons, except for files that one of them can't read. In that
        case no rank keeps the adapter.
        """
        if self._adapters is None:
            raise AdapterError("adapters are off; start with enable_lora", field="enable_lora")
        if (known := self._adapters.use(request)) is not None:
            return known
        if (victim := self._adapters.giving_way(keep)) is not None:
            self.unload_adapter(victim)
        answers = self._ask(LoadRankAdapter(request), len(self._ranks))
        refusals = [answer.refused for answer in answers if answer.refused is not None]
        if refusals:
            if len(refusals) < len(answers):
                self.unload_adapter(request.id)
            raise refusals[0].as_error
        # hosts have separate copies of the files
        version = ",".join(sorted({answer.version for answer in answers}))
        self._adapters.add(request, version)
        return version

    def change_weights(self, op: WeightsOp | GivenPiece) -> dict[str, str] | None:
        """Perform an operation on every rank. If one refuses, it is undone on the others."""
        assert not isinstance(op, GivenPiece), "the ranks are other processes"
        count = len(self._ranks)
        if isinstance(op, JoinWeightGroup) and op.rank_offset + count > op.world_size:
            message = f"world_size {op.world_size} has no place for {count} ranks from {op.rank_offset} on"
            raise RequestError(message, field="world_size")
        if isinstance(op, WHOLE) and self._balancer and (swaps := self._balancer.home()):
            self._broadcast(SwapExperts(swaps))  # restores the experts' original places
        answers = self._ask(ChangeRankWeights(op), count)
        refusals = [answer.refused for answer in answers if answer.refused is not None]
        if refusals:
            if len(refusals) < count:
                for undo in undoing(op):
                    self._ask(ChangeRankWeights(undo), count)
            raise refusals[0].as_error
        if all(answer.checksums is None for answer in answers):
            return None
        return {name: x for own in answers for name, x in (own.checksums or {}).items()}

    def unload_adapter(self, adapter_id: int) -> None:
        if self._adapters is not None:
            self._adapters.forget(adapter_id)
            self._broadcast(UnloadRankAdapter(adapter_id))

    def adapter_stats(self) -> AdapterStats | None:
        return None if self._adapters is None else self._ask(GetAdapterStats())[0].adapters

    @property
    def release_unused(self) -> Callable[[], None] | None:
        return None  # the ranks hold the memory

    @property
    def keeps_no_weights(self) -> str | None:
        return "level 1 keeps weights in this process, but the ranks' weights are in their own processes"

    def sleep(self, level: int) -> Callable[[], Executor] | None:
        assert level == 2, "the ranks' weights are in their processes"
        self.shutdown()
        return None

    def shutdown(self) -> None:
        """End the ranks, and wait until they have ended."""
        self._dead = self._dead or EngineError("the ranks were shut down")
        # In a thread, because a rank that hangs reads nothing and would block us.
        sending = threading.Thread(target=_send_end, args=(self._ranks,), daemon=True)
        sending.start()
        self._group.wait(END_S)
        self._finalizer()
        self._group.wait(END_S)
        self._mail.last_words()  # the reader has finished, so the links can be closed
        sending.join(END_S)
        for rank in self._ranks:
            rank.link.cut()
        # otherwise it could send to a link that another engine has opened since under the same
        # number
        sending.join()
        for rank in self._ranks:
            if rank.process is not None:
                rank.process.stdin.close()
            rank.link.close()
        if self._own_forks is not None:
            self._own_forks.close()

    def result_of(self, step: RemoteStep) -> StepResult:
        """Wait for a step's result."""
        results = self._await(lambda: self._mail.results_of(step.plan.step_id))
        if not step.parts:
            return results[0]
        assert isinstance(step.plan, StepPlan)
        return joined_result(step.parts, step.plan, results)

    # --- Messages -----------------------------------------------------------------------------------------------------

    def _has_grammar(self, plan: StepPlan) -> bool:
        """True if some request samples with a grammar in this step."""
        self._grammars.difference_update(plan.released)
        self._grammars.update(r.request_id for r in plan.new if r.sampling.is_masked)
        self._grammars.difference_update(plan.unmasked)
        return bool(self._grammars) and any(
            s.num_sampled and s.request_id in self._grammars for s in plan.scheduled
        )

    def _balance_experts(self) -> None:
        """Move experts between two steps.

        The ranks are asked for their load at intervals. Answers that have arrived since are acted
        on. All ranks get the same swaps between the same launches.
        """
        if (balancer := self._balancer) is None:
            return
        each, waiting = self._parallel.stage.size, self._mail.expert_loads
        for stage in range(self._parallel.num_stages):
            own = (
                [*range(stage * each, (stage + 1) * each)]
                if self._owners is not None
                else [stage * each]
            )
            if all(rank in waiting for rank in own):
                came = [waiting.pop(rank) for rank in own]
                if swaps := balancer.follow(total_load(c.load for c in came), came[0].expert_bytes):
                    self._broadcast(SwapExperts(swaps))
        if balancer.step():
            self._broadcast(ReportExpertLoad())

    def _broadcast(self, message: ToRank) -> None:
        """Send a message to all ranks."""
        self._send_each([message])

    def _send_group(self, group: int, groups: int, message: ToRank) -> None:
        """Send a message to the ranks of all stages that have the same requests."""
        self._send_each([message if i == group else None for i in range(groups)])

    def _send_each(self, messages: Sequence[ToRank | None]) -> None:
        """Send each rank of a stage its own message, if it has one, or all ranks the same one.

        All stages get the same.
        """
        self._raise_if_dead()
        encode = self._ranks[0].link.encode
        encoded = [None if message is None else encode(message) for message in messages]
        try:
            with self._sending:
                for rank in self._ranks:
                    if (own := encoded[rank.number % len(encoded)]) is not None:
                        rank.link.send_bytes(own)
        except OSError:
            self._die()
        except BaseException:
            # Ctrl-C: only some ranks may have the message, and their sums would not match
            self._dead = EngineError(
                "the ranks were interrupted while a step was sent to them; start the engine again"
            )
            self._group.kill()
            raise

    def _send(self, rank: Rank, message: ToRank) -> None:
        try:
            rank.link.send(message)
        except OSError:
            self._die()

    def _ask(self, question: Question, count: int | None = None) -> list[Reply]:
        """Ask a question. Returns `count` answers; None: one per stage."""
        with self._asking:
            self._broadcast(question)
            return [
                self._await(self._mail.next_answer)
                for _ in range(count or self._parallel.num_stages)
            ]

    def _await(self, find: Callable[[], T | None]) -> T:
        """Wait until `find` returns a value from the messages.

        If a rank has ended, raise its error, or EngineError.
        """
        self._raise_if_dead()
        found = self._mail.wait_for(find)
        if found is None:
            self._die()
        return found

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise self._dead
        if self._mail.is_over or any(process.returncode is not None for process in self._group.all):
            # a thread waits for each process
            self._die()

    def _die(self) -> NoReturn:
        """Stop all ranks, because one has ended or is about to, and raise the reason."""
        self._group.wait(REASONS_S)
        self._group.kill()
        for rank in self._ranks:
            if rank.process is None:
                rank.link.cut()  # the rank ends when it notices that
        failures = sorted(self._mail.last_words(), key=lambda failed: failed.of_peer)
        gone = self._group.describe_first(but=self._mail.bereft)
        gone = gone or next(
            (f"rank {rank.number} at {rank.at} is gone" for rank in self._mail.gone if rank.at), ""
        )
        if failures and not (failures[0].of_peer and gone):
            self._dead = failures[0].as_error
        else:
            kind = EngineKilledError if gone.endswith(KILLED) else EngineError
            self._dead = kind(f"{gone or 'the ranks ended'}, and the others with it")
        raise self._dead


def settled(args: EngineArgs) -> EngineArgs:
    """Resolve `cpu_layers` "auto" to a number of layers; None if all fit on the GPU.

    It is resolved only once, because a filled GPU would give another number.
    """
    description = read_spec(resolve_model(args.model, download_dir=args.download_dir)).taking_media(
        args.max_images
    )
    how = resolve(args, description, this_device(args.device)).parallel
    return replace(args, cpu_layers=how.on_host if isinstance(how, HostAndGpu) else None)


def _check(args: EngineArgs, description: ModelDescription) -> tuple[list[OfRank], ParallelConfig]:
    """Check the settings and this machine's devices before a process is started.

    Returns (each rank's settings and its CPU, None for a GPU; how the ranks share the model).
    ConfigError if the settings are wrong or there are too few devices.
    """
    size, info = num_ranks(args), this_device(args.device)
    config = resolve(args, description, info)
    if find_spec("torch") is None:
        message = f"{args.model}: several ranks need torch to sum up their parts; {install_command('torch')}"
        raise ConfigError(message, field=split_setting(args))
    check_weights_fit(config, description)
    if isinstance(config.parallel, HostAndGpu):
        return _beside_a_gpu(args, description, config), config.parallel
    check_devices(args, info)
    for line in uneven_parts(description.spec, config.parallel.shard(0)):
        _logger.info("%s", line)
    cpu = None if info.is_cuda else detect("cpu", machine_folder(), num_threads=args.num_threads)
    return [(args, cpu)] * size, config.parallel


def check_devices(args: EngineArgs, info: DeviceInfo) -> None:
    """Raise ConfigError if this machine lacks a device for each of its ranks."""
    field, own = split_setting(args), args.local_ranks or num_ranks(args)
    have, what = (len(gpus()), "GPU") if info.is_cuda else (available_cores(), "core")
    if own > have:
        remedy, path = "lower it", Path(args.model).expanduser()
        if is_engine_folder(path) and read_engine_folder(path).settings.get(field) == getattr(
            args, field
        ):
            remedy = f"lower it in {path / SERVE_NAME}, where it is set"
        raise ConfigError(
            f"{field}: {own} ranks need a {what} each, and there are {have}; {remedy}", field=field
        )


def _beside_a_gpu(
    args: EngineArgs, description: ModelDescription, config: EngineConfig
) -> list[OfRank]:
    """Settings of the host CPU's stage and of the GPU's stage, for `_check`.

    One core is left for the process that feeds the GPU.
    """
    cpu = detect("cpu", machine_folder(), num_threads=args.num_threads)
    on_cpu, on_gpu = stage_args(args, config, args.num_threads or max(1, cpu.num_threads - 1))
    own = resolve(on_cpu, description, cpu)
    if (need := resident_weights_bytes(own, description, own.parallel.shard(0))) > cpu.free_bytes:
        layers, free = config.parallel.stages[0], cpu.free_bytes / 2**30
        raise OutOfMemoryError(
            f"cpu_layers: {layers} layers take {need / 2**30:.1f} GiB, and {free:.1f} GiB of the host's memory are free; lower "
            "it, or take quantization='int4'",
            field="cpu_layers",
        )
    return [(on_cpu, cpu), (on_gpu, None)]


def _send_end(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.link.send(End())
