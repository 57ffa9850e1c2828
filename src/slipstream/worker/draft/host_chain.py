"""A draft head's whole chain on a CPU, for greedy requests. No torch.

A pass of a small head takes a few hundred µs. Gathering its inputs like a step's (`gather_pairs`)
would double that. So the chain gathers less:

1. NumPy computes the rows, positions and slots of all passes at once.
2. The first pass computes the pairs that the head has not processed. Each further pass is one call
   of the C++ program and one of its argmax, over the same buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.config.forms import LearnedDrafts
from slipstream.errors import ConfigError
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.messages.steps import ScheduledRequest
from slipstream.model.draft_heads import Passes
from slipstream.spec.drafts.heads import HeadDescription, HeadSpec, LayeredSpec
from slipstream.spec.scheme import SCHEMES, Scheme
from slipstream.spec.stored.native_formats import is_product
from slipstream.worker.inputs.input_batch import laid_out
from slipstream.worker.inputs.rows import RowTable

if TYPE_CHECKING:
    from slipstream.worker.draft.head_drafter import HeadChain

Array = npt.NDArray[Any]


def check_num_drafts(speculation: LearnedDrafts, description: HeadDescription) -> None:
    """Raise ConfigError if more drafts are wanted than the head has."""
    wanted, most = speculation.num_speculative_tokens, description.spec.most_drafts
    if most is not None and wanted is not None and wanted > most:
        raise ConfigError(
            f"speculative_config: num_speculative_tokens={wanted}, but {description.path} drafts {most}; lower it",
            field="speculative_config",
        )


def head_scheme(
    speculation: LearnedDrafts, description: HeadDescription, default: str | None, *, rows: int = 1
) -> Scheme | None:
    """Quantization scheme of a head's linear layers.

    Without a setting it is `default`, if that fits: a pass takes as long as reading its weights,
    and 8 bits hardly lower the acceptance rate. An MTP layer keeps its stored format. 8-bit linear
    layers must have outputs in multiples of `rows`. ConfigError if the user's choice does not fit.
    """
    chosen, source = speculation.quantization, description.source
    if source is not None and source.quantization is not None and source.quantization.rounds:
        if chosen in (None, "none"):
            return None
        raise ConfigError(
            f"speculative_config: quantization={chosen!r}, but the layers that draft are stored rounded; leave it out",
            field="speculative_config",
        )
    scheme = SCHEMES.get(chosen or (None if description.method == "mtp" else default) or "none")
    if scheme is None or (why := _misfit(description.spec, scheme, rows)) is None:
        return scheme
    if chosen is None:
        return None
    message = f"speculative_config: quantization={chosen!r} {why}; take another scheme, or 'none'"
    raise ConfigError(message, field="speculative_config")


ENDS = ("fc.weight", "join.weight")
"""Names of a head's linear layers outside its decoder layers, except the output head."""


def _misfit(spec: HeadSpec, scheme: Scheme, rows: int) -> str | None:
    """Reason why the scheme doesn't fit the head's linear layers; None if it does."""
    if scheme.experts_only:
        return "rounds experts alone"
    for name, shape in spec.shapes.items():
        if isinstance(spec, LayeredSpec) and not (is_product(name) or name in ENDS):
            continue
        if len(shape) < 2:
            continue
        if shape[-1] % scheme.multiple:
            return f"needs inputs in multiples of {scheme.multiple}, and {name} has {shape[-1]}"
        if scheme.inputs is not None and shape[0] % rows:
            return f"needs outputs in multiples of {rows}, and {name} has {shape[0]}"
    return None


class HostChain:
    """Chain of a head whose pass and argmax are C++ programs (`LayeredHead.is_compiled`)."""

    def __init__(self, drafter: HeadChain) -> None:
        self.drafter, self.head, self.size = drafter, drafter.head, drafter.block_size
        ids = drafter.target_ids
        self.target_ids: npt.NDArray[np.int64] | None = None if ids is None else _array(ids)

    def covers(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> bool:
        """Whether the requests are greedy, and the pairs not yet processed by the head fit into a step."""
        unseen = sum(s.num_computed_tokens + 1 - self._first(s, rows) for s in drafted)
        return unseen <= self.drafter.max_tokens and rows.is_greedy([s.request_id for s in drafted])

    def run(self, drafted: Sequence[ScheduledRequest], rows: RowTable) -> None:
        """Propose drafts, and write them to the requests' rows."""
        # Requests with one unprocessed pair come first, as attention requires.
        drafted = sorted(
            drafted, key=lambda s: s.num_computed_tokens + 1 - self._first(s, rows) > 1
        )
        tokens, tables = _array(rows.tokens), _array(rows.block_tables[0])
        which = np.array([rows.rows[s.request_id].index for s in drafted], np.int64)
        # position of each request's last token
        last = np.array([s.num_computed_tokens for s in drafted], np.int64)
        unseen = last + 1 - np.array([self._first(s, rows) for s in drafted], np.int64)
        wanted = np.array([len(s.drafts) for s in drafted], np.int64)

        # A pair is one position before its token.
        token_rows, positions, starts = laid_out(which, last - unseen, unseen)
        slots = (
            tables[token_rows, positions // self.size] * np.int64(self.size) + positions % self.size
        )
        given: dict[str, Any] = {
            "positions": positions,
            "slot_mapping": slots,
            "query_start_loc": starts.astype(np.int32),
        }
        given |= {"block_table": tables[which], "seq_lens": last.astype(np.int32)}
        given |= {
            "num_decodes": int((unseen == 1).sum()),
            "max_query_len": int(unseen.max()),
            "max_seq_len": int(last.max()),
        }
        meta = AttentionMetadata(**given)
        states = self.drafter.states.floats(slots)
        hidden, states = self.head.forward(
            tokens[token_rows, positions + 1], states, self.drafter.kv, meta
        )
        ends = starts[1:] - 1
        found, states = self._own(self.head.greedy(hidden[ends])), states[ends]
        tokens[which, last + 1] = found

        if wanted.max() > 1:
            # requests that continue are always the first ones
            order = np.argsort(-wanted, kind="stable")
            which, last, wanted = which[order], last[order], wanted[order]
            passes = self._passes(tables[which], last, wanted)
            further = self.head.go_on(
                found[order].astype(np.int32), states[order], self.drafter.kv, passes, self._own
            )
            for i, drafts in enumerate(further, 2):
                n = len(drafts)
                tokens[which[:n], last[:n] + i] = drafts

    def _passes(self, table: Array, last: Array, wanted: Array) -> Passes:
        """Inputs of the passes after the first one, one fewer than drafts.

        Beyond its own drafts a request has no blocks.
        """
        number = np.arange(1, wanted[0])[:, None]
        goes_on, positions = number < wanted, last + number - 1
        slots = (
            table[np.arange(len(last)), positions // self.size * goes_on] * np.int64(self.size)
            + positions % self.size
        )
        return Passes(
            table, positions, slots, (positions + 1).astype(np.int32), goes_on.sum(1).tolist()
        )

    def _first(self, s: ScheduledRequest, rows: RowTable) -> int:
        """Index of the request's first token that the head has not computed."""
        return max(self.drafter.first, rows.rows[s.request_id].num_drafted)

    def _own(self, found: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return found if self.target_ids is None else self.target_ids[found]


def _array(x: Any) -> Array:
    """Returns an array over the memory of a tensor or an array."""
    return x if isinstance(x, np.ndarray) else x.numpy()
