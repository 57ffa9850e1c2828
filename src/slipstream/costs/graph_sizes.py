"""Sizes of the steps for which there are GPU graphs. `worker/graphs/step_graphs.py` captures them; the
simulator pads to them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from slipstream.config import EngineConfig
from slipstream.config.forms import DraftSettings
from slipstream.spec.model import LatentAttentionSpec, ModelSpec, MoESpec

MIXED_PROMPTS = 64
"""Maximum number of prompts in a mixed graph, including the padding."""

LONG_PROMPTS = 128
"""Maximum number of prompts if graphs have up to LONG_TOKENS. Some attention kernels start thread
blocks for each."""

VERIFIED_PROMPTS = 256
"""Maximum number of sequences with drafts in a mixed graph, padding excluded. The graph treats them
as prompts."""

VERIFIED_TOKENS = (8, 16)
"""Prompt token counts of additional mixed graphs for verifying drafts with recurrent layers.

There a sequence's tokens follow one another, so a verification runs as a prompt. In graphs of at
most `states.SHORT` tokens no sequence is computed in chunks.
"""

MIXED_TOKENS = 4096
"""Prompt tokens of the largest mixed graph. In a larger step the GPU is busy for longer than the
host's launches take."""

LONG_TOKENS = 8192
"""Prompt tokens of the largest mixed graph for mixtures and for tensor parallel ranks.

Their layers have more kernels, and a token multiplies only with the experts it chose, or with a
rank's share of the weights, so launches take relatively longer. On an H200, 8,192 tokens of
Qwen3-30B-A3B in FP8 take 68 ms and are launched in 80. Those of Llama-3-8B on two H200s take 63 ms
and are launched in 80 to 100.
"""

GRAPH_BYTES = 4 * 2**20
"""Driver memory in bytes of one graph of about 300 launches: 0 to 4 MiB on an H200, activations excluded."""

END_BYTES = 2**18
"""Driver memory in bytes of the graph of a step's end, which has about five launches, or ten."""

NUM_ENDS = 4
"""Number of kinds of ends to reserve memory for: greedy, sampled, and two that only some steps have."""

GRAPH_LAYERS = 32
"""Number of layers whose step has about 300 launches."""

CHAIN_SEQS = 256
"""Maximum number of sequences in a graph of a draft chain."""

CHAIN_DEPTHS = (1, 2, 3, 5, 8)
"""Captured chain lengths if the number of drafts is chosen at each step. A chain runs in the next
longer graph, or op by op if there is none."""

CAUGHT_UP = 2
"""Maximum tokens after a verified step that the draft model has not computed: the last draft, if
all were accepted, and the token after it."""


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture.

    They are few enough to start fast, and dense enough that padding wastes little (≤ 1/8 from 16
    on). They include the multiples of 128, because large linear layers have tiles of 128 tokens: a
    step of 256 padded to 264 would take half as long again.
    """
    sizes = [n for n in (1, 2, 4, 8) if n <= max_num_seqs]
    n = 16
    while n < max_num_seqs:
        sizes.append(n)
        n += max(8, 1 << (n // 8).bit_length() - 1)
    return sorted({*sizes, max_num_seqs})


VERIFIED_ROWS = (16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 640, 768)
"""Additional row counts of decode graphs for verifying drafts, up to a token and all drafts of each
sequence.

They are few, since all are captured at the start. From 256 on they are multiples of 128, the tile
size of large products.
"""


def decode_rows(config: EngineConfig) -> list[int]:
    """Row counts of decode graphs. A row is a sequence's token or one of its drafts."""
    most = config.scheduling.max_num_seqs
    if not config.speculation.limit:
        return ladder(most)
    largest = min(VERIFIED_ROWS[-1], config.max_num_sampled)
    return sorted({*ladder(most), *(n for n in (*VERIFIED_ROWS, largest) if most < n <= largest)})


def mixed_decodes(max_num_seqs: int) -> list[int]:
    """Decode counts of mixed graphs, each at most twice the previous one."""
    return [
        0,
        *(
            n
            for n in (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
            if n <= max_num_seqs
        ),
    ]


def mixed_prompts(config: EngineConfig, spec: ModelSpec) -> list[int]:
    """Prompt token counts of mixed graphs; none for encoder-decoder models.

    They are at most a sequence's length, because the padding, a sequence like others, may have to
    hold all the tokens.
    """
    if spec.encoder is not None:
        return []
    most = LONG_TOKENS if _takes_long_steps(config, spec) else MIXED_TOKENS
    longest = min(config.scheduling.max_num_batched_tokens, config.model.max_model_len, most)
    sizes = (
        *(VERIFIED_TOKENS if config.speculation.limit and spec.is_recurrent else ()),
        32,
        64,
        128,
        192,
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
        3072,
        4096,
        5120,
        6144,
        7168,
        7680,
        8192,
    )
    return [n for n in sizes if n <= longest]


def _takes_long_steps(config: EngineConfig, spec: ModelSpec) -> bool:
    """Whether long steps are captured: for MoE models and tensor parallel ranks, without latent
    attention.

    Outside graphs, latent attention computes whole prompts without the cache. That is several times
    as fast and saves more than the launches cost.
    """
    if any(isinstance(layer.attention, LatentAttentionSpec) for layer in spec.layers):
        return False
    return config.parallel.stage.size > 1 or any(
        isinstance(layer.mlp, MoESpec) for layer in spec.layers
    )


def mixed_sequences(config: EngineConfig, spec: ModelSpec) -> int:
    """Maximum number of prompts, or of sequences with drafts, in a mixed graph, including the padding."""
    prompts = LONG_PROMPTS if _takes_long_steps(config, spec) else MIXED_PROMPTS
    if not config.speculation.limit:
        return prompts
    return max(prompts, min(config.scheduling.max_num_seqs, VERIFIED_PROMPTS) + 1)


MAX_SAMPLED = 256
"""Maximum number of sampled tokens in the graph of a step's end. Larger logits take much memory,
and such steps keep the GPU busy for longer than the host."""


def end_sizes(decodes: Sequence[int]) -> list[int]:
    """Numbers of sampled tokens for which a step's end has a graph, ascending, from the sizes of
    decode graphs."""
    return [n for n in decodes if n <= MAX_SAMPLED]


def graph_bytes(config: EngineConfig, spec: ModelSpec, element_bytes: int) -> int:
    """Bytes to reserve for a generator's graphs of all sizes.

    They are the hidden states, activations and logits of the largest, and the driver's own memory.
    With adapters the number of graphs doubles.
    """
    decodes = decode_rows(config)
    prompts = mixed_prompts(config, spec)
    mixed = [d + p for d in mixed_decodes(config.scheduling.max_num_seqs) for p in prompts]
    largest = max(decodes[-1:] + mixed[-1:])
    gathered = config.parallel.stage.num_caches  # experts see the tokens of all ranks
    numbers = largest * spec.hidden_size + activation_numbers(spec, gathered * largest, decodes[-1])
    found = numbers * element_bytes + (len(decodes) + len(mixed)) * GRAPH_BYTES
    found += NUM_ENDS * len(end_sizes(decodes)) * END_BYTES
    return found if config.lora is None else 2 * found


def activation_numbers(spec: ModelSpec, num_tokens: int, num_sampled: int) -> int:
    """Elements of two copies of a step's activations and logits: in the graphs' pool, and in the
    run before a capture."""
    of_token = max(0 if x.mlp is None else x.mlp.width for x in spec.layers) + 8 * spec.hidden_size
    return 2 * (num_tokens * of_token + num_sampled * spec.vocab_size)


def chain_sizes(max_num_seqs: int) -> list[int]:
    """Sequence counts of chain graphs. They are few, because a pass takes as long as reading its
    weights, for any count."""
    most = min(max_num_seqs, CHAIN_SEQS)
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def chain_depths(config: EngineConfig) -> tuple[int, ...]:
    """Chain lengths to capture: the fixed number of drafts, or `CHAIN_DEPTHS`."""
    assert isinstance(config.speculation, DraftSettings)
    fixed = config.speculation.num_speculative_tokens
    return tuple(
        d
        for d in (CHAIN_DEPTHS if fixed is None else (fixed,))
        if 2 * d < config.model.max_model_len
    )


def chain_bytes(config: EngineConfig, num_layers: int) -> int:
    """Bytes of driver memory for the graphs of all chains, with `num_layers` layers in a pass."""
    each = sum(-(-depth * num_layers // GRAPH_LAYERS) for depth in chain_depths(config))
    return each * len(chain_sizes(config.scheduling.max_num_seqs)) * GRAPH_BYTES


def model_chain_bytes(config: EngineConfig, spec: ModelSpec, element_bytes: int) -> int:
    """Bytes to reserve for the graphs of a draft model's chains. A draft head's activations are too
    small to count."""
    most = chain_sizes(config.scheduling.max_num_seqs)[-1]
    return (
        chain_bytes(config, len(spec.layers))
        + activation_numbers(spec, CAUGHT_UP * most, most) * element_bytes
    )


class Padding(Protocol):
    def __call__(
        self, num_decodes: int, num_prompt_tokens: int, num_prompts: int, *, by_rows: bool = False
    ) -> tuple[int, int] | None:
        """(decodes, prompt tokens) that the step's graph computes, or None if no graph is large
        enough.

        With `by_rows` the prompts are sequences with drafts. They run in a decode graph with a row
        per token if one is large enough.
        """


def padding(config: EngineConfig, spec: ModelSpec) -> Padding:
    """Padding of an engine's steps. All sizes are assumed to be captured."""
    sizes, decode_sizes = decode_rows(config), mixed_decodes(config.scheduling.max_num_seqs)
    prompt_sizes, room = mixed_prompts(config, spec), mixed_sequences(config, spec)

    def padded(
        num_decodes: int, num_prompt_tokens: int, num_prompts: int, *, by_rows: bool = False
    ) -> tuple[int, int] | None:
        rows = num_decodes + num_prompt_tokens
        if (by_rows or not num_prompt_tokens) and rows <= sizes[-1]:
            return sizes[bisect_left(sizes, rows)], 0
        beyond = not prompt_sizes or num_prompt_tokens > prompt_sizes[-1] or num_prompts >= room
        if beyond or num_decodes > decode_sizes[-1]:
            return None
        decodes = decode_sizes[bisect_left(decode_sizes, num_decodes)]
        return decodes, prompt_sizes[bisect_left(prompt_sizes, num_prompt_tokens)]

    return padded
