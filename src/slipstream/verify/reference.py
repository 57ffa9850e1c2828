"""The reference model: token ids of a conversation, and the probability of each next token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from slipstream.config import EngineArgs
from slipstream.evals.scorer import Scorer
from slipstream.verify.served import Message, ServedToken


class Reference:
    """A model as a `Scorer` runs it. Computes one sequence at a time."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.tokenizer = scorer.tokenizer

    @classmethod
    def load(cls, args: EngineArgs, *, context: int) -> Reference:
        """Load the model of `args` with room for `context` tokens. Raises the errors of `Scorer.load`."""
        return cls(Scorer.load(args, context=context))

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Token ids by their bytes; of several the first. Special tokens have no bytes in answers."""
        found: dict[bytes, int] = {}
        for token_id in range(self.tokenizer.vocab_size):
            found.setdefault(self.tokenizer.token_bytes(token_id), token_id)
        found.pop(b"", None)
        return found

    @cached_property
    def never(self) -> Tensor:
        """Mask [V], True for tokens that `answer_ids` never returns."""
        found = torch.ones(self.scorer.spec.vocab_size, dtype=torch.bool)
        found[list(self._ids.values())] = False
        found[list(self.tokenizer.eos_token_ids)] = True
        return found

    @property
    def has_tools(self) -> bool:
        """Whether the model's chat template supports tools."""
        return "tools" in (self.tokenizer.tool_template or "")

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation in the model's own chat format."""
        text = self.tokenizer.apply_chat_template(messages)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> str:
        """The model's own greedy answer."""
        found = self.scorer.greedy(prompt, num_tokens)
        return self.tokenizer.decode(found, skip_special_tokens=True)

    def token_id(self, data: bytes) -> int | None:
        return self._ids.get(data)

    def answer_ids(self, tokens: Sequence[ServedToken]) -> list[int]:
        """Token ids of an answer, up to the first token that is not in the model's vocabulary or ends the answer."""
        found: list[int] = []
        for token in tokens:
            token_id = self.token_id(token.data)
            if token_id is None or token_id in self.tokenizer.eos_token_ids:
                break
            found.append(token_id)
        return found

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Log-probabilities float32 [len(answer), V], on the CPU, at the positions of the answer's
        tokens."""
        hidden = self.scorer.hidden([*prompt, *answer[:-1]])[len(prompt) - 1 :]
        rows = [
            self.scorer.logits(hidden[part]).log_softmax(-1).cpu()
            for part in self.scorer.rows(len(hidden))
        ]
        return torch.cat(rows)
