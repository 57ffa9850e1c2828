"""Forward paths, the ways to run the model on a step's tokens, and the table that chooses one.

    eager       the decoder's loop over its layers, op by op; covers every step without adapters
    adapters    the same loop, with the adapters of the step's requests
    media       the same loop, with embeddings of media among those of tokens; asked first
    program     the whole step as one program of the CPU's C++ kernels
    one-token   all layers of a step of one token as one GPU kernel
    graphs      a captured CUDA graph of any of these (`worker/graphs/step_graphs.py`)

Each is a `Forward`: `covers(batch)` returns the reason why it can't take a batch, or None, and
`run(batch)` computes it. `Forwards` holds them in the order in which they are asked. A path that
can never run this model is not in the table. The reason is in `Forwards.refused`, and is logged
once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.weights.adapters import AdapterOps, LoRATokens, tokens_of
from slipstream.messages.texts import TextTask
from slipstream.model.compile_step import compile_program
from slipstream.model.decoder import Decoder
from slipstream.model.encoder import TextHeads, normalized, pool
from slipstream.model.layers.taps import AnyTap
from slipstream.model.one_token import OneTokenKernel, compile_one_token
from slipstream.model.trace import INT4_CACHE
from slipstream.spec.pooling import PoolingSpec
from slipstream.spec.reason import Reason
from slipstream.worker.forward.base import HAS_ADAPTERS as HAS_ADAPTERS
from slipstream.worker.forward.base import BegunStep, PlainForward
from slipstream.worker.forward.base import Forward as Forward
from slipstream.worker.forward.base import InputBatch as InputBatch
from slipstream.worker.forward.base import Output as Output
from slipstream.worker.forward.media import MediaEncoder, MediaOps, StepMedia, stacked, step_media
from slipstream.worker.forward.program import ProgramForward
from slipstream.worker.forward.state_cache import StateCache as StateCache
from slipstream.worker.inputs.input_batch import GatheredInputs
from slipstream.worker.inputs.uploads import upload

if TYPE_CHECKING:
    from slipstream.kernels.ops import OpSet
    from slipstream.spec.media.medium import MediaSpec
    from slipstream.worker.adapters import Adapters

_logger = logging.getLogger("slipstream.engine")

NO_MEDIA = Reason("no placeholder of a picture or sound is in the step")
NO_PLAN = Reason("the tokens are not a scheduled step")


class Eager(PlainForward):
    name = "eager"

    def _hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        if self.states is None:
            return self.decoder.forward(token_ids, kv, meta)
        return self._keep(*self.decoder.tapped(token_ids, kv, meta), meta)

    def encode(self, given: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        self.decoder.encode(given, kv, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        return self.decoder.greedy(hidden)


class OneToken(Eager):
    name = "one-token"

    def __init__(
        self, decoder: Decoder, kernel: OneTokenKernel, states: StateCache | None = None
    ) -> None:
        super().__init__(decoder, states)
        self.kernel = kernel

    def covers(self, batch: InputBatch) -> Reason | None:
        if batch.num_tokens == 1:
            return super().covers(batch)
        return Reason("the step has more than one token")

    def _hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        hidden = self.kernel.forward(token_ids, kv, meta)
        return self._keep(hidden, hidden, meta)


class Variant(Eager):
    """Base of paths whose layers do something additional, such as applying adapters, for steps that
    need it. Other steps run on the path `base`, which also computes this path's logits.
    """

    def __init__(self, base: PlainForward) -> None:
        super().__init__(base.decoder, base.states)
        self.base = base

    def logits(self, hidden: Tensor) -> Tensor:
        return self.base.logits(hidden)

    def greedy(self, hidden: Tensor) -> Tensor | None:
        return self.base.greedy(hidden)

    def _output(self, hidden: Tensor, given: GatheredInputs) -> Output:
        if isinstance(self.base, ProgramForward):
            hidden = hidden.float()  # the dtype that the logits' computation reads
        return Output(self, hidden, given.sampled, given.sample_index)


def adapters_of(batch: InputBatch, decoder: Decoder) -> LoRATokens:
    """Adapters of the tokens of a scheduled step."""
    plan, table = batch.step
    slots = table.adapters_of(plan.scheduled).repeat([s.num_tokens for s in plan.scheduled])
    return tokens_of(slots, batch.gathered.token_ids.device, decoder.sharers(len(slots)))


class Adapted(Variant):
    """Path for steps of requests with adapters."""

    name = "adapters"

    def __init__(self, base: PlainForward, adapters: Adapters) -> None:
        super().__init__(base)
        self.adapters = adapters

    def covers(self, batch: InputBatch) -> Reason | None:
        return None if batch.has_adapters else Reason("no request of the step has an adapter")

    def run(self, batch: InputBatch) -> Output:
        given = batch.gathered
        return self._output(
            self.hidden(given.token_ids, batch.kv, given.meta, adapters_of(batch, self.decoder)),
            given,
        )

    def hidden(
        self,
        token_ids: Tensor,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        tokens: LoRATokens,
        decoder: Decoder | None = None,
    ) -> Tensor:
        """Compute hidden states [T, E] of token ids [T]. `tokens`: their adapters. `decoder`: a
        view of this path's decoder, by default itself.
        """
        decoder = decoder or self.decoder
        ops = cast("OpSet", AdapterOps(decoder.ops, self.adapters.weights, tokens))
        return Eager(decoder.with_ops(ops), self.states)._hidden(token_ids, kv, meta)


class WithMedia(Variant):
    """Path for steps in which media embeddings replace some tokens', with the requests'
    adapters."""

    name = "media"

    def __init__(
        self,
        base: PlainForward,
        spec: MediaSpec,
        encoder: MediaEncoder | None,
        adapters: Adapters | None,
    ) -> None:
        """`encoder` is None in later pipeline stages, which receive its output among embeddings."""
        super().__init__(base)
        self.spec, self.encoder, self.adapters = spec, encoder, adapters

    def covers(self, batch: InputBatch) -> Reason | None:
        return None if batch.has_media else NO_MEDIA

    def run(self, batch: InputBatch) -> Output:
        given = batch.gathered
        media = step_media(*batch.step)
        ops: Any = self.decoder.ops
        if self.adapters is not None and batch.has_adapters:
            ops = AdapterOps(ops, self.adapters.weights, adapters_of(batch, self.decoder))
        each = (getattr(a.position, "axes", None) for a in self.decoder.spec.attentions)
        axes = next(filter(None, each), None)  # the same in all layers with a rotary embedding
        decoder = self.decoder.with_ops(
            cast("OpSet", MediaOps(ops, media, given.meta, self.spec, axes))
        )
        h = self.decoder.embedded(given.token_ids, given.meta)
        if media.parts and self.encoder is not None:
            rows = torch.cat(
                [
                    x[span.num_embeddings(a) : span.num_embeddings(b)]
                    for x, (span, a, b) in zip(
                        self.encoder.embeddings(media), media.parts, strict=True
                    )
                ]
            )
            size, tokens = h.shape[1], upload(media.tokens, h.device)
            h = h.index_copy(0, tokens, rows[:, :size].to(h.dtype))
            if rows.shape[1] > size:
                decoder = stacked(decoder, h, media.tokens, rows[:, size:].to(h.dtype))
        hidden, states = decoder.run(h, batch.kv, self._with_inputs(h, given, media))
        return self._output(self._keep(hidden, states, given.meta), given)

    def _with_inputs(self, h: Tensor, given: GatheredInputs, media: StepMedia) -> AttentionMetadata:
        """The step's metadata with the per-layer inputs. Tokens of an image use the inputs of the
        placeholder token."""
        token_ids = given.token_ids
        if self.decoder.layer_inputs is not None and self.spec.own_input_id is not None:
            index = upload(media.tokens, h.device)
            token_ids = token_ids.index_fill(0, index, self.spec.own_input_id)
        return self.decoder.with_inputs(token_ids, h, given.meta)  # type: ignore[no-any-return]


class Forwards:
    """The table of forward paths, the most special first. Every batch is covered by some path."""

    def __init__(self, decoder: Decoder, *, int4_cache: bool = False) -> None:
        self.decoder, self.int4_cache = decoder, int4_cache
        self.refused: dict[str, Reason] = {}
        self.paths: list[Forward] = []
        self.base: PlainForward = Eager(decoder)
        self.states: StateCache | None = None
        self.adapters: Adapters | None = None
        self.media: MediaEncoder | None = None
        self.takes_media = False
        self.heads = TextHeads()
        self.rebuild()

    def take_adapters(self, adapters: Adapters) -> None:
        """Add the path for requests with adapters."""
        self.adapters = adapters
        self.rebuild()

    def take_media(self, encoder: MediaEncoder | None) -> None:
        """Add the path for requests with media. `encoder`: see `WithMedia`."""
        self.media, self.takes_media = encoder, True
        self.rebuild()

    def keep_states(self, states: StateCache, tap: AnyTap | None) -> None:
        """Store states from now on: each step writes those that `tap` collects between the layers.

        Without a tap it writes the hidden states.
        """
        self.states, self.decoder.tap = states, tap
        self.rebuild()

    def rebuild(self) -> None:
        """Create the paths that run given tokens. Graphs are added by `add` once there is a cache."""
        self.base = Eager(self.decoder, self.states)
        self.paths = [self.base]
        if self.decoder.device.type == "cpu":
            program = compile_program(self.decoder)
            if isinstance(program, Reason):
                self._refuse(ProgramForward.name, program)
            else:
                self.base = ProgramForward(program, self.states)
                self.paths = [self.base]
        else:
            kernel = INT4_CACHE if self.int4_cache else compile_one_token(self.decoder)
            if isinstance(kernel, Reason):
                self._refuse(OneToken.name, kernel)
            else:
                self.paths = [OneToken(self.decoder, kernel, self.states), self.base]
        if self.adapters is not None:
            self.paths.append(Adapted(self.base, self.adapters))
        spec = self.decoder.spec.media
        if self.takes_media and spec is not None:
            self.paths.insert(0, WithMedia(self.base, spec, self.media, self.adapters))

    def _refuse(self, name: str, reason: Reason) -> None:
        if name not in self.refused and reason.notable:
            _logger.warning("steps do not run on the fast path, %s: %s", name, reason)
        self.refused[name] = reason

    def add(self, path: Forward) -> None:
        """Try `path` before all others except the one for media."""
        self.paths.insert(self.takes_media, path)

    @property
    def num_cold(self) -> int:
        return sum(path.num_cold for path in self.paths)

    def run(self, batch: InputBatch) -> Output | BegunStep:
        for path in self.paths:
            reason = path.covers(batch)
            if reason is None:
                output = path.run(batch)
                if output is not None:
                    return output
            else:
                path.passed_over(batch, reason)
        raise AssertionError("the last way covers every batch")

    def hidden(
        self,
        token_ids: Tensor,
        kv: Sequence[LayerKV],
        meta: AttentionMetadata,
        decoder: Decoder | None = None,
    ) -> Tensor:
        """Compute hidden states [T, E] after the final norm from token ids [T], and write the cache.

        A `decoder` that is a view of the shared one runs op by op.
        """
        if decoder is not None and decoder is not self.decoder:
            return Eager(decoder, self.states)._hidden(token_ids, kv, meta)
        output = self.run(InputBatch.of(token_ids, kv, meta))
        assert isinstance(output, Output)
        return output.hidden

    def encode(self, given: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        self.base.encode(given, kv, meta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, E]."""
        return self.base.logits(hidden)

    def count_experts(self) -> dict[int, Tensor]:
        """Count the tokens of each expert from now on.

        Returns int64 [X] on the device for each layer that has experts.
        """
        counts = self.decoder.count_experts()
        if counts:
            self.rebuild()  # the other paths must use the same counters
        return counts

    @property
    def token_bytes(self) -> int | None:
        """Bytes of activations per token of a step; None if they must be measured."""
        return self.base.program.token_bytes if isinstance(self.base, ProgramForward) else None

    def vectors(
        self, how: PoolingSpec, hidden: Tensor, starts: Tensor, task: TextTask = "embed"
    ) -> Tensor:
        """Compute the texts' vectors or a classifier's scores, float32 [S, …]; for other tasks those of tokens, [T, …].

        `hidden` [T, E] are the states; text i has the states starts[i] : starts[i + 1].
        """
        decoder = self.decoder
        if how.score_tokens is not None:
            yes, no = how.score_tokens
            logits = self.logits(hidden).float()
            return logits[:, yes : yes + 1] - (0.0 if no is None else logits[:, no : no + 1])
        if decoder.classifier is not None:
            return decoder.classifier(decoder.ops, hidden, starts).float()
        if task != "embed":
            rows = self.heads.of_tokens(hidden.float(), task, torch)
            return normalized(rows) if task == "token_embed" and how.normalize else rows
        assert how.kind != "tokens"
        vectors = pool(decoder.ops, hidden, starts, how.kind)
        for step in self.heads.dense:
            vectors = step(vectors, torch)
        return normalized(vectors) if how.normalize else vectors
