"""A pipeline over real processes that meet through gloo: the same answers as one process, with several steps in flight."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.step_times import StepCosts
from slipstream.errors import ConfigError
from slipstream.messages.requests import EngineRequest
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.worker.ranks import process_executor
from tests.engine.drafts.test_draft_heads import Setup
from tests.support import forked_ranks, tiny_models
from tests.worker.ranks.test_context_extras import answers as several_answers
from tests.worker.ranks.test_context_ranks import SETTINGS as SHARED
from tests.worker.ranks.test_ranks import PROMPTS, SETTINGS, agree, answers

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def pipeline(tiny_model):
    with forked_ranks.used(), LLM(str(tiny_model), pipeline_parallel_size=2, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted(tiny_model):
    with LLM(str(tiny_model), **SETTINGS) as llm:
        many = [o.outputs[0].token_ids for o in llm.generate(PROMPTS * 5, GREEDY, progress=False)]
        return answers(llm), many


def test_two_stages_answer_as_one_device(pipeline, wanted):
    assert agree(answers(pipeline), wanted[0])
    assert agree(answers(pipeline), wanted[0])  # with all prompts in the cache
    assert pipeline.core.stats().prefix_hits > 0


def test_both_stages_have_a_step(pipeline, wanted, monkeypatch):
    """The other stage computes a step of other requests while one step is waited for, and the next
    is queued."""
    executor, counts = pipeline.core.executor, []
    wait = executor.result_of

    def result_of(step_id):
        counts.append(len(pipeline.core._in_flight))  # without the one that is waited for
        return wait(step_id)

    monkeypatch.setattr(executor, "result_of", result_of)
    found = pipeline.generate(PROMPTS * 5, GREEDY, progress=False)
    assert [o.outputs[0].token_ids for o in found] == wanted[1]
    assert sum(count == 2 for count in counts) > 0.8 * len(counts)


def test_each_stage_holds_its_layers(pipeline, tiny_model):
    first, second = pipeline.core.executor.ledgers
    with LLM(str(tiny_model), **SETTINGS) as llm:
        assert first.block_bytes + second.block_bytes == llm.core.ledger.block_bytes
    assert first.num_blocks == second.num_blocks


def test_a_request_that_is_cancelled_between_two_steps(pipeline, wanted):
    core = pipeline.core
    core.add(
        [EngineRequest(request_id="a", prompt_token_ids=(5, 6, 7), sampling=GREEDY, max_tokens=50)]
    )
    core.add(
        [EngineRequest(request_id="b", prompt_token_ids=(8, 6, 7), sampling=GREEDY, max_tokens=50)]
    )
    for _ in range(5):
        core.step()
    core.abort(["a", "b"])
    found = pipeline.generate(PROMPTS * 5, GREEDY, progress=False)
    assert [o.outputs[0].token_ids for o in found] == wanted[1]


def run(core):
    for _ in range(100):
        core.step()


def test_after_an_error_in_the_middle_of_a_step(pipeline, wanted, monkeypatch):
    """Tokens that are on their way, and one that is never drawn, are not taken for those of later requests."""
    core, failed = pipeline.core, []

    def fail(*given):
        failed.append(given)
        raise RuntimeError("as if")

    grammar = SamplingParams(
        temperature=0.0, structured_outputs=StructuredOutputsParams(regex="[ab]*")
    )
    for place, sampling in (("_mask", grammar), (None, GREEDY)):
        core.add(
            [
                EngineRequest(
                    request_id="a", prompt_token_ids=(5, 6, 7), sampling=sampling, max_tokens=50
                )
            ]
        )
        core.add(
            [
                EngineRequest(
                    request_id="b", prompt_token_ids=(8, 6, 7), sampling=GREEDY, max_tokens=50
                )
            ]
        )
        with monkeypatch.context() as patched:
            if place is not None:
                patched.setattr(core, place, fail)
            else:
                for _ in range(5):
                    core.step()
                patched.setattr(core.scheduler, "update", fail)
            with pytest.raises(RuntimeError, match="as if"):
                run(core)
        found = pipeline.generate(PROMPTS * 5, GREEDY, progress=False)
        assert [o.outputs[0].token_ids for o in found] == wanted[1]
    assert len(failed) == 2


@pytest.mark.usefixtures("forked_ranks")
def test_uneven_stages_with_tensor_parallelism_and_speculation(tmp_path, monkeypatch):
    monkeypatch.setattr(process_executor, "available_cores", lambda: 4)  # they share what there is
    tiny_models.write_with_tokenizer(tmp_path, num_hidden_layers=3, max_position_embeddings=1024)
    how = dict(pipeline_parallel_size=2, pipeline_layers="2,1", tensor_parallel_size=2)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        wanted = answers(llm)
    with LLM(str(tmp_path), speculative_model="ngram", **how, **SETTINGS) as llm:
        assert llm.core.config.parallel.stages == (2, 1)
        assert agree(answers(llm), wanted)
        assert llm.core.stats().spec_draft_tokens > 0


def test_what_has_no_stages_is_refused(tmp_path):
    tiny_models.build_t5(tmp_path, "t5")
    with pytest.raises(ConfigError, match="an encoder-decoder has no stages") as error:
        LLM(str(tmp_path), pipeline_parallel_size=2, device="cpu", skip_tokenizer_init=True)
    assert error.value.field == "pipeline_parallel_size"


def test_layers_that_read_an_earlier_layers_keys_are_not_split_into_stages(tmp_path):
    tiny_models.write(tmp_path, "gemma4_text")
    with pytest.raises(ConfigError, match="the keys and values of an earlier layer") as error:
        LLM(str(tmp_path), pipeline_parallel_size=2, device="cpu", skip_tokenizer_init=True)
    assert error.value.field == "pipeline_parallel_size"


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "how",
    [
        {"pipeline_parallel_size": 2},
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in (
                {"pipeline_parallel_size": 3},
                {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
                {"pipeline_parallel_size": 2, "expert_parallel_size": 2},
            )
        ),
    ],
    ids=str,
)
def test_the_last_stage_proposes_a_draft_models_tokens(tmp_path, monkeypatch, how):
    """The first stage gets them, also next to steps without drafts, with grammars and after preemption; stages between need
    none."""
    monkeypatch.setattr(process_executor, "available_cores", lambda: 4)
    family = "qwen3_moe" if "expert_parallel_size" in how else "llama"
    sizes = dict(num_hidden_layers=3, max_position_embeddings=1024)
    tiny_models.write_with_tokenizer(tmp_path / "model", family, **sizes)
    tiny_models.write_with_tokenizer(tmp_path / "draft", **{**sizes, "num_hidden_layers": 1})
    drafts = {"method": "draft", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    model = str(tmp_path / "model")
    several = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, n=3)
    ids = [{"prompt_token_ids": [(7 * i + s) % 250 + 4 for i in range(30)]} for s in range(8)]

    def more(llm):
        told = llm.generate(ids, [GREEDY, several] * 4, progress=False)
        return [choice.token_ids for output in told for choice in output.outputs]

    with LLM(model, **SETTINGS) as llm:
        wanted, also = answers(llm), more(llm)
    with LLM(model, speculative_config=drafts, **how, **SETTINGS) as llm:
        for _ in range(2):
            assert agree(answers(llm), wanted)
            assert more(llm) == also
        assert llm.stats().spec_draft_tokens > 20
        assert llm.core.stats().prefix_hits > 0
        block = llm.core.executor.ledgers[-1].block_bytes
    few = {**SETTINGS, "kv_cache_bytes": 7 * block, "max_model_len": 64, "block_size": 4}
    with LLM(model, speculative_config=drafts, **how, **few) as llm:
        assert more(llm) == also
        assert llm.stats().num_preemptions > 0


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("eagle3", {}),
        *(
            pytest.param(kind, how, marks=pytest.mark.slow)
            for kind, how in (
                *((k, {}) for k in ("eagle", "peagle", "dflash", "medusa", "mtp", "mtp-hybrid")),
                *((k, {"pipeline_parallel_size": 3}) for k in ("eagle31", "dflash", "mtp-hybrid")),
                *((k, {"tensor_parallel_size": 2}) for k in ("eagle", "eagle3", "dflash", "mtp")),
                *(
                    (k, {"tensor_parallel_size": 2, "sequence_parallel": True})
                    for k in ("eagle3", "peagle")
                ),
                *((k, {"expert_parallel_size": 2}) for k in ("eagle3", "mtp", "mtp-hybrid")),
            )
        ),
    ],
    ids=str,
)
def test_a_head_on_the_last_stage_proposes_as_on_one_device(tmp_path, monkeypatch, kind, how):
    """The head reads embeddings and states of earlier stages, and as many drafts are right."""
    monkeypatch.setattr(process_executor, "available_cores", lambda: 4)
    mixture = "expert_parallel_size" in how and "mtp" not in kind
    sizes = dict(family="qwen3_moe", num_hidden_layers=6) if mixture else {}
    setup = Setup(tmp_path, kind, max_position_embeddings=256, **sizes)
    tiny_models.write_tokenizer(tmp_path / "model")
    given = {**SHARED, **({"state_slots": 96} if "hybrid" in kind else {})}
    with LLM(setup.path, **given) as llm:
        wanted = several_answers(llm)
    counts = []
    for stages in ({}, {"pipeline_parallel_size": 2, **how}):
        with LLM(setup.path, speculative_config=setup.config, **given, **stages) as llm:
            assert several_answers(llm) == wanted
            counts.append((llm.stats().spec_draft_tokens, llm.stats().spec_accepted_tokens))
            assert llm.stats().prefix_hits > 0
            assert all(pool.num_free == pool.num_usable for pool in llm.core.scheduler.pools)
    assert counts[0] == counts[1] or "hybrid" in kind  # slots of states bound the drafts of a step
    assert all(accepted > 0 for _, accepted in counts)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_preempted_requests_go_on_with_a_head_on_the_last_stage(tmp_path):
    setup = Setup(tmp_path, "eagle3", max_position_embeddings=256)
    given = {**SHARED, "skip_tokenizer_init": True}
    ids = [{"prompt_token_ids": [(7 * i + s) % 250 + 4 for i in range(20 + s)]} for s in range(10)]
    with LLM(setup.path, **given) as llm:
        wanted = several_answers(llm, [GREEDY], ids)
    stages = {"pipeline_parallel_size": 2, "speculative_config": setup.config, "max_model_len": 56}
    with LLM(setup.path, **{**given, **stages}) as llm:
        few = 26 * llm.core.executor.ledgers[-1].block_bytes
    with LLM(setup.path, **{**given, **stages, "kv_cache_bytes": few}) as llm:
        assert several_answers(llm, [GREEDY], ids) == wanted
        assert llm.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_as_many_drafts_are_asked_for_as_the_ranks_head_has(tmp_path, monkeypatch):
    """The number of drafts is chosen, and each token more costs a tenth of a plain step."""
    add = StepCosts.add
    monkeypatch.setattr(StepCosts, "add", lambda self, n, m, _: add(self, n, m, 0.9 + 0.1 * m / n))
    setup = Setup(tmp_path, "medusa", max_position_embeddings=256)
    config = {k: v for k, v in setup.config.items() if k != "num_speculative_tokens"}
    given = {**SHARED, "skip_tokenizer_init": True}
    with LLM(setup.path, **given) as llm:
        wanted = several_answers(llm, [GREEDY])
    with LLM(setup.path, speculative_config=config, tensor_parallel_size=2, **given) as llm:
        assert llm.core.config.speculation.limit == 3
        assert several_answers(llm, [GREEDY]) == wanted
        assert llm.stats().spec_draft_tokens > 0
