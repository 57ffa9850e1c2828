"""Sizes of step graphs: which exist, which one a step uses, and which to capture next.

Pure: no torch, no device. Its constants were measured on an H200.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from slipstream.config import EngineConfig
from slipstream.costs.graph_sizes import (
    MIXED_TOKENS,
    VERIFIED_ROWS,
    decode_rows,
    mixed_decodes,
    mixed_prompts,
    mixed_sequences,
)
from slipstream.messages.steps import StepShape
from slipstream.spec.model import ModelSpec
from slipstream.spec.reason import Reason

if TYPE_CHECKING:
    from slipstream.worker.graphs.mixed_inputs import Size

SLACK = 1.3
"""Maximum size of a larger graph, as a multiple of a step's tokens, until its own is captured."""

LONGER = 16
"""Number of times a size is needed before it is captured.

Until then its steps may use an even larger graph: with `LARGER` times its decodes, or with
`spare_tokens` more in a mixed step. On an H200 a capture delays all requests by 30 to 60 ms, such
padding by a few ms at most.
"""

LARGER = 2.0

PATIENCE = 2
"""Number of times a mixed size is needed before it is captured.

Until then its steps run op by op if no captured graph holds them. On an H200 that takes 9 ms
longer.
"""

LONG_PATIENCE = 6
"""`PATIENCE` for steps of more than MIXED_TOKENS prompt tokens.

A graph saves about 15 ms there, and its capture takes 100 to 200.
"""

FIRST_DECODES = 64
"""Largest power of two captured at the start as a decode size. Rows for drafts are captured, too.

Next come the sizes between them, since a batch that ends passes through each, then larger powers of
two and the largest.
"""

FIRST_MIXED = ((64, 1024), (64, 384), (0, 128))
"""Upper bounds of the mixed sizes captured at the start.

Many steps fit into them until their own size is captured. The last is for a short prompt alone: on
an H200 64 decodes of padding take 1 ms.
"""

NEXT_MIXED = (64, 128)

BESIDE_TOKENS = 2**37
"""Tokens of a step, times the squared model width, during which the capture of one graph is hidden.

An H200 computes them in twice the time in which its host captures a graph. 8,192 tokens of
Llama-3-8B take 100 ms in FP8, and a capture takes 40 to 50.
"""

STALL_S = 0.1
"""Seconds from which on a capture is assumed to have waited for the GPU.

One in seven does, when the driver allocates memory for graphs.
"""

FIRST_VERIFIED = ((8, 1024), (8, 768), (8, 512), (8, 256))
"""Further mixed sizes captured at the start where drafts are verified.

In a step with a prompt, sequences with drafts use the room for prompts, and few are without drafts.
In (64, 1024) such a step takes about 2 ms longer on an H200.
"""

FIRST_VERIFIED_STATES = ((0, 64), (0, 32), (0, 16), (0, 8))
"""Further mixed sizes captured at the start where drafts are verified with recurrent layers: there
no decode graph verifies.

On an H200 four tokens of Qwen3.6-27B in FP8 take 13 ms in the graph of 128.
"""

FIRST_LONG = ((1024, 7680), (512, 8192), (256, 8192), (64, 8192))
"""Further mixed sizes captured at the start where a layer's ranks have longer graphs.

They serve steps of 8,192 tokens, with 3 % of padding on average. Such a step of Llama-3-8B takes 80
to 100 ms over two H200s op by op, and 63 in a graph.
"""

MAX_PADDING = 2**33
"""Maximum tokens of padding in a mixed step, times the squared model width.

On an H200 they take half as long as the overhead of running op by op. A layer has about 12
parameters per unit of that square, and about 12 kernels.
"""

MAX_KEYS_AGAIN = 2**18
"""Maximum keys that the rows after each sequence's first MIXED_ROWS may read again in a decode graph.

In a decode graph each row of a sequence reads its keys again. A mixed graph's kernel reads them in
the time of MIXED_ROWS rows, but its larger tiles cost about 3 ms a step. This was measured with
Llama-3-8B on an H200 (`verified_steps`). Both grow with the layers.
"""

NOT_CAPTURED = Reason("its graph is not captured yet")
NO_MEMORY = Reason("there is no memory for its graph")


class GraphLadder:
    """Sizes of step graphs, how often each was needed, and the order of captures.

    1. A size is (decodes, prompt tokens). (n, 0) is a decode graph of n rows.
    2. `captured`: sizes that have a graph. The store adds to it.
    3. `num_ranks`: ranks that compute the layers together; 0 without a partition.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, captured: Collection[Size], num_ranks: int = 0
    ) -> None:
        self.captured = captured
        self.num_ranks = num_ranks
        self.verifies = config.speculation.limit > 0
        self.sizes = decode_rows(config)
        self.decode_sizes = mixed_decodes(config.scheduling.max_num_seqs)
        self.prompt_sizes = mixed_prompts(config, spec)
        self.most_prompts = mixed_sequences(config, spec)
        self.keeps_states = spec.is_recurrent
        self.squared_width = spec.hidden_size**2
        self.spare_tokens = min(1024, MAX_PADDING // self.squared_width)
        self.ahead: list[Size] = []  # sizes to be captured, the next one last
        self.soon: set[Size] = set()  # those of them to be captured first
        self.is_full = False  # a capture ran out of memory; captured graphs remain
        # number of times a size was needed before its capture
        self.wanted: Counter[Size] = Counter()

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the largest graph."""
        return max(self.sizes[-1], self.decode_sizes[-1] + max(self.prompt_sizes, default=0))

    def forget(self) -> None:
        """Forget which sizes were needed, after all graphs were dropped."""
        self.wanted.clear()
        self.is_full = False

    def stop(self) -> None:
        """Stop capturing, because there is no memory. Captured graphs remain."""
        self.is_full = True
        self.ahead.clear()

    def queue(self) -> None:
        """Queue all sizes that are not captured yet.

        Small sizes come first: they are the most common, and a capture delays a small step the most.
        """
        every = [(n, 0) for n in self.sizes]
        every += [(d, p) for d in self.decode_sizes for p in self.prompt_sizes]
        every.sort(key=lambda size: (size not in self.soon, max(size), sum(size)))
        self.ahead = [size for size in reversed(every) if size not in self.captured]

    def num_beside(self, num_tokens: int, *, has_decodes: bool) -> int:
        """Number of graphs to capture while the GPU computes a step of `num_tokens` tokens.

        At most one if decodes are in the step, because requests wait for their tokens.
        """
        count = num_tokens * self.squared_width // BESIDE_TOKENS
        return min(count, 1) if has_decodes else count

    def refusal(self, step: StepShape) -> Reason | None:
        """Reason why no graph runs this step; None if one does, or is captured for it now."""
        if self.by_rows(step):
            is_there = not self.is_full or (self.size_for(step.num_tokens), 0) in self.captured
            return None if is_there else NO_MEMORY
        if not step.num_prompts:
            return Reason("more sequences than a graph holds")
        if not self.prompt_sizes or step.num_prompt_tokens > self.prompt_sizes[-1]:
            return Reason("more prompt tokens than a graph holds")
        if step.num_decodes > self.decode_sizes[-1] or step.num_prompts >= self.most_prompts:
            return Reason("more sequences than a mixed graph holds")
        size = self.mixed_size_for(step.num_decodes, step.num_prompt_tokens)
        if size in self.captured:
            return None
        if self.is_full:
            return NO_MEMORY
        return None if self.is_due(size) else NOT_CAPTURED

    def is_due(self, size: Size) -> bool:
        """Whether a step that needs this size captures it."""
        patience = LONG_PATIENCE if size[1] > MIXED_TOKENS else PATIENCE
        return self.wanted[size] + 1 >= patience

    def commonest(self, *, few: bool = False) -> tuple[list[Size], set[Size]]:
        """Sizes to capture at the start, and soon after it.

        Ranks capture together, so they capture all of these at the start. `few`: a request waits, so only the
        largest and smallest decode sizes and the smallest prompt size are first, and the others follow soon.
        """
        powers = [n for n in self.sizes if n.bit_count() == 1]
        decodes = {n for n in powers if n <= FIRST_DECODES}
        if self.verifies:
            decodes.update(n for n in self.sizes if n in VERIFIED_ROWS or n == self.sizes[-1])
        mixed = FIRST_MIXED + (FIRST_VERIFIED if self.verifies else ())
        if self.verifies and self.keeps_states:
            mixed += FIRST_VERIFIED_STATES
        if self.num_ranks > 1 and self.prompt_sizes and self.prompt_sizes[-1] > MIXED_TOKENS:
            mixed = FIRST_LONG + mixed
        first = [(n, 0) for n in sorted(decodes, reverse=True)]
        soon = {
            (n, 0)
            for n in (*powers, self.sizes[-1], *(n for n in self.sizes if n <= FIRST_DECODES))
        }
        if self.prompt_sizes:
            first += [self.mixed_within(*most) for most in mixed]
            soon.add(self.mixed_within(*NEXT_MIXED))
        if few and not self.num_ranks and not self.verifies:
            soon.update(first)
            first = [first[0], (min(decodes), 0), first[-1]]
        soon.difference_update(first)
        return (first, soon) if not self.num_ranks else ([*first, *sorted(soon)], set())

    def mixed_within(self, num_decodes: int, num_prompt: int) -> Size:
        """The largest mixed size within these limits."""
        return max(n for n in self.decode_sizes if n <= num_decodes), max(
            n for n in self.prompt_sizes if n <= num_prompt
        )

    def size_for(self, num_seqs: int) -> int:
        """The smallest decode graph for `num_seqs` if captured, otherwise a larger captured one."""
        size = self.decode_size(num_seqs)
        ready = (n for n in self.sizes if n >= size and (n, 0) in self.captured)
        other = next(ready, None)
        slack = LARGER if self.is_full or self.wanted[size, 0] < LONGER else SLACK
        return other if other is not None and other <= slack * num_seqs else size

    def decode_size(self, num_rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def mixed_size(self, num_decodes: int, num_prompt: int) -> Size:
        return (
            next(n for n in self.decode_sizes if n >= num_decodes),
            next(n for n in self.prompt_sizes if n >= num_prompt),
        )

    def mixed_size_for(self, num_decodes: int, num_prompt: int) -> Size:
        """The size of a mixed step's graph, chosen as by `size_for`."""
        size, num_tokens = self.mixed_size(num_decodes, num_prompt), num_decodes + num_prompt
        if size in self.captured:
            return size
        slack = self.spare_tokens
        if self.wanted[size] >= LONGER and not self.is_full:
            slack = min(slack, round((SLACK - 1) * num_tokens))
        most = num_tokens + slack
        ready = [
            s
            for s in self.captured
            if s[1] and s[0] >= num_decodes and s[1] >= num_prompt and sum(s) <= most
        ]
        return min(ready, key=sum, default=size)

    def note_wanted(self, size: Size) -> None:
        """Count a needed size, and queue it for capture at an idle moment."""
        if (
            size not in self.captured
            and not self.is_full
            and self.wanted[size] < max(LONGER, PATIENCE)
        ):
            self.wanted[size] += 1
            self.ahead.append(size)

    def by_rows(self, step: StepShape) -> bool:
        """Whether a step of only decodes and drafts fits a decode graph, with a row per token.

        With recurrent layers a sequence's tokens depend on each other, so they can't be separate rows.
        """
        if self.keeps_states and step.num_prompt_tokens:
            return False
        return (
            step.only_drafts
            and step.num_tokens <= self.sizes[-1]
            and step.num_keys_again <= MAX_KEYS_AGAIN
        )
