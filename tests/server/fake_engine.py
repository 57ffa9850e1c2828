"""An engine without a model: it says the prompt again, letter by letter, and can be slow, full, broken or dead."""

from __future__ import annotations

import array
import asyncio
import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

from slipstream.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineDownError,
    EngineOverloadedError,
    RequestError,
)
from slipstream.messages.stats import EngineStats, ExpertBalance
from slipstream.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestOutput,
    RequestTimes,
    Vectors,
)
from slipstream.params.options import DEFAULT_OPTIONS
from slipstream.spec.pooling import PoolingSpec


class ByteTokenizer:
    """A token a byte; 0 stands for a special token."""

    vocab_size = 256
    special_ids = frozenset({0})
    bos_token_id = 0

    def encode(self, text, *, add_special_tokens=True):
        return ([0] if add_special_tokens else []) + list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=True):
        special = "" if skip_special_tokens else "<s>"
        return "".join(
            special if t == 0 else bytes([t]).decode(errors="replace") for t in token_ids
        )

    def strips_space_after(self, token_ids, *, skip_special_tokens=True):
        return False

    def token_bytes(self, token_id):
        return bytes([token_id]) if token_id else b"<s>"

    def token_to_id(self, token):
        return None

    def id_to_token(self, token_id):
        return "<s>" if token_id == 0 else chr(token_id)

    chat_template = tool_template = "{{ reasoning_effort }}"

    def apply_chat_template(self, messages, *, add_generation_prompt=True, **variables):
        self.variables = variables
        if messages[0]["content"] == "template error":
            raise RequestError("the template wants something else", field="messages")
        text = "".join(f"{m['role']}:{m['content']}\n" for m in messages)
        return text + ("assistant:" if add_generation_prompt else "")


class FakeEngine:
    """`embed` gives four numbers: how many tokens a text has, and zeros."""

    model_name = "fake"
    description = SimpleNamespace(
        spec=SimpleNamespace(
            vocab_size=256,
            classifier=None,
            is_encoder=False,
            hidden_size=4,
            num_parameters=9,
            layers=(),
            generates=True,
            sees=False,
            hears=False,
            media=None,
            encoder=None,
        ),
        pooling=PoolingSpec(kind="mean", normalize=True),
        text_task="embed",
        family=SimpleNamespace(model_type="fake"),
        path=Path("nowhere"),
        format="safetensors",
        scheme=None,
        speech=None,
        gguf_type=None,
        dtype="float32",
        sampling={},
    )
    canary = None
    is_sleeping = False

    def __init__(self, *, delay_s=0.0, max_model_len=512, max_queue=None):
        self.tokenizer = ByteTokenizer()
        self.adapters = {}  # by name
        self.config = SimpleNamespace(
            model=SimpleNamespace(max_model_len=max_model_len),
            scheduling=SimpleNamespace(max_num_seqs=8),
            cache=SimpleNamespace(enable_prefix_caching=False, block_size=16),
        )
        self.delay_s, self.max_queue = delay_s, max_queue
        self.running = 0
        self.started = 0
        self.seen, self.shares, self.salts = [], [], []  # (prompt, sampling, priority)
        self.prompt_steps = (
            0  # in which parts of the prompt are computed, before the one with the first token
        )
        self.fail_after = None  # tokens, after which the engine dies
        self.dead = False
        self.stuck = ""  # a reason for bad health
        self.was_shut_down = False
        self.prompt_tokens = self.generation_tokens = 0

    async def submit(self, prompt, sampling, sink, options=DEFAULT_OPTIONS):
        """`AsyncLLM.submit`, without `on_token`."""
        assert not options.answer_token_ids
        assert options.lora_request is None
        self.salts.append(options.cache_salt)
        if options.reserve is not None:
            ids = (
                self.tokenizer.encode(prompt)
                if isinstance(prompt, str)
                else prompt["prompt_token_ids"]
            )
            options.reserve(
                len(ids),
                sampling.n * (sampling.max_tokens or self.config.model.max_model_len - len(ids)),
            )
        self.shares.append(options.share)
        stream = self.answer(self._begin(prompt, sampling, options.priority), sampling)

        async def pump():
            try:
                async with contextlib.aclosing(stream):
                    async for delta in stream:
                        sink.put(delta)
            except Exception as error:
                sink.fail(error)

        task = asyncio.create_task(pump())
        task.add_done_callback(lambda _: self._end())
        return task.cancel

    async def generate(self, prompt, sampling):
        try:
            async for delta in self.answer(self._begin(prompt, sampling, 0), sampling):
                yield delta
        finally:
            self._end()

    @property
    def num_requests(self):
        return self.running

    def _end(self):
        self.running -= 1

    def _begin(self, prompt, sampling, priority):
        self.seen.append((prompt, sampling, priority))
        languages = ("source_language", "target_language")
        if field := next((x for x in languages if isinstance(prompt, dict) and x in prompt), None):
            raise RequestError("this model translates nothing; leave it out", field=field)
        ids = (
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]
        )
        room = self.config.model.max_model_len - len(ids)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token", field="prompt")
        for token in ids:
            if token >= 256:
                raise RequestError(f"{token} is not a token id", field="prompt_token_ids")
        if room < 1 or (sampling.max_tokens or 0) > room:
            raise ContextLengthError(
                "too long for the context", field="prompt" if room < 1 else "max_tokens"
            )
        if self.dead:
            raise EngineDownError("the engine process is down")
        if self.max_queue is not None and self.running >= self.max_queue:
            raise EngineOverloadedError("the queue is full; try again later")
        self.running += 1
        self.started += 1
        self.prompt_tokens += len(ids)
        return ids

    async def answer(self, ids, sampling):
        max_tokens = sampling.max_tokens or self.config.model.max_model_len - len(ids)
        start = time.monotonic()
        source = [t for t in ids if t] or [63]
        for _ in range(self.prompt_steps):
            await asyncio.sleep(self.delay_s)
            nothing = CompletionOutput(0, "", [], None if sampling.logprobs is None else [])
            yield RequestOutput("r", None, list(ids), [nothing], False)
        for step in range(max_tokens):
            await asyncio.sleep(self.delay_s)
            if self.dead or (self.fail_after is not None and step >= self.fail_after):
                raise EngineDeadError("the engine process was killed by signal 9")
            token = source[step % len(source)]
            last = step == max_tokens - 1
            outputs = [self._delta(i, token, sampling, last) for i in range(sampling.n)]
            self.generation_tokens += sampling.n
            times = RequestTimes(start, time.monotonic(), time.monotonic())
            output = RequestOutput(
                "r", None, list(ids), outputs, last, num_cached_tokens=len(ids) // 2, times=times
            )
            if step == 0 and sampling.prompt_logprobs is not None:
                output.prompt_logprobs = [None] + [
                    self._logprobs(t, sampling.prompt_logprobs) for t in ids[1:]
                ]
            yield output

    def check_media(self, count):
        if count:
            raise RequestError("this model takes no pictures; leave them out", field="image")

    async def embed(self, prompts, options=DEFAULT_OPTIONS, *, truncate_to=None, **how):
        self.salts.append(options.cache_salt)
        if self.dead:
            raise EngineDownError("the engine process is down")
        found, token_ids = [], []
        for prompt in prompts:
            ids = (
                self.tokenizer.encode(prompt)
                if isinstance(prompt, str)
                else prompt["prompt_token_ids"]
            )
            if not ids:
                raise RequestError("the prompt is empty; give at least one token", field="prompt")
            if any(token >= 256 for token in ids):
                raise RequestError("no token id", field="prompt_token_ids")
            if len(ids) > self.config.model.max_model_len and truncate_to is None:
                raise ContextLengthError("too long for the context", field="prompt")
            await asyncio.sleep(self.delay_s)
            found.append(array.array("f", [len(ids), 0, 0, 0]).tobytes())
            token_ids.append(list(ids))
        if options.reserve is not None:
            options.reserve(sum(map(len, token_ids)), 0)
        return Vectors(
            prompts=[None] * len(found), prompt_token_ids=token_ids, data=b"".join(found)
        )

    def _delta(self, index, token, sampling, last):
        logprobs = None if sampling.logprobs is None else [self._logprobs(token, sampling.logprobs)]
        return CompletionOutput(
            index, self.tokenizer.decode([token]), [token], logprobs, "length" if last else None
        )

    def _logprobs(self, token, k):
        entry = [self._entry(t, -0.5 - i) for i, t in enumerate(sorted({token, 65, 66, 67}))]
        return PositionLogprobs(self._entry(token, -0.5), tuple(entry[:k]))

    def _entry(self, token, value):
        return Logprob(
            token,
            self.tokenizer.decode([token], skip_special_tokens=False),
            value,
            1,
            bytes([token]),
        )

    async def stats(self):
        if self.dead:
            raise EngineDownError("the engine process is down")
        return EngineStats(
            num_running=self.running,
            kv_cache_usage=0.25,
            num_blocks=8,
            num_free_blocks=8,
            prefix_queries=10,
            prefix_hits=4,
            num_preemptions=3,
            prompt_tokens_total=self.prompt_tokens,
            generation_tokens_total=self.generation_tokens,
            expert_load=((1, (5, 0, 7)),),
            expert_balance=ExpertBalance(moved_total=4, rank_imbalance=1.25),
        )

    async def sleep(self, level=1):
        self.is_sleeping = True

    async def wake_up(self):
        self.is_sleeping = False

    def health(self):
        reason = "the engine process is down" if self.dead else self.stuck
        return SimpleNamespace(ok=not reason, reason=reason)

    async def shutdown(self, drain_s=0.0):
        self.was_shut_down = True
