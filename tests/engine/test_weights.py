"""Weights that change in place: an update equals a fresh load, and is all or nothing."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.errors import AdapterError, CheckpointError, EngineError, RequestError
from slipstream.messages.weight_ops import FolderPiece, undoing
from slipstream.model.load import refill
from tests.support import adapters, tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = "hello, this is a prompt of more than sixteen tokens"
SIZES = dict(
    **dict(device="cpu", max_model_len=128, max_num_seqs=4, num_threads=1, block_size=16),
    kv_cache_bytes=2**21,
)


@pytest.fixture
def two(tmp_path):
    """Writes two checkpoints of one model, and returns their folders."""

    def write(family="llama", **overrides):
        for seed, name in enumerate(("old", "new")):
            tiny_models.write_with_tokenizer(tmp_path / name, family, seed=seed, **overrides)
        return tmp_path / "old", tmp_path / "new"

    return write


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def answer(llm):
    return llm.generate(PROMPT, GREEDY, progress=False)[0]


def loaded(folder, **settings):
    """(tokens, checksums) of a fresh load."""
    with LLM(str(folder), **{**SIZES, **settings}) as llm:
        return answer(llm).outputs[0].token_ids, llm.weights(checksums=True).checksums


def addresses(llm):
    decoder = llm.core.executor.runner.model.decoder
    found = refill.running_contents(decoder)
    return {name: refill.address(value) for name, value in found if refill.is_data(value)}


def update(llm, tensors, version=None, pieces=3):
    names = list(tensors)
    llm.start_weight_update()
    for i in range(pieces):
        llm.update_weights({"tensors": {name: tensors[name] for name in names[i::pieces]}})
    return llm.finish_weight_update(version)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", dict(dtype="float32")),
        ("llama", dict(dtype="bfloat16")),
        ("llama", dict(dtype="float32", kernels="reference")),
        ("llama", dict(dtype="bfloat16", kernels="reference", quantization="fp8")),
        ("llama", dict(dtype="float32", quantization="int8")),
        ("qwen3", dict(dtype="bfloat16", quantization="int4", sizes=dict(hidden_size=128))),
        ("qwen3_moe", dict(dtype="float32")),
        ("gpt2", dict(dtype="float32")),
        ("gemma3_text", dict(dtype="float32")),
        ("deepseek_v3", dict(dtype="float32")),
        ("qwen3_next", dict(dtype="float32")),
    ],
    ids=str,
)
def test_an_update_equals_a_fresh_load(two, family, settings):
    settings = dict(settings)
    sizes = settings.pop("sizes", {})
    if sizes:
        sizes |= dict(intermediate_size=128, head_dim=32)
    old, new = two(family, **sizes)
    expected, sums = loaded(new, **settings)
    with LLM(str(old), **{**SIZES, **settings}) as llm:
        before = answer(llm)
        assert before.outputs[0].token_ids != expected
        assert answer(llm).num_cached_tokens > 0 or family == "qwen3_next"
        places = addresses(llm)
        info = update(llm, tensors_of(new))
        assert addresses(llm) == places  # graphs and kernels hold them
        after = answer(llm)
        assert after.outputs[0].token_ids == expected
        assert after.num_cached_tokens == 0  # what the old weights computed is not found
        assert llm.weights(checksums=True).checksums == sums
        assert (info.weight_version, llm.weights().weight_version) == ("1", "1")
        assert before.outputs[0].weight_versions == [("0", 8)]
        assert after.outputs[0].token_weight_versions == ["1"] * 8


def test_a_folder_and_a_file_are_pieces(two, tmp_path):
    old, new = two()
    expected, sums = loaded(new, dtype="float32")
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        first, before = answer(llm).outputs[0].token_ids, llm.weights(checksums=True)
        llm.start_weight_update()
        llm.update_weights({"path": str(new)})
        assert llm.finish_weight_update("step-7").weight_version == "step-7"
        assert (answer(llm).outputs[0].token_ids, llm.weights(checksums=True).checksums) == (
            expected,
            sums,
        )
        file = tmp_path / "piece.safetensors"
        save_file(tensors_of(old), file)
        llm.start_weight_update()
        llm.update_weights({"path": str(file)})
        info = llm.finish_weight_update()
        assert answer(llm).outputs[0].token_ids == first
        assert (info.checksum, info.weight_version) == (before.checksum, "2")
        llm.sleep(1)
        llm.wake_up()
        assert answer(llm).outputs[0].weight_versions == [("2", 8)]  # it kept them
        llm.sleep(2)
        llm.wake_up()
        with pytest.raises(EngineError, match="lost"):
            answer(llm)
        assert update(llm, tensors_of(new)).weight_version == "3"
        assert answer(llm).outputs[0].token_ids == expected


def test_whatever_is_wrong_before_the_write_leaves_the_old_weights(two, tmp_path):
    old, new = two()
    tensors = tensors_of(new)
    other = tmp_path / "other"
    tiny_models.write_with_tokenizer(other, intermediate_size=96)
    missing = {n: x for n, x in tensors.items() if "layers.1.self_attn.k_proj" not in n}
    name = "model.layers.0.mlp.up_proj.weight"
    cases = [
        (missing, CheckpointError, "lacks"),
        ({**tensors, "model.layers.9.x.weight": torch.ones(2)}, CheckpointError, "no place"),
        ({**tensors, name: torch.ones(3, 32)}, CheckpointError, "up_proj"),
        ({**tensors, name: tensors[name].to(torch.int8)}, RequestError, "int8"),
    ]
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        before, sums = answer(llm).outputs[0].token_ids, llm.weights(checksums=True)

        def unchanged():
            llm.abort_weight_update()
            assert llm.weights(checksums=True) == sums
            assert answer(llm).outputs[0].token_ids == before

        for given, kind, match in cases:
            with pytest.raises(kind, match=match):
                update(llm, given)
            unchanged()
        with pytest.raises(RequestError, match="no update has begun"):
            llm.update_weights({"tensors": tensors})
        with pytest.raises(RequestError, match="no update has begun"):
            llm.finish_weight_update()
        llm.start_weight_update()
        with pytest.raises(RequestError, match="under way"):
            llm.start_weight_update()
        llm.update_weights({"tensors": {name: tensors[name]}})
        with pytest.raises(RequestError, match="come already"):
            llm.update_weights({"tensors": {name: tensors[name]}})
        with pytest.raises(RequestError, match="folder has all"):
            llm.update_weights({"path": str(new)})
        unchanged()
        llm.start_weight_update()
        with pytest.raises(CheckpointError, match="layers"):
            llm.update_weights({"path": str(other)})
        unchanged()


def test_a_piece_that_is_refused_leaves_nothing_of_itself(two, tmp_path):
    old, new = two()
    tensors = tensors_of(new)
    names = list(tensors)
    file = tmp_path / "some.safetensors"
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        llm.start_weight_update()
        with pytest.raises(CheckpointError):
            llm.update_weights({"path": str(tmp_path / "mistyped")})
        llm.update_weights({"tensors": {names[2]: tensors[names[2]]}})
        with pytest.raises(RequestError, match="come already"):
            llm.update_weights({"tensors": {n: tensors[n] for n in names[:3]}})
        for dtype in (torch.int64, torch.bool, torch.float64, torch.float8_e5m2):
            save_file({n: x.to(dtype) for n, x in tensors.items() if n != names[2]}, file)
            with pytest.raises(RequestError, match="send one of"):
                llm.update_weights({"path": str(file)})
        llm.update_weights({"tensors": {n: x for n, x in tensors.items() if n != names[2]}})
        llm.finish_weight_update()


def test_a_piece_that_another_rank_could_not_take_is_undone(two):
    old, new = two()
    tensors = tensors_of(new)
    (undo,) = undoing(FolderPiece(str(new)))
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        change = llm.core.executor.change_weights
        llm.start_weight_update()
        llm.update_weights({"path": str(new)})
        change(undo)
        names = list(tensors)
        llm.update_weights({"tensors": {n: tensors[n] for n in names[:2]}})
        llm.update_weights({"tensors": {n: tensors[n] for n in names[2:4]}})
        change(undo)  # the last one alone
        change(undo)
        llm.update_weights({"tensors": {n: tensors[n] for n in names[2:]}})
        llm.finish_weight_update()


def test_a_file_that_is_cut_after_it_came_is_an_error(two, tmp_path):
    old, new = two()
    file = tmp_path / "all.safetensors"
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        for change in (
            lambda: os.truncate(file, 100),
            lambda: os.utime(file, ns=(1, 1)),
            lambda: file.write_bytes(b"x"),
        ):
            save_file(tensors_of(new), file)
            llm.start_weight_update()
            llm.update_weights({"path": str(file)})
            change()
            with pytest.raises(CheckpointError, match="was changed"):
                llm.finish_weight_update()
            llm.abort_weight_update()
        llm.start_weight_update()
        with pytest.raises(CheckpointError, match="can't be read"):
            llm.update_weights({"path": str(file)})
        llm.abort_weight_update()


def test_an_error_that_nobody_expected_is_an_engine_error_before_the_write(two, monkeypatch):
    old, new = two()
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        before = answer(llm).outputs[0].token_ids
        llm.start_weight_update()
        llm.update_weights({"path": str(new)})

        def full(self):
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(refill.Refill, "check", full)
            with pytest.raises(EngineError, match="no room"):
                llm.finish_weight_update()
        assert answer(llm).outputs[0].token_ids == before
        llm.finish_weight_update()


def test_declared_tensors_are_checked_before_they_come(two):
    old, new = two()
    tensors = tensors_of(new)

    def told(some):
        return {
            "names": list(some),
            "dtype_names": [str(x.dtype).removeprefix("torch.") for x in some.values()],
            "shapes": [list(x.shape) for x in some.values()],
        }

    first, *others = tensors
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        with pytest.raises(CheckpointError, match="lacks") as error:
            llm.start_weight_update(told({n: tensors[n] for n in others}))
        assert error.value.field == first
        info = llm.start_weight_update({"update_info": told(tensors)})
        assert info.is_updating
        llm.update_weights({"tensors": {n: tensors[n] for n in others}})
        with pytest.raises(RequestError, match="have not come"):
            llm.finish_weight_update()
        with pytest.raises(RequestError, match="not declared"):
            llm.update_weights({"tensors": {"x": torch.ones(2)}})
        with pytest.raises(RequestError, match="declared as"):
            llm.update_weights({"tensors": {first: torch.ones(2)}})
        llm.update_weights({"tensors": {first: tensors[first]}})
        assert llm.finish_weight_update().weight_version == "1"
        assert not llm.weights().is_updating


def test_a_version_is_used_once(two):
    old, new = two()
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        update(llm, tensors_of(new), "a")
        for version in ("a", "0", "", "x" * 201, "a\n"):
            with pytest.raises(RequestError, match="weight_version"):
                update(llm, tensors_of(old), version)
            llm.abort_weight_update()
        assert update(llm, tensors_of(old)).weight_version == "2"


def test_a_write_that_fails_halfway_takes_no_requests_until_a_whole_update(two, monkeypatch):
    old, new = two()
    expected, _ = loaded(new, dtype="float32")
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        whole = refill.Refill._modules

        def cut(self, weights):
            yield next(whole(self, weights))
            raise OSError("the disk is gone")

        with monkeypatch.context() as patch:
            write = refill.Refill.write
            patch.setattr(
                refill.Refill,
                "write",
                lambda self: (patch.setattr(refill.Refill, "_modules", cut), write(self)),
            )
            with pytest.raises(EngineError, match="the disk is gone"):
                update(llm, tensors_of(new))
        assert "disk" in llm.weights().broken
        with pytest.raises(EngineError, match="failed while it was written"):
            answer(llm)
        update(llm, tensors_of(new))
        assert not llm.weights().broken
        assert answer(llm).outputs[0].token_ids == expected


def test_an_interrupted_write_is_not_served(two, monkeypatch):
    old, new = two()
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        write = refill.Refill.write

        def interrupted(self):
            write(self)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(refill.Refill, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                update(llm, tensors_of(new))
        assert "KeyboardInterrupt" in llm.weights().broken
        with pytest.raises(EngineError, match="failed while it was written"):
            answer(llm)
        update(llm, tensors_of(new))
        assert answer(llm).outputs[0].weight_versions == [("1", 8)]


def test_a_form_that_would_change_is_refused_before_anything_is_written(two):
    """int8 weights with many zeros are held without them: another size."""
    old, new = two()
    sparse = {
        n: torch.where(x.abs() < 0.9 * x.abs().max(), 0.0, x) for n, x in tensors_of(new).items()
    }
    with LLM(str(old), dtype="float32", quantization="int8", **SIZES) as llm:
        before = llm.weights(checksums=True).checksums
        with pytest.raises(CheckpointError, match="can't be written in place"):
            update(llm, sparse)
        assert llm.weights(checksums=True).checksums == before


def test_forms_that_have_no_place_of_their_own_are_refused_at_the_start(two):
    old, _ = two()
    with (
        LLM(str(old), dtype="float32", kernels="torch", **SIZES) as llm,
        pytest.raises(RequestError, match="oneDNN"),
    ):
        llm.start_weight_update()


def test_a_trainer_may_change_its_tensors_after_it_has_sent_them(two):
    old, new = two()
    expected, _ = loaded(new, dtype="float32")
    tensors = tensors_of(new)
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        llm.start_weight_update()
        llm.update_weights({"tensors": tensors})
        for value in tensors.values():
            value.zero_()
        llm.finish_weight_update()
        assert answer(llm).outputs[0].token_ids == expected


def test_names_of_unknown_fields_are_told(two):
    old, _ = two()
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        llm.start_weight_update()
        with pytest.raises(RequestError, match="no field 'tensor'"):
            llm.update_weights({"tensor": {}})
        with pytest.raises(RequestError, match="differ in length"):
            llm.update_weights({"names": ["a"], "dtype_names": [], "shapes": []})
        with pytest.raises(RequestError, match="no group"):
            llm.update_weights({"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]})
        for two_ways in ({"tensors": {}, "path": "x"}, {"path": "x", "names": ["a"]}):
            with pytest.raises(RequestError, match="send one or the other"):
                llm.update_weights(two_ways)


BOUND = 1e-4
"""Largest difference of a sampled token's log-probability from transformers', float32, in nats. Sums of 32 products are
rounded in another order; the largest seen is 1e-5."""


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_sampled_log_probabilities_are_the_trainers(tmp_path, family):
    """Ids in, ids and log-probabilities out, at a temperature, before and after an update."""
    policy = tiny_models.build_with_tokenizer(tmp_path, family)
    prompts = [{"prompt_token_ids": [5, 9, 200, 31, 7][:n]} for n in (1, 3, 5)]
    sampling = SamplingParams(temperature=0.8, top_k=50, max_tokens=12, logprobs=0, seed=1)

    def largest_difference(llm):
        found = 0.0
        for answer in llm.generate(prompts, sampling, progress=False):
            (output,) = answer.outputs
            ids = torch.tensor([answer.prompt_token_ids + output.token_ids])
            with torch.no_grad():
                logits = policy(ids).logits[0, len(answer.prompt_token_ids) - 1 : -1].float()
            theirs = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])
            ours = torch.tensor([p.chosen.logprob for p in output.logprobs])
            found = max(found, (ours - theirs[:, 0]).abs().max().item())
        return found

    with LLM(str(tmp_path), dtype="float32", **SIZES) as llm:
        assert largest_difference(llm) < BOUND
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.1 * parameter.std(correction=0) * torch.randn_like(parameter))
        assert largest_difference(llm) > 100 * BOUND  # stale weights are seen
        policy.save_pretrained(tmp_path)
        update(llm, tensors_of(tmp_path))
        assert largest_difference(llm) < BOUND


def test_an_adapter_is_replaced_in_place(tmp_path):
    """A trainer of an adapter sends its deltas alone; what the old one computed is not found."""
    tiny_models.write_with_tokenizer(tmp_path / "model")
    for seed in (1, 2):
        policy = tiny_models.build(tmp_path / "scratch")
        adapters.write(policy, tmp_path / f"delta-{seed}", seed=seed)
    (tmp_path / "nothing").mkdir()
    how = dict(SIZES, dtype="float32", enable_lora=True, max_lora_rank=16)

    def asked(llm, lora):
        return llm.generate(PROMPT, GREEDY, progress=False, lora_request=lora)[0]

    with LLM(str(tmp_path / "model"), **how) as llm:
        second = asked(llm, LoRARequest("own", 1, tmp_path / "delta-2"))
    with LLM(str(tmp_path / "model"), **how) as llm:
        plain = answer(llm).outputs[0].token_ids
        own = LoRARequest("own", 1, tmp_path / "delta-1")
        with pytest.raises(AdapterError, match="could be replaced"):
            llm.load_adapter(own, load_inplace=True)
        first = asked(llm, own)
        assert asked(llm, own).num_cached_tokens > 0
        with pytest.raises(AdapterError):
            llm.load_adapter(LoRARequest("own", 1, tmp_path / "nothing"), load_inplace=True)
        assert asked(llm, own).outputs[0].token_ids == first.outputs[0].token_ids
        new = LoRARequest("own", 1, tmp_path / "delta-2")
        llm.load_adapter(new, load_inplace=True)
        found = asked(llm, new)
        assert (
            found.outputs[0].token_ids == second.outputs[0].token_ids != first.outputs[0].token_ids
        )
        assert found.num_cached_tokens == 0
        assert asked(llm, own).outputs[0].token_ids == second.outputs[0].token_ids  # its old name
        assert answer(llm).outputs[0].token_ids == plain
