"""`LLM`: offline generation, in this process.

llm = LLM("smollm2")
for answer in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
    print(answer.outputs[0].text)
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import TracebackType
from typing import Any, Self

from slipstream.config import EngineArgs, EngineConfig
from slipstream.engine.engine_core import EngineCore, check_alive
from slipstream.engine.output import OutputProcessor, merge, raise_on_error
from slipstream.engine.pooled import TextsAnswer, as_embeddings, check_dimensions, rank, refuse_classifier, rerank_texts
from slipstream.engine.processor import (
    InputProcessor,
    PreparedRequest,
    default_sampling,
    load_tokenizer,
    log_canary,
)
from slipstream.engine.tokenizer import Tokenizer
from slipstream.errors import RequestError
from slipstream.plan.memory import MemoryLedger
from slipstream.types import (
    CanaryResult,
    EmbeddingOutput,
    EngineOutput,
    EngineStats,
    Prompt,
    RequestOutput,
    RerankResult,
    SamplingParams,
    Vectors,
)

Message = dict[str, Any]


@contextmanager
def no_collections() -> Iterator[None]:
    """Put off Python's search for cycles of garbage, which with torch's million objects stops a step for 50 ms and more, many
    times a second. What a step leaves behind has no cycles."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class LLM:
    """A model ready to generate. The settings are those of `EngineArgs`; `progress` is told each phase of the start.

    Holds the model's memory until `shutdown()` or the end of a `with` block. Not thread-safe; a server wants `AsyncLLM`.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        block_size: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_mixed_tokens: int | None = None,
        gpu_memory_utilization: float | None = None,
        kv_cache_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        enforce_eager: bool = False,
        deterministic: bool = False,
        dense_copies: bool | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        speculative_model: str | None = None,
        num_speculative_tokens: int | None = None,
        download_dir: str | None = None,
        seed: int = 0,
        load_format: str = "auto",
        weights_cache: str = "auto",
        skip_tokenizer_init: bool = False,
        scheduling_policy: str = "inflight",
        batch_window_s: float | None = None,
        max_queue: int | None = None,
        canary: str = "warn",
        kernels: str = "auto",
        tile_table: str = "auto",
        num_threads: int | None = None,
        progress: Callable[[str], None] = lambda phase: None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "progress")}
        args = EngineArgs(**given)
        self._core: EngineCore | None = EngineCore.build(args, progress=progress)
        log_canary(self._core.executor.canary)
        progress("tokenizer")
        self.tokenizer = load_tokenizer(args, self._core.description)
        self._input = InputProcessor.for_model(self._core.description, self._core.config, self.tokenizer)
        self._output = OutputProcessor(self.tokenizer)
        self._turn = threading.Lock()  # who holds it steps the engine

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise RequestError("this LLM was shut down; make a new one")
        return self._core

    @property
    def config(self) -> EngineConfig:
        return self.core.config

    @property
    def ledger(self) -> MemoryLedger:
        return self.core.ledger

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the start."""
        return self.core.executor.phases

    @property
    def canary(self) -> CanaryResult | None:
        """What the checkpoint's canary said at the start; None if there is none or it was not asked."""
        return self.core.executor.canary

    def stats(self) -> EngineStats:
        return self.core.stats(experts=True)

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer: skip_tokenizer_init is set", field="skip_tokenizer_init")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds where none are given: the model's generation_config.json's, where it has some."""
        return default_sampling(self.core.description)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts. One SamplingParams for all, or one for each.

        RequestError, before anything runs, if a prompt or its parameters can't work; it names which. `progress` shows a
        bar on a terminal.
        """
        prompts = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        return self._run(prompts, sampling_params, progress=progress, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them, through the model's chat template."""
        tokenizer = self.get_tokenizer()
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if single else list(messages)
        prompts: list[Prompt] = [
            tokenizer.apply_chat_template(list(c), add_generation_prompt=add_generation_prompt) for c in conversations
        ]
        return self._run(prompts, sampling_params, progress=progress, add_special_tokens=False)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        progress: bool = True,
    ) -> list[EmbeddingOutput]:
        """A vector for each text, pooled and normalised as the model's files say: an encoder's, or the state of a decoder's
        last token. `dimensions`: shorter vectors, from models that were trained to give them. A text that is too long is a
        ContextLengthError, or with `truncate` cut at its end."""
        prompts = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        refuse_classifier(self.core.description)
        check_dimensions(self.core.description, dimensions)
        found: dict[int, list[EmbeddingOutput]] = {}  # by the first one's place

        def take(first: int, vectors: Vectors) -> None:
            found[first] = as_embeddings(vectors, dimensions)

        self._read(prompts, truncate, take, progress=progress)
        return list(chain.from_iterable(found[first] for first in sorted(found)))

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: bool = False,
        progress: bool = True,
    ) -> list[RerankResult]:
        """The documents that answer the query best, best first: by a cross-encoder's scores of (query, document), or by the
        cosine of their embeddings, from −1 to 1, if the model gives embeddings."""
        texts = rerank_texts(self.core.description, query, documents)
        answer = self._read(texts, truncate, lambda first, vectors: None, progress=progress)
        return rank(self.core.description, documents, answer.vectors(), top_n)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, add_special_tokens: bool = True
    ) -> Iterator[RequestOutput]:
        """One request, its answer as it comes: each item holds what is new. Closing the iterator cancels it."""
        request = self._input.prepare(
            prompt, sampling_params or self.get_default_sampling_params(), add_special_tokens=add_special_tokens
        )
        with self._exclusive():
            self._output.add(request)
            try:
                self.core.add(request.engine_requests)
                finished = False
                while not finished:
                    for output in self._step():
                        if output.request_id == request.request_id:
                            finished = output.finished
                            yield raise_on_error(output)
            finally:
                self.core.abort(self._output.discard(request.request_id))

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix (for measurements)."""
        self.core.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        """Give the model's memory back."""
        self._core = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        progress: bool,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        each = (
            [sampling_params] * len(prompts) if isinstance(sampling_params, SamplingParams) else list(sampling_params)
        )
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(each)} sampling_params for {len(prompts)} prompts; give one for all, or one for each",
                field="sampling_params",
            )
        requests = []
        for i, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
            try:
                requests.append(self._input.prepare(prompt, sampling, add_special_tokens=add_special_tokens))
            except RequestError as error:
                error.add_note(f"in prompt {i} of {len(prompts)}")
                raise
        return self._finish_all(requests, progress=progress)

    @no_collections()
    def _read(
        self,
        texts: Sequence[Prompt | tuple[str, str]],
        truncate: bool,
        take: Callable[[int, Vectors], None],
        *,
        progress: bool,
    ) -> TextsAnswer:
        """What the model says of each of the texts. `take` is given what there is of it while the rest is computed, of the
        texts from its first argument on."""
        prepared = self._input.prepare_texts(texts, truncate_to=-1 if truncate else None)
        answer, request = TextsAnswer(prepared), prepared.request
        if not prepared.prompts:
            return answer
        with self._exclusive():
            try:
                self.core.add_texts(request)
                with _progress(len(prepared.prompts), shown=progress) as advance:
                    while not answer.finished:
                        for output in self._core_step():
                            if output.request_id == request.request_id:
                                vectors = answer.take(output)
                                take(output.first_text, vectors)
                                advance(len(vectors.prompts), sum(map(len, vectors.prompt_token_ids)))
            finally:
                self.core.abort([request.request_id])
        return answer

    def _finish_all(self, requests: Sequence[PreparedRequest], *, progress: bool) -> list[RequestOutput]:
        """Their complete answers, in order."""
        done: dict[str, RequestOutput] = {}
        with self._exclusive():
            try:
                for request in requests:
                    self._output.add(request)
                    self.core.add(request.engine_requests)
                with _progress(len(requests), shown=progress) as advance, no_collections():
                    while self._output:
                        for delta in self._step(until_done=True):
                            done[delta.request_id] = merge(done.get(delta.request_id), raise_on_error(delta))
                            if delta.finished:
                                advance(1, sum(len(c.token_ids) for c in done[delta.request_id].outputs))
            finally:  # an error or an interrupt leaves nothing behind
                self.core.abort([key for r in requests for key in self._output.discard(r.request_id)])
        return [done[r.request_id] for r in requests]

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Whoever steps the engine gets all that it gives, so there can only be one."""
        if not self._turn.acquire(blocking=False):
            raise RequestError(
                "this LLM is in the middle of a stream or of another thread's call: finish or close that first, or use AsyncLLM"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _step(self, *, until_done: bool = False) -> list[RequestOutput]:
        deltas, aborts = self._output.process(self._core_step(), until_done=until_done)
        if aborts:
            self.core.abort(aborts)
        return deltas

    def _core_step(self) -> list[EngineOutput]:
        core = self.core
        outputs = core.step()
        if not outputs and not core.can_step:
            check_alive(core)
            core.wait()
        return outputs


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, with tokens per second; nothing elsewhere, at the price of nothing. What it gives is
    told how many requests are done, and of how many tokens."""
    if not (shown and sys.stderr.isatty()):
        yield lambda num_requests, num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:.0f} tok/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    begin, done = time.perf_counter(), 0
    with bar:
        task = bar.add_task("requests", total=total, speed=0.0)

        def advance(num_requests: int, num_tokens: int) -> None:
            nonlocal done
            done += num_tokens
            bar.update(task, advance=num_requests, speed=done / (time.perf_counter() - begin))

        yield advance
