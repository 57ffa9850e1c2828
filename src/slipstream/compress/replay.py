"""Replays the engine's choice of experts in a trainer's forward pass (routing replay).

Rounding differs between the trainer's router and the engine's. At a near tie they choose different
experts, and the log-probabilities of the token differ. Under `replayed_routing` the routers of a
transformers model use the engine's experts (`CompletionOutput.routed_experts`). Expert weights are
computed by the trainer, so gradients reach the router."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from slipstream.errors import RequestError

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def replayed_routing(
    model: Any, routed_experts: Sequence[npt.NDArray[Any]], num_tokens: int
) -> Iterator[None]:
    """Make the routers of a transformers model choose given experts.

    In this context, a forward pass computes the texts whose experts are `routed_experts`, [tokens,
    layers, k] each, as rows of `num_tokens` tokens, padded at the end. The last token of an answer
    and padding have no experts; there, and where the engine knew none (−1), the router chooses itself.

    RequestError if the model's routers are not found.
    """
    import torch

    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    layers = {own.shape[1] for own in routed_experts}
    if layers != {len(routers)}:
        found = f"{len(routers)} routers (…TopKRouter) in the model"
        message = f"routed_experts are of {sorted(layers)} layers, and there are {found}"
        raise RequestError(message, field="routed_experts")
    k = routed_experts[0].shape[2]
    experts = torch.full((len(routed_experts), num_tokens, len(routers), k), -1)
    for row, own in zip(experts, routed_experts, strict=True):
        row[: len(own)] = torch.from_numpy(own.astype("int64"))

    def taking(given: torch.Tensor) -> Any:
        def hook(router: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> Any:
            logits, weights, chosen = output
            own = given.to(chosen.device)
            taken = torch.where(own >= 0, own, chosen)
            return logits, _weights(router, logits, weights, chosen, taken), taken

        return hook

    hooks = [
        router.register_forward_hook(taking(experts[:, :, i].flatten(0, 1)))
        for i, router in enumerate(routers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _weights(
    router: Any,
    logits: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    taken: torch.Tensor,
) -> torch.Tensor:
    """Weights of the chosen experts: softmax of `logits`, normalized if the router normalizes its own."""
    scores = logits.float().softmax(-1)

    def of(experts: torch.Tensor) -> torch.Tensor:
        own = scores.gather(1, experts)
        return own / own.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else own

    if not of(chosen).allclose(weights.float(), rtol=2e-2, atol=1e-3):
        message = f"{type(router).__name__} weighs experts otherwise than by a softmax; replay has no form for it"
        raise RequestError(message, field="model")
    return of(taken).to(weights.dtype)
