"""Every family over real processes: the tokens of one device, float32, greedy, by each parallel form."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError
from tests.model.ranks.test_parallel import DECODERS, MIXTURES, build, context_refusal
from tests.support import tiny_models

pytestmark = pytest.mark.usefixtures("forked_ranks")

SETTINGS = dict(
    device="cpu",
    dtype="float32",
    kernels="reference",
    max_model_len=128,
    kv_cache_bytes=2**20,
    max_num_seqs=4,
)
PROMPTS = [
    [5, 9, 200, 31, 7, 44, 45, 46],
    list(range(20, 110)),
    [3],
]  # one step is long enough to share tokens out
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FORMS = {
    "tp": dict(tensor_parallel_size=2),
    "pp": dict(pipeline_parallel_size=2),
    "ep": dict(expert_parallel_size=2),
    "tp+sp": dict(tensor_parallel_size=2, sequence_parallel=True),
    "cp": dict(context_parallel_size=2),
}
FAST = [
    ("qwen2", "tp"),
    ("granite", "tp"),
    ("gemma2", "pp"),
    ("qwen3_moe", "ep"),
    ("llama", "tp+sp"),
    ("qwen3_next", "tp"),
    ("bamba-one", "tp"),
    ("jamba", "tp+sp"),
]
"""Granite's layers add up over ranks where they scale a branch; the others do within the next norm."""
WITHOUT_STAGES = ["gemma4_text", "gemma3n_text", "deepseek_v4", "zamba2", "longcat_flash"]
"""Families whose layers read the first layer's inputs, or the keys and values of an earlier one."""
ALL = [
    (family, form)
    for family in DECODERS
    for form in FORMS
    if (form != "ep" or family in MIXTURES) and (form != "pp" or family not in WITHOUT_STAGES)
]
ALL += [(family, "tp") for family in tiny_models.T5S]


def tokens(path, step_tokens, **how):
    with LLM(
        str(path), skip_tokenizer_init=True, max_num_batched_tokens=step_tokens, **how, **SETTINGS
    ) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, progress=False)]


def check(tmp_path, family, form):
    build(tmp_path, family)
    if form == "cp" and context_refusal(tmp_path) is not None:
        return  # tests/model/ranks/test_parallel.py names those that must not be refused
    step_tokens = 256 if family in tiny_models.T5S else 64  # an encoder's step holds a whole prompt
    assert tokens(tmp_path, step_tokens, **FORMS[form]) == tokens(tmp_path, step_tokens)


@pytest.mark.parametrize(("family", "form"), FAST)
def test_some_families_answer_alike_on_ranks(tmp_path, family, form):
    check(tmp_path, family, form)


@pytest.mark.parametrize("family", WITHOUT_STAGES)
def test_layers_that_read_earlier_ones_refuse_stages(tmp_path, family):
    build(tmp_path, family)
    with pytest.raises(ConfigError, match="use tensor_parallel_size") as refused:
        tokens(tmp_path, 64, pipeline_parallel_size=2)
    assert refused.value.field == "pipeline_parallel_size"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), [pair for pair in ALL if pair not in FAST])
def test_every_family_answers_alike_on_ranks(tmp_path, family, form):
    check(tmp_path, family, form)
