"""Samples tokens row by row for requests that the batch sampler does not cover. No torch.

These have parameters that the batch sampler lacks (`SamplingParams.by_chain`). This is the slower path: it
runs on the host, with NumPy, in some milliseconds per row and hundred thousand vocabulary tokens. On a GPU
the logits of these rows are first copied to the host, and the launch waits for that. Other rows of the step
are sampled on the device as usual. A step without such rows is not affected.

1. Allowed tokens, biases and bad words are applied first, then the request's own functions, then the samplers
   in their order, then one token is drawn. A grammar's mask was applied before.
2. The draw uses the same random number as the batch sampler would, so it depends only on seed,
   position and logits. Tokens that verify drafts are drawn the same way, so drafts change no
   answer.
3. Mirostat has a state, `Row.mirostat_mu`. It is sent to the scheduler with each token (`SamplerState`), and
   comes back with a request that was preempted. Such requests have no drafts.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from slipstream.kernels.cpu.arrays import array
from slipstream.kernels.cpu.sampling import samplers
from slipstream.kernels.cpu.sampling.row_draw import Floats, Longs, draw
from slipstream.kernels.cpu.sampling.sampling import apply_bias, uniform
from slipstream.messages.steps import Extra, RequestFailure, SamplerState
from slipstream.params.checks import SAMPLERS
from slipstream.params.sampling import SamplingParams
from slipstream.worker.inputs.input_batch import SampledRows
from slipstream.worker.inputs.rows import Row, RowTable
from slipstream.worker.sampling.biases import biases_of, limits_of, positions_of

_logger = logging.getLogger("slipstream.engine")

XTC_SALT = 0x5851F42D4C957F2D
"""Salt for a seed, for the separate random number that decides whether XTC acts."""


class Chained(NamedTuple):
    """Result of `draw_chained`: tokens [M] of some of a step's positions, and details to report for
    their requests."""

    tokens: Longs
    extras: list[Extra]


def places(table: RowTable, sampled: SampledRows) -> list[int]:
    """Indices, among the N sampled positions, of those that are sampled here."""
    if not table.wanted("chain", sampled.names):
        return []
    chained = table.wanting["chain"]
    return [i for i, name in enumerate(sampled.request_ids) if name in chained]


def draw_chained(
    table: RowTable, sampled: SampledRows, which: Sequence[int], logits: Floats
) -> Chained:
    """Sample tokens at the `places` of `sampled` from their logits [M, V], which are overwritten."""
    chained = table.wanting["chain"]
    own = SampledRows(
        requests=tuple([s for s in sampled.requests if s.request_id in chained]),
        rows=sampled.rows[which],
        positions=sampled.positions[which],
    )
    names, extras = own.names, list[Extra]()
    apply_bias(logits, limits_of(table, own, names), biases_of(table, own, names))
    found = list(positions_of(table, own, "chain", names))
    longest = max(end for *_, end in found)
    history = array(table.of_rows(table.tokens[:, :longest], own.rows))
    tokens = np.empty(len(found), np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        for (i, row, end), name in zip(found, own.request_ids, strict=True):
            try:
                tokens[i] = _draw_row(row, logits[i], history[i, :end].astype(np.int64))
            except _ProcessorError as error:
                _logger.warning("%s", error)
                tokens[i] = 0
                extras.append(RequestFailure(name, str(error)))
            if row.sampling.mirostat_mode:
                extras.append(SamplerState(name, row.mirostat_mu))
    return Chained(tokens, extras)


def _draw_row(row: Row, logits: Floats, tokens: Longs) -> int:
    """Sample the token after `tokens` [L]."""
    params, counter = row.sampling, np.array([len(tokens)])
    for given in params.logits_processors:
        # by a grammar or a list of allowed tokens; a function can't allow these again
        masked = logits == -np.inf
        logits[:] = np.where(
            masked, -np.inf, _processed(given, tokens, row.num_prompt_tokens, logits)
        )
    samplers.drop_forbidden(logits)
    if params.speech is not None:
        samplers.speech(logits, tokens[row.num_prompt_tokens :], params.speech)
    seed = np.array([row.seed], np.int64)
    u_xtc = float(uniform(seed ^ XTC_SALT, counter)[0]) if params.xtc_probability else 1.0
    apply_samplers(logits, tokens, row.num_prompt_tokens, params, u_xtc)
    if params.temperature == 0.0:
        return int(logits.argmax())
    if params.mirostat_mode:
        samplers.mirostat(logits, row.mirostat_mu)
    token = draw(logits, np.float32(1.0), 0, 1.0, 0.0, float(uniform(seed, counter)[0]))
    if params.mirostat_mode:
        row.mirostat_mu = samplers.mirostat_mu(
            logits, token, row.mirostat_mu, params.mirostat_tau, params.mirostat_eta
        )
    return token


def apply_samplers(
    logits: Floats, tokens: Longs, num_prompt: int, p: SamplingParams, u_xtc: float
) -> None:
    """Apply all samplers of `p` to logits [V], in its order.

    With temperature 0 only samplers that change logits are applied, because the others never remove
    the most likely token.
    """
    steps: dict[str, Callable[[], None]] = {
        "penalties": lambda: samplers.penalties(
            logits,
            tokens,
            num_prompt,
            repetition=p.repetition_penalty,
            presence=p.presence_penalty,
            frequency=p.frequency_penalty,
        ),
        "dry": lambda: samplers.dry(
            logits,
            tokens,
            multiplier=p.dry_multiplier,
            base=p.dry_base,
            allowed_length=p.dry_allowed_length,
            last_n=p.dry_penalty_last_n,
            breakers=np.array(p.dry_breaker_token_ids, np.int64),
        ),
        "no_repeat_ngram": lambda: samplers.no_repeat_ngram(logits, tokens, p.no_repeat_ngram_size),
        "temperature": lambda: samplers.temperature(logits, p.temperature),
        "top_n_sigma": lambda: samplers.top_n_sigma(logits, p.top_n_sigma),
        "min_p": lambda: samplers.min_p(logits, p.min_p),
        "top_k": lambda: samplers.top_k(logits, p.top_k),
        "typ_p": lambda: samplers.typical(logits, p.typical_p),
        "top_p": lambda: samplers.top_p(logits, p.top_p),
        "xtc": lambda: samplers.xtc(logits, p.xtc_probability, p.xtc_threshold, u_xtc),
    }
    changing = ("penalties", "dry", "no_repeat_ngram")
    for name in SAMPLERS if p.samplers is None else p.samplers:
        if p.takes(name) and (p.temperature > 0.0 or name in changing):
            steps[name]()


class _ProcessorError(Exception):
    """A request's own function failed."""


def _processed(given: Any, tokens: Longs, num_prompt: int, logits: Floats) -> Floats:
    name = given if isinstance(given, str) else getattr(given, "__qualname__", repr(given))
    try:
        function = processor(given) if isinstance(given, str) else given
        found = np.asarray(
            function(tokens[:num_prompt].tolist(), tokens[num_prompt:].tolist(), logits), np.float32
        )
    except Exception as error:
        raise _ProcessorError(
            f"logits_processors: {name}: {type(error).__name__}: {error}"
        ) from error
    if found.shape != logits.shape:
        raise _ProcessorError(
            f"logits_processors: {name} returned {found.shape} for logits {logits.shape}"
        )
    if np.isnan(found).any() or found.max() == -np.inf or found.max() == np.inf:
        raise _ProcessorError(
            f"logits_processors: {name} left no token that can be drawn, or returned NaN or infinity"
        )
    return found


@lru_cache(maxsize=256)
def processor(name: str) -> Callable[..., Any]:
    """Import the function named "module:function"."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is no function")
    made: Callable[..., Any] = found
    return made
