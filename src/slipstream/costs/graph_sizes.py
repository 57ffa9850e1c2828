"""The sizes of steps that a GPU's graphs have room for. `worker/graphs.py` captures them, the simulator pads to them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from slipstream.config import EngineConfig
from slipstream.spec.model import LatentAttentionSpec, ModelSpec, MoESpec

MIXED_PROMPTS = 64
"""Prompts that a mixed graph has room for, the padding's among them."""

LONG_PROMPTS = 128
"""The same where graphs have up to LONG_TOKENS. Some attention kernels start thread blocks for each of them."""

VERIFIED_PROMPTS = 256
"""Of sequences with drafts a mixed graph has room for up to so many, and for the padding: it takes them for prompts."""

MIXED_TOKENS = 4096
"""Prompt tokens of the largest mixed graph. A larger step keeps the GPU busy for longer than the host launches it."""

LONG_TOKENS = 8192
"""The same for mixtures and for a layer's ranks. Their layers have more kernels, and a token multiplies only by the experts
that it chose, or by a rank's part of the weights. On an H200 8,192 tokens of Qwen3-30B-A3B in FP8 take 68 ms, and the host
launches them in 80; those of Llama-3-8B over two H200s take 63, and are launched in 80 to 100."""

GRAPH_BYTES = 4 * 2**20
"""The driver's own memory for one graph of some three hundred launches: 0 to 4 MiB on an H200 beside activations."""

END_BYTES = 2**18
"""The same of a step's greedy end, which has some five launches."""

GRAPH_LAYERS = 32
"""A step of so many layers has some three hundred launches."""

CHAIN_SEQS = 256
"""Sequences of the largest graph of a chain of drafts."""

CHAIN_DEPTHS = (1, 2, 3, 5, 8)
"""Lengths of chains where the number of drafts is chosen at each step. A chain runs in the next longer graph, or op by op
if there is none."""

CAUGHT_UP = 2
"""Tokens that a verified step can leave to a draft model: the last draft, if all were right, and the token behind it."""


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: few enough to start fast, near enough that padding wastes little (≤ 1/8 from 16 on). Multiples of
    128 are among them, since large products have tiles of 128 tokens: a step of 256 padded to 264 would take half as long
    again."""
    sizes = [n for n in (1, 2, 4, 8) if n <= max_num_seqs]
    n = 16
    while n < max_num_seqs:
        sizes.append(n)
        n += max(8, 1 << (n // 8).bit_length() - 1)
    return sorted({*sizes, max_num_seqs})


VERIFIED_ROWS = (16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 640, 768)
"""Where drafts are verified, decode graphs have so many rows, too, up to a token and all drafts of each sequence. They are few,
since all are captured at the start. From 256 on they are multiples of 128, as tiles of large products are."""


def decode_rows(config: EngineConfig) -> list[int]:
    """Rows that decode graphs have room for: a sequence's token, or a token and each of its drafts."""
    most = config.scheduling.max_num_seqs
    if config.speculation is None:
        return ladder(most)
    largest = min(VERIFIED_ROWS[-1], config.max_num_sampled)
    return sorted({*ladder(most), *(n for n in (*VERIFIED_ROWS, largest) if most < n <= largest)})


def mixed_decodes(max_num_seqs: int) -> list[int]:
    """Decodes that mixed graphs have room for, each at most twice the one before."""
    return [
        0,
        *(
            n
            for n in (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
            if n <= max_num_seqs
        ),
    ]


def mixed_prompts(config: EngineConfig, spec: ModelSpec) -> list[int]:
    """Prompt tokens that mixed graphs have room for; none behind an encoder. The padding, a sequence like others, may have to
    hold them all."""
    if spec.encoder is not None:
        return []
    most = LONG_TOKENS if _takes_long_steps(config, spec) else MIXED_TOKENS
    longest = min(config.scheduling.max_num_batched_tokens, config.model.max_model_len, most)
    sizes = (
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
    """Whether long steps are captured: those of mixtures and of a rank's part, without latent attention. Outside graphs latent
    attention computes whole prompts without the cache, which is several times as fast and saves more than the launches cost."""
    if any(isinstance(layer.attention, LatentAttentionSpec) for layer in spec.layers):
        return False
    return config.parallel.ranks_of_stage > 1 or any(
        isinstance(layer.mlp, MoESpec) for layer in spec.layers
    )


def mixed_sequences(config: EngineConfig, spec: ModelSpec) -> int:
    """Prompts, or sequences with drafts, that a mixed graph has room for, the padding's among them."""
    prompts = LONG_PROMPTS if _takes_long_steps(config, spec) else MIXED_PROMPTS
    if config.speculation is None:
        return prompts
    return max(prompts, min(config.scheduling.max_num_seqs, VERIFIED_PROMPTS) + 1)


MOST_SAMPLED = 256
"""Sampled tokens of the largest graph of a step's end. Logits of more are large, and such steps keep the GPU busy for longer
than the host."""


def end_sizes(decodes: Sequence[int]) -> list[int]:
    """Numbers of sampled tokens that there are graphs of a step's greedy end for, by the sizes of decode graphs, ascending."""
    return [n for n in decodes if n <= MOST_SAMPLED]


def graph_bytes(config: EngineConfig, spec: ModelSpec, element_bytes: int) -> int:
    """Memory to be left for a generator's graphs of every size: hidden states, activations and logits of the largest, and the
    driver's own. With adapters there are graphs of every size for steps with some, too."""
    decodes = decode_rows(config)
    prompts = mixed_prompts(config, spec)
    mixed = [d + p for d in mixed_decodes(config.scheduling.max_num_seqs) for p in prompts]
    largest = max(decodes[-1:] + mixed[-1:])
    gathered = (
        config.parallel.experts if config.parallel.deals_requests else 1
    )  # experts see the tokens of all ranks
    numbers = largest * spec.hidden_size + activation_numbers(spec, gathered * largest, decodes[-1])
    found = numbers * element_bytes + (len(decodes) + len(mixed)) * GRAPH_BYTES
    found += len(end_sizes(decodes)) * END_BYTES
    return found if config.lora is None else 2 * found


def activation_numbers(spec: ModelSpec, num_tokens: int, num_sampled: int) -> int:
    """Activations and logits of a step twice: in the graphs' pool, and of the run beside it that comes before a capture."""
    of_token = max(layer.mlp.width for layer in spec.layers) + 8 * spec.hidden_size
    return 2 * (num_tokens * of_token + num_sampled * spec.vocab_size)


def chain_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences that graphs of chains have room for. They are few: a pass takes as long as its weights take to be
    read."""
    most = min(max_num_seqs, CHAIN_SEQS)
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def chain_depths(config: EngineConfig) -> tuple[int, ...]:
    """The lengths of chains to capture: of the fixed number of drafts, or several."""
    assert config.speculation is not None
    fixed = config.speculation.num_speculative_tokens
    return tuple(
        d
        for d in (CHAIN_DEPTHS if fixed is None else (fixed,))
        if 2 * d < config.model.max_model_len
    )


def chain_bytes(config: EngineConfig, num_layers: int) -> int:
    """The driver's own memory for the graphs of all chains, whose passes have so many layers."""
    each = sum(-(-depth * num_layers // GRAPH_LAYERS) for depth in chain_depths(config))
    return each * len(chain_sizes(config.scheduling.max_num_seqs)) * GRAPH_BYTES


def model_chain_bytes(config: EngineConfig, spec: ModelSpec, element_bytes: int) -> int:
    """Memory to be left for the graphs of a draft model's chains. A head's activations are small."""
    most = chain_sizes(config.scheduling.max_num_seqs)[-1]
    return (
        chain_bytes(config, len(spec.layers))
        + activation_numbers(spec, CAUGHT_UP * most, most) * element_bytes
    )


class Padding(Protocol):
    def __call__(
        self, num_decodes: int, num_prompt_tokens: int, num_prompts: int, *, by_rows: bool = False
    ) -> tuple[int, int] | None:
        """The decodes and prompt tokens that a step computes in its graph; None: no graph holds it. `by_rows`: the prompts are
        sequences with drafts, which run in a decode graph with a row for each token if one has so many."""


def padding(config: EngineConfig, spec: ModelSpec) -> Padding:
    """Of steps of an engine. All sizes are taken to be captured."""
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
