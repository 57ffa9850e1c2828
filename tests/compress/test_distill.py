"""Distillation: what the losses are, that they fall on held-out text, and that an interrupted run goes on as it was."""

from __future__ import annotations

import math
import multiprocessing
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from torch.nn import functional as F

from slipstream import LLM
from slipstream.compress.dense import load_dense
from slipstream.compress.prune import prune
from slipstream.compress.steps import DistillSettings, PruneSettings
from slipstream.compress.training import objective
from slipstream.compress.training.distill import (
    DistillFiles,
    DistillTraining,
    distill,
    distill_files,
)
from slipstream.compress.training.objective import (
    TappedOps,
    TopK,
    attention_weights,
    divergence,
    layer_pairs,
    token_losses,
)
from slipstream.compress.training.teacher import (
    WHY,
    Example,
    LogitCache,
    cache_logits,
    read_examples,
    teacher_examples,
    text_examples,
    write_examples,
)
from slipstream.errors import CheckpointError, ConfigError
from slipstream.model.sequences import SequenceBatch, WholeModel
from tests.support import tiny_models

CPU = torch.device("cpu")
torch.manual_seed(0)
WINDOWS = torch.randint(4, tiny_models.VOCAB, (12, 24)).tolist()
EXAMPLES, HELD_OUT = text_examples(WINDOWS[:8]), text_examples(WINDOWS[8:])
FAST = DistillSettings(
    num_steps=12,
    batch_size=4,
    micro_batch=2,
    learning_rate=3e-3,
    dtype="float32",
    eval_every=4,
    save_every=3,
    warmup=0.1,
)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher")
    tiny_models.write_with_tokenizer(path, num_hidden_layers=4, initializer_range=0.1)
    return load_dense(path, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def student(teacher):
    return prune(
        teacher, PruneSettings(drop_layers=(1, 2), channels=0.5, importance="magnitude", multiple=8)
    ).model


# --- Losses -------------------------------------------------------------------------------------------------------------


def test_divergences_equal_torchs():
    p, q = (torch.randn(5, 7).log_softmax(-1) for _ in range(2))
    assert torch.allclose(
        divergence("forward", p, q), F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    )
    assert torch.allclose(divergence("reverse", p, q), divergence("forward", q, p))
    js = divergence("js", p, q)
    assert torch.allclose(js, divergence("js", q, p))
    assert bool(((js > 0) & (js < math.log(2))).all())
    assert torch.allclose(divergence("js", p, p), torch.zeros(5), atol=1e-6)


@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_token_losses_are_those_of_the_whole_in_pieces(kind, monkeypatch):
    monkeypatch.setattr(objective, "LOGITS_BYTES", 4 * 11 * 50)
    count = 107
    head, theirs, hidden = torch.randn(11, 6), torch.randn(count, 11), torch.randn(count, 6)
    targets, weights = torch.randint(11, (count,)), torch.rand(count)
    grads = []
    for whole in (True, False):
        h = hidden.clone().requires_grad_()
        if whole:
            logits = h @ head.T
            pair = (theirs / 2).log_softmax(-1), (logits / 2).log_softmax(-1)
            div = (divergence(kind, *pair) * weights).sum() * 4
            nll = (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
        else:
            div, nll = token_losses(
                lambda x: x @ head.T,
                h,
                lambda rows: theirs[rows],
                targets,
                weights,
                vocab_size=11,
                kind=kind,
                temperature=2.0,
            )
        (div + 2 * nll).backward()
        grads.append((div.detach(), nll.detach(), h.grad))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_top_k_is_a_lower_bound_and_exact_when_it_is_all():
    p, q = (3 * torch.randn(50, 9)).log_softmax(-1), torch.randn(50, 9).log_softmax(-1)
    exact, last = divergence("forward", p, q), torch.zeros(50)
    for k in (1, 4, 8):
        values, ids = p.topk(k)
        found = divergence("forward", *TopK(ids, values).outcomes(q))
        assert bool((found <= exact + 1e-5).all())
        assert bool((found >= last - 1e-5).all())
        last = found
    torch.testing.assert_close(last, exact, rtol=1e-4, atol=1e-4)  # eight of nine leave one outcome


# --- Training -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"divergence": "reverse", "temperature": 2.0},
        {"divergence": "js", "recompute": True},
        {"nll_weight": 0.01, "dtype": "bfloat16"},
        {"state_weight": 1.0, "attention_weight": 1.0, "recompute": True},
    ],
    ids=str,
)
def test_a_student_comes_nearer_on_held_out_text(teacher, student, changes):
    before = DistillTraining(
        student, teacher, EXAMPLES, FAST, device=CPU, held_out=HELD_OUT
    ).evaluate()[0]
    settings = replace(FAST, num_steps=40, eval_every=10, **changes)
    found = distill(student, teacher, EXAMPLES, settings, device=CPU, held_out=HELD_OUT)
    assert len(found.history) == 40
    assert found.history[-1].held_out_kl < 0.8 * before
    assert found.history[-1].loss < found.history[0].loss
    if "state_weight" in changes:
        assert found.history[-1].states < found.history[0].states
        assert found.history[-1].attention < found.history[0].attention
    assert [r.held_out_kl is not None for r in found.history] == [
        (r.step + 1) % 10 == 0 for r in found.history
    ]
    assert max(found.history[0].rate, 5 * found.history[-1].rate) < settings.learning_rate


def test_micro_batches_change_nothing(teacher, student):
    settings = replace(FAST, num_steps=3, state_weight=0.3)
    runs = [
        distill(student, teacher, EXAMPLES, replace(settings, micro_batch=m), device=CPU)
        for m in (1, 4)
    ]
    for a, b in zip(*(run.history for run in runs), strict=True):
        assert a.divergence == pytest.approx(b.divergence, rel=1e-4)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-3)


def test_an_interrupted_run_goes_on_bit_for_bit(teacher, student, tmp_path):
    settings = replace(FAST, state_weight=0.5)
    whole = distill(student, teacher, EXAMPLES, settings, device=CPU, held_out=HELD_OUT)
    training = DistillTraining(
        student, teacher, EXAMPLES, settings, device=CPU, held_out=HELD_OUT, work=tmp_path
    )
    for record in training.run():
        if record.step == 7:  # the state of step 6 is on disk
            break
    found = distill(
        student, teacher, EXAMPLES, settings, device=CPU, held_out=HELD_OUT, work=tmp_path
    )
    assert found.history == whole.history
    assert all(torch.equal(found.model.parameters[n], p) for n, p in whole.model.parameters.items())
    assert [f.name for f in tmp_path.glob("*.safetensors")] == ["state-12.safetensors"]
    with pytest.raises(CheckpointError, match="other settings"):
        distill(student, teacher, EXAMPLES, replace(settings, seed=1), device=CPU, work=tmp_path)


def test_every_example_comes_once_an_epoch(teacher, student):
    training = DistillTraining(student, teacher, EXAMPLES, FAST, device=CPU)
    first, second = [
        [i for s in steps for i in training.epochs.indices(s)] for steps in ((0, 1), (2, 3))
    ]
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert training.epochs.indices(0) + training.epochs.indices(1) == first


def test_logits_on_disk_do_as_the_teacher(teacher, student, tmp_path):
    """All but one token's are kept here; fewer give less than the whole divergence."""
    model = WholeModel(teacher.spec, teacher.parameters, max_len=32)
    settings = replace(FAST, num_steps=3)
    cache = cache_logits(model, EXAMPLES, tmp_path / "all", k=tiny_models.VOCAB - 1, device=CPU)
    here, kept = (
        distill(student, t, EXAMPLES, settings, device=CPU, held_out=HELD_OUT)
        for t in (teacher, cache)
    )
    for a, b in zip(here.history, kept.history, strict=True):
        assert a.divergence == pytest.approx(
            b.divergence, rel=1e-2
        )  # log-probabilities are kept in float16
    assert kept.history[-1].held_out_kl is None
    assert kept.history[-1].held_out_nll is not None
    few = cache_logits(model, EXAMPLES, tmp_path / "few", k=8, device=CPU)
    less = distill(student, few, EXAMPLES, settings, device=CPU).history[0].divergence
    assert 0 < less < here.history[0].divergence
    with pytest.raises(ConfigError, match="other examples"):
        LogitCache(tmp_path / "few", HELD_OUT)
    for changes, match in (
        ({"temperature": 2.0}, "of 1.0"),
        ({"state_weight": 1.0}, "not on disk"),
    ):
        with pytest.raises(ConfigError, match=match):
            distill(student, few, EXAMPLES, replace(settings, **changes), device=CPU)


def test_only_what_is_to_be_learnt_counts(teacher, student):
    """Context is not predicted, and a weight of 2 counts as the example twice."""
    long = [Example(token_ids=e.token_ids, num_context=20, weight=2.0) for e in EXAMPLES[:2]]
    training = DistillTraining(
        student, teacher, [*long, *EXAMPLES[2:4]], replace(FAST, batch_size=4), device=CPU
    )
    record = next(training.run())
    with torch.no_grad():
        total = count = 0.0
        for e in [*long, *long, *EXAMPLES[2:4]]:
            batch = SequenceBatch.of([e.token_ids], CPU)
            a, b = (
                WholeModel(m.spec, m.parameters, max_len=32)(batch).log_softmax(-1)
                for m in (teacher, student)
            )
            total += divergence("forward", a, b)[e.num_context - 1 : -1].sum().item()
            count += len(e.token_ids) - e.num_context
    assert record.divergence == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("gemma2", {"attn_logit_softcapping": 5.0}), ("mistral", {}), ("bloom", {})],
)
def test_attention_is_what_the_ops_compute(family, changes, tmp_path):
    """The weights times the values equal the op's result."""
    tiny_models.write(tmp_path, family, **changes)
    model = load_dense(tmp_path, dtype=torch.float32, device=CPU)
    ops, batch, count = TappedOps(), SequenceBatch.of([WINDOWS[0], WINDOWS[1][:9]], CPU), 0

    def tap(q, kv, meta, params):
        nonlocal count
        ops.tap, count = None, count + 1
        out = ops.attention(q, kv, meta, params).split(batch.lengths)
        ops.tap = tap
        for i, weights in enumerate(attention_weights(q, kv, params, batch.lengths)):
            values = kv.v[i, :, : batch.lengths[i]].repeat_interleave(
                q.shape[1] // kv.v.shape[1], 0
            )
            torch.testing.assert_close(
                torch.einsum("hnl,hld->nhd", weights, values), out[i], rtol=1e-4, atol=1e-5
            )

    ops.tap = tap
    with torch.no_grad():
        WholeModel(model.spec, model.parameters, max_len=32, ops=ops)(batch)
    assert count == model.spec.num_layers


def test_layers_are_paired():
    assert layer_pairs(2, 4) == [(0, 1), (1, 3)]
    assert layer_pairs(3, 3) == [(0, 0), (1, 1), (2, 2)]
    assert layer_pairs(2, 4, (0, 3)) == [(0, 0), (1, 3)]
    assert layer_pairs(4, 2) == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_examples_are_kept(tmp_path):
    examples = [Example(token_ids=(1, 2, 3), num_context=2, weight=0.5)]
    write_examples(tmp_path / "a.jsonl", examples)
    assert read_examples(tmp_path / "a.jsonl") == examples
    write_examples(tmp_path / "b.jsonl", [Example(token_ids=(1, 2), num_context=2)])
    with pytest.raises(ConfigError, match="nothing to learn"):
        read_examples(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_steps": 0}, "at least 1"),
        ({"divergence": "l2"}, "forward, reverse, js"),
        ({"temperature": 0.0}, "above 0"),
        ({"divergence_weight": 0.0}, "every weight"),
        ({"warmup": 2.0}, "share"),
        ({"nll_weight": -1.0}, "0 or more"),
    ],
    ids=str,
)
def test_settings_are_checked(changes, match):
    with pytest.raises(ConfigError, match=match):
        replace(FAST, **changes).check()


def test_another_vocabulary_is_refused(teacher, tmp_path):
    tiny_models.write(tmp_path, vocab_size=100)
    with pytest.raises(ConfigError, match="share them"):
        distill(
            load_dense(tmp_path, dtype=torch.float32, device=CPU),
            teacher,
            EXAMPLES,
            FAST,
            device=CPU,
        )


@pytest.fixture
def files(teacher, student, tmp_path):
    student.write(tmp_path / "student")
    write_examples(tmp_path / "train.jsonl", EXAMPLES)
    write_examples(tmp_path / "held.jsonl", HELD_OUT)
    return DistillFiles(
        teacher=teacher.source.path,
        student=tmp_path / "student",
        examples=tmp_path / "train.jsonl",
        held_out=tmp_path / "held.jsonl",
        out=tmp_path / "out",
        work=tmp_path / "work",
    )


def test_from_folder_to_folder(files):
    history = distill_files(files, FAST, device="cpu")
    found = load_dense(files.out, dtype=torch.float32, device=CPU)
    assert (files.out / "tokenizer.json").is_file()
    assert found.spec == load_dense(files.student, dtype=torch.float32, device=CPU).spec
    drawn = (files.out / "distill.svg").read_text()
    assert drawn.count("<polyline") == 3
    ElementTree.fromstring(drawn)
    assert [r.step for r in history] == list(range(12))


def test_two_processes_do_the_same_steps(files, teacher, student, monkeypatch):
    """Sharded layer by layer (FSDP2), over gloo, interrupted and continued."""
    monkeypatch.setenv(
        "OMP_NUM_THREADS", "1"
    )  # of the two processes, which are forks of one that has imported all
    multiprocessing.set_forkserver_preload(
        ["slipstream.compress.training.distill", "torch.distributed.fsdp"]
    )
    spawn = sys.modules["torch.multiprocessing.spawn"]
    start = spawn.start_processes
    monkeypatch.setattr(
        spawn, "start_processes", lambda f, **how: start(f, **how | {"start_method": "forkserver"})
    )
    settings = replace(
        FAST, num_steps=4, state_weight=0.5, attention_weight=0.5, recompute=True, save_every=2
    )
    alone = distill(student, teacher, EXAMPLES, settings, device=CPU, held_out=HELD_OUT)
    training = DistillTraining(
        student, teacher, EXAMPLES, settings, device=CPU, held_out=HELD_OUT, work=files.work
    )
    for record in training.run():
        if record.step == 2:
            break
    together = distill_files(files, settings, device="cpu", num_processes=2)
    for a, b in zip(alone.history, together, strict=True):
        for name in ("loss", "divergence", "states", "attention", "grad_norm", "rate"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-3), name
    assert alone.history[-1].held_out_kl == pytest.approx(together[-1].held_out_kl, rel=1e-3)


def test_the_teacher_makes_examples(teacher):
    with LLM(str(teacher.source.path), device="cpu", kernels="reference", max_model_len=256) as llm:
        found = teacher_examples(llm, ["a?", "b?"], max_tokens=5, rationale_weight=0.5)
        tokenizer = llm.get_tokenizer()
    assert [e.weight for e in found] == [1.0, 1.0, 0.5, 0.5]
    for example, question in zip(found, ["a?", "b?", WHY + "a?", WHY + "b?"], strict=True):
        given = tokenizer.decode(
            example.token_ids[: example.num_context], skip_special_tokens=False
        )
        assert question in given
        assert given.endswith("assistant\n")
        assert 1 <= len(example.token_ids) - example.num_context <= 5


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_a_hybrid_comes_nearer_to_its_teacher(family, tmp_path):
    """States are matched in all layers, attention in those that have it."""
    tiny_models.write(tmp_path / "teacher", family)
    tiny_models.write(tmp_path / "student", family, seed=1)
    big, small = (
        load_dense(tmp_path / name, dtype=torch.float32, device=CPU)
        for name in ("teacher", "student")
    )
    chosen = replace(FAST, num_steps=20, state_weight=1.0, attention_weight=1.0)
    history = distill(small, big, EXAMPLES, chosen, device=CPU).history
    assert history[-1].loss < 0.8 * history[0].loss
    assert history[-1].states < history[0].states
    assert (history[-1].attention > 0) == (family != "mamba2")
