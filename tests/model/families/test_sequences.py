"""The decoder under autograd: logits and gradients of every family against transformers', on tiny random models."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.kernels.plain.autograd import AutogradOps
from slipstream.model.load.checkpoint import place
from slipstream.model.load.weights import load_parameters
from slipstream.model.sequences import SequenceBatch, WholeModel
from slipstream.spec.description import read_spec
from slipstream.spec.parameters import Scale
from slipstream.spec.scheme import SCHEMES
from tests.model.families.test_families import CASES, TOKENS
from tests.support import tiny_models

CPU = torch.device("cpu")
SEQUENCES = [TOKENS[:19], TOKENS[20:21], TOKENS[21:50]]


def whole(path, **options):
    description = read_spec(path)
    values = load_parameters(description, dtype=torch.float32, device=CPU)
    return WholeModel(description.spec, values, max_len=64, **options)


def loss_of(model, sequences):
    """The mean negative log-likelihood of each token after the one before it."""
    batch = SequenceBatch.of(sequences, CPU)
    logits = model(batch)
    keep = ~batch.starts()[1:]
    return F.cross_entropy(logits[:-1][keep], batch.token_ids[1:][keep])


def their_loss(theirs, sequences):
    logits = [theirs(torch.tensor([s])).logits[0, :-1] for s in sequences]
    targets = [torch.tensor(s[1:], dtype=torch.int64) for s in sequences]
    parts = [F.cross_entropy(x, y, reduction="sum") for x, y in zip(logits, targets, strict=True)]
    return sum(parts) / sum(len(s) - 1 for s in sequences)


SHARING = ("gemma4_text", "gemma3n_text", "gemma3n-of-two", "zamba2", "zamba2-plain")
SHARING += ("minimax_m3_vl_text",)  # an index of keys


@pytest.mark.parametrize("name", SHARING)
def test_layers_that_cannot_be_trained_are_refused_by_name(name, tmp_path):
    family, overrides = CASES[name]
    tiny_models.write(tmp_path, family, **overrides)
    with pytest.raises(UnsupportedModelError, match="can't be trained"):
        loss_of(whole(tmp_path), SEQUENCES)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (family, _) in CASES.items()
        if "q_lora_rank" not in tiny_models.FAMILIES[family]
        and not (family == "kimi_linear" or name in SHARING)
    ],
)  # latent attention is refused
def test_gradients_equal_transformers(name, tmp_path):
    """1e-4 of the largest gradient of each parameter leaves room for another order of float32 sums."""
    family, overrides = CASES[name]
    theirs = tiny_models.build(tmp_path, family, **overrides)
    ours = whole(tmp_path)
    loss, expected = loss_of(ours, SEQUENCES), their_loss(theirs, SEQUENCES)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    # Their gradients, as a checkpoint of the same names, come through the loader by our names.
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
    theirs.save_pretrained(tmp_path)
    description = read_spec(tmp_path)
    wanted = load_parameters(description, dtype=torch.float32, device=CPU)
    for placement in description.family.names(description.spec).values():
        if isinstance(
            placement.transform, Scale
        ):  # a gradient is divided by what its weight is multiplied by
            rows = torch.cat([torch.full((n,), x) for n, x in placement.transform.factors])
            part = place(wanted[placement.target], placement)
            part /= rows.view(-1, *(1,) * (part.ndim - 1)).square()
    found = dict(ours.named_parameters())
    assert found.keys() == wanted.keys()
    for key, grad in wanted.items():
        if key.endswith("correction.weight"):  # it takes part in a choice alone
            assert found[key].grad is None
            continue
        if key.endswith((".positive.weight", ".negative.weight")):  # xIELU's numbers stay
            assert found[key].grad is None
            continue
        if key.endswith("scalar.weight"):  # no parameter in transformers
            continue
        # A key's bias moves all scores of a row alike: its gradient is nothing but rounding.
        scale = max(grad.abs().max().item(), 1e-3)
        assert (found[key].grad - grad).abs().max().item() <= 2e-4 * scale, key


def test_recomputed_blocks_give_the_same_gradients(tmp_path):
    tiny_models.write(tmp_path, "gemma2", attn_logit_softcapping=5.0)
    grads = []
    for recompute in (False, True):
        model = whole(tmp_path, recompute=recompute)
        loss_of(model, SEQUENCES).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


def test_a_sequence_does_not_see_its_neighbours(tmp_path):
    tiny_models.write(tmp_path, "qwen3")
    model = whole(tmp_path)
    with torch.no_grad():
        together = model(SequenceBatch.of(SEQUENCES, CPU)).split([len(s) for s in SEQUENCES])
        for tokens, logits in zip(SEQUENCES, together, strict=True):
            torch.testing.assert_close(
                model(SequenceBatch.of([tokens], CPU)), logits, rtol=1e-5, atol=1e-5
            )


def test_bfloat16_and_autocast(tmp_path):
    """Weights in float32 and products in bfloat16, as training has them, and all in bfloat16: near the exact loss."""
    tiny_models.write(tmp_path)
    model = whole(tmp_path)
    exact = loss_of(model, SEQUENCES).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, SEQUENCES)
    loss.backward()
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )
    assert loss.item() == pytest.approx(exact, rel=0.05)
    assert loss_of(model.bfloat16(), SEQUENCES).item() == pytest.approx(exact, rel=0.05)


def test_states_of_each_layer_are_told(tmp_path):
    tiny_models.write(tmp_path)
    model, found = whole(tmp_path), []
    batch = SequenceBatch.of(SEQUENCES, CPU)
    hidden = model.hidden(batch, lambda i, state: found.append((i, state)))
    assert [i for i, _ in found] == [0, 1, 2]
    torch.testing.assert_close(model.ends().finished(found[-1][1], None), hidden)
    assert model(batch, lambda h: h.sum()).shape == ()


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ConfigError, match="no gradient"):
        AutogradOps().quantize_weight(torch.ones(2, 2), None, SCHEMES["int8"])
    with pytest.raises(ConfigError, match="one token or more"):
        SequenceBatch.of([[1], []], CPU)
