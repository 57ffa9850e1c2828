"""`LLM` on a tiny random model: the whole engine, from prompt to text, against Hugging Face transformers."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import json
import weakref
from typing import get_args

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.config.forms import HeadDrafts, ModelDrafts, MTPDrafts, StreamedLayers
from slipstream.costs.memory import kv_budget
from slipstream.engine import llm as llm_module
from slipstream.engine.listeners import MaskingGrammars
from slipstream.errors import (
    ConfigError,
    ContextLengthError,
    OutOfMemoryError,
    RequestError,
    UnsupportedModelError,
)
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.native import has_cpu_kernels
from slipstream.model.compile_step import compile_step
from slipstream.platform import platform_of
from slipstream.spec.description import read_spec
from slipstream.spec.drafts.heads import FILE_METHODS, FileMethod
from slipstream.worker.forward import program
from tests.support import tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [
    {"prompt_token_ids": [5, 9, 200, 31, 7]},
    {"prompt_token_ids": [17]},
    {"prompt_token_ids": list(range(3, 3 + 16))},  # exactly a block
    {"prompt_token_ids": [(7 * i) % 250 + 3 for i in range(45)]},
    {"prompt_token_ids": list(range(50, 65))},
    {"prompt_token_ids": list(range(60, 75))},
    {"prompt_token_ids": list(range(70, 85))},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.write_with_tokenizer(folder)
    return folder


def make(path, **settings):
    defaults = dict(
        dtype="float32",
        device="cpu",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        num_threads=1,
    )
    return LLM(str(path), **{**defaults, **settings})


@pytest.fixture(scope="module")
def llm(path):
    return make(path)


@pytest.fixture(scope="module")
def hf(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def hf_greedy(hf, tokens, count):
    ids = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(hf(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(tokens) :]


def tokens_of(outputs):
    return [o.outputs[0].token_ids for o in outputs]


def idle(llm):
    stats = llm.stats()
    return stats.num_running == 0 and stats.num_waiting == 0


def test_greedy_equals_transformers(llm, hf):
    outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens_of(outputs) == [hf_greedy(hf, p["prompt_token_ids"], 12) for p in PROMPTS]
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert idle(llm)


def test_text_is_the_decoded_tokens(llm):
    (output,) = llm.generate("Hello world, how are you?", GREEDY)
    tokenizer = llm.get_tokenizer()
    assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
    assert output.prompt_token_ids == tokenizer.encode("Hello world, how are you?")


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduling_policy": "static"},
        {"scheduling_policy": "dynamic", "batch_window_s": 0.001},
        {"enable_prefix_caching": False},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
        {"max_num_batched_tokens": 8},
        {"max_num_mixed_tokens": 9},
        {"block_size": 4},
        {"kernels": "reference"},
        {"kv_cache_bytes": "of a few blocks", "max_model_len": 64},  # preempts
    ],
    ids=str,
)
def test_every_setting_gives_the_same_tokens(path, llm, settings):
    expected = tokens_of(llm.generate(PROMPTS, GREEDY))
    if "kv_cache_bytes" in settings:
        settings = {**settings, "kv_cache_bytes": llm.ledger.block_bytes * 5}
    other = make(path, **settings)
    assert tokens_of(other.generate(PROMPTS, GREEDY)) == expected
    if "kv_cache_bytes" in settings:
        assert other.stats().num_preemptions > 0
    assert idle(other)
    free = other.stats()
    assert free.num_free_blocks == free.num_blocks


def test_a_seeded_request_is_the_same_in_any_company(llm):
    seeded = SamplingParams(temperature=1.0, seed=42, max_tokens=10, ignore_eos=True, top_p=0.95)
    alone = tokens_of(llm.generate([PROMPTS[0]], seeded))[0]
    noise = SamplingParams(temperature=1.3, max_tokens=14, ignore_eos=True, top_k=7)
    mixed = llm.generate([PROMPTS[3], PROMPTS[0], PROMPTS[1]], [noise, seeded, GREEDY])
    assert mixed[1].outputs[0].token_ids == alone
    other_seed = dataclasses.replace(seeded, seed=43)
    assert tokens_of(llm.generate([PROMPTS[0]], other_seed))[0] != alone


def test_n_gives_n_choices_that_share_the_prompt(llm):
    sampling = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=9, ignore_eos=True)
    (output,) = llm.generate([PROMPTS[3]], sampling)
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    (first,) = llm.generate([PROMPTS[3]], dataclasses.replace(sampling, n=1))
    assert output.outputs[0].token_ids == first.outputs[0].token_ids
    (greedy,) = llm.generate([PROMPTS[3]], dataclasses.replace(GREEDY, n=3))
    assert len({tuple(c.token_ids) for c in greedy.outputs}) == 1
    assert idle(llm)


def test_n_works_without_prefix_cache_and_with_few_rows(path, llm):
    other = make(path, enable_prefix_caching=False, max_num_seqs=2, block_size=4)
    greedy = dataclasses.replace(GREEDY, n=5)
    (expected,) = llm.generate([PROMPTS[0]], GREEDY)
    (output,) = other.generate([PROMPTS[0]], greedy)
    assert [c.token_ids for c in output.outputs] == [expected.outputs[0].token_ids] * 5


def test_prefix_cache_is_hit_and_changes_nothing(path):
    llm = make(path)
    (cold,) = llm.generate([PROMPTS[3]], GREEDY)
    (warm,) = llm.generate([PROMPTS[3]], GREEDY)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == 32
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    (whole,) = (llm.generate([PROMPTS[2]], GREEDY),)
    (again,) = llm.generate(
        [PROMPTS[2]], GREEDY
    )  # a prompt of whole blocks computes its last block
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == whole[0].outputs[0].token_ids


def test_greedy_tokens_are_the_same_with_and_without_the_logits(path):
    """Steps whose rows all want nothing but the likeliest token never compute the logits; one row that wants more changes that
    for all of its step, and nobody's tokens."""
    with make(path, num_threads=2) as llm:
        runner, found = llm.core.executor.runner, []
        way = runner.forwards.base.program if has_cpu_kernels() else runner.forwards.base
        whole = way.logits
        way.logits = lambda hidden: found.append(len(hidden)) or whole(hidden)
        alone = llm.generate(PROMPTS, GREEDY)
        assert not found
        wants = [
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1),
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={1: -50.0}),
            SamplingParams(
                temperature=0, max_tokens=12, ignore_eos=True, min_tokens=3, stop_token_ids=[2]
            ),
            SamplingParams(
                temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.0001
            ),
        ]
        for more in wants:
            found.clear()
            mixed = llm.generate(PROMPTS, [more] + [GREEDY] * (len(PROMPTS) - 1))
            assert found or more.logprobs  # the pass that draws gives log-probabilities, too
            assert [a.outputs[0].token_ids for a in mixed[1:]] == [
                a.outputs[0].token_ids for a in alone[1:]
            ]


@pytest.mark.parametrize("most", [0, 2, 64])
def test_steps_that_are_under_way_change_no_answer(path, monkeypatch, most):
    """A few greedy decodes are computed while the host looks at the step before: with ends that nobody foresaw, requests that
    come, go and fail meanwhile."""
    monkeypatch.setattr(program, "RUN_AHEAD", most)
    with make(path, num_threads=2, max_num_seqs=3) as llm:
        if not has_cpu_kernels():
            pytest.skip("needs the C++ kernels")
        whole = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
        ahead, launch = [], llm.core.executor.runner.launch
        monkeypatch.setattr(
            llm.core.executor.runner, "launch", lambda plan: ahead.append(launch(plan)) or ahead[-1]
        )
        stops = [
            SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[tokens[5]])
            for tokens in whole
        ]
        short = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, stops)]
        assert short == [tokens[: tokens.index(tokens[5]) + 1] for tokens in whole]
        assert any(step.done is not None for step in ahead) == (most > 0)
        stream = llm.stream(PROMPTS[0], GREEDY)
        assert [*next(stream).outputs[0].token_ids, *next(stream).outputs[0].token_ids] == whole[0][
            :2
        ]
        stream.close()
        assert not llm.core.has_work or llm.core.scheduler.stats().num_running == 0

        def failing(plan):
            raise RuntimeError("broken")

        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(llm.core.executor.runner, "launch", failing)
            with pytest.raises(RuntimeError, match="broken"):
                list(stream)
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == whole
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_a_token_does_not_wait_for_another_prompt(path, monkeypatch):
    """A step under way is finished, and its token given out, before a prompt that came meanwhile is computed."""
    with make(path, num_threads=2) as llm:
        core, events = llm.core, []
        if not has_cpu_kernels():
            pytest.skip("needs the C++ kernels")
        runner, step = core.executor.runner, core.step
        launch = runner.launch
        monkeypatch.setattr(
            runner,
            "launch",
            lambda plan: events.append(plan.scheduled[-1].num_tokens) or launch(plan),
        )
        first = llm._input.prepare(PROMPTS[1], GREEDY)
        core.add(first.engine_requests)
        for _ in range(4):
            step()
        assert core._in_flight
        core.add(llm._input.prepare(PROMPTS[3], GREEDY).engine_requests)
        events.clear()
        outputs = step()
        assert not events
        assert sum(len(o.token_ids) for o in outputs) == 1
        step()
        assert events[0] > 1


def test_scaled_and_capped_logits_are_made(path, monkeypatch):
    """Rounding could make equals of neighbours there, and a token would depend on what else is in its batch."""
    with make(path, num_threads=1) as llm:
        if not has_cpu_kernels():
            pytest.skip("needs the C++ kernels")
        decoder, pool = llm.core.executor.runner.model.decoder, llm.core.executor.runner.ops.pool
        spec = decoder.spec
        hidden = np.zeros((1, spec.hidden_size), np.float32)
        assert compile_step(decoder, pool, platform_of(None)).greedy(hidden) is not None
        for changed in ({"logit_softcap": 30.0}, {"logit_scale": 0.3}):
            monkeypatch.setattr(decoder, "spec", dataclasses.replace(spec, **changed))
            assert compile_step(decoder, pool, platform_of(None)).greedy(hidden) is None


def test_logprobs_are_the_models_own(llm, hf):
    sampling = SamplingParams(
        temperature=0.7, seed=3, max_tokens=6, logprobs=5, prompt_logprobs=2, ignore_eos=True
    )
    (output,) = llm.generate([PROMPTS[3]], sampling)
    prompt, answer = PROMPTS[3]["prompt_token_ids"], output.outputs[0]
    with torch.no_grad():
        reference = hf(torch.tensor([prompt + answer.token_ids])).logits[0].log_softmax(-1)
    assert len(answer.logprobs) == len(answer.token_ids)
    for i, position in enumerate(answer.logprobs):
        row = reference[len(prompt) - 1 + i]
        assert position.chosen.token_id == answer.token_ids[i]
        assert position.chosen.logprob == pytest.approx(row[answer.token_ids[i]].item(), abs=1e-4)
        assert position.chosen.rank == int((row > row[answer.token_ids[i]]).sum()) + 1
        assert [t.logprob for t in position.top] == pytest.approx(
            row.topk(5).values.tolist(), abs=1e-4
        )
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for i, position in enumerate(output.prompt_logprobs[1:], 1):
        assert position.chosen.token_id == prompt[i]
        assert position.chosen.logprob == pytest.approx(
            reference[i - 1, prompt[i]].item(), abs=1e-4
        )
        assert len(position.top) == 2


def test_stop_token_min_tokens_and_bias(llm):
    (plain,) = llm.generate([PROMPTS[0]], GREEDY)
    third = plain.outputs[0].token_ids[2]
    first_at = plain.outputs[0].token_ids.index(third)
    (stopped,) = llm.generate([PROMPTS[0]], dataclasses.replace(GREEDY, stop_token_ids=(third,)))
    assert stopped.outputs[0].token_ids == plain.outputs[0].token_ids[: first_at + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", third)
    (longer,) = llm.generate(
        [PROMPTS[0]], dataclasses.replace(GREEDY, stop_token_ids=(third,), min_tokens=6)
    )
    assert third not in longer.outputs[0].token_ids[:6]
    (biased,) = llm.generate([PROMPTS[0]], dataclasses.replace(GREEDY, logit_bias={77: 1000.0}))
    assert biased.outputs[0].token_ids == [77] * 12
    (varied,) = llm.generate(
        [PROMPTS[0]],
        dataclasses.replace(
            GREEDY, logit_bias={77: 30.0, 78: 29.5}, frequency_penalty=2.0, max_tokens=4
        ),
    )
    assert set(varied.outputs[0].token_ids) == {77, 78}


def test_a_stop_string_cuts_the_text(llm):
    (plain,) = llm.generate(["Hello"], GREEDY)
    text = plain.outputs[0].text
    stop = text[3:6]
    (cut,) = llm.generate(["Hello"], dataclasses.replace(GREEDY, stop=(stop,)))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    (kept,) = llm.generate(
        ["Hello"], dataclasses.replace(GREEDY, stop=stop, include_stop_str_in_output=True)
    )
    assert kept.outputs[0].text == text[: text.index(stop) + len(stop)]
    assert idle(llm)


def test_the_context_ends_a_sequence(llm):
    prompt = {"prompt_token_ids": [3] * 120}
    (output,) = llm.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    )
    assert len(output.outputs[0].token_ids) == 8
    assert output.outputs[0].finish_reason == "length"


def test_chat_uses_the_template(llm):
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, GREEDY)
    tokenizer = llm.get_tokenizer()
    expected = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    assert output.prompt_token_ids == expected


CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "x", "parameters": CITY},
}
NOTE = {
    "type": "function",
    "function": {"name": "note", "parameters": {"type": "object", "properties": {}}},
}
TOOL_TEMPLATE = (
    '{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{# <tool_call> {"name": #}'
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    " calls {{ c.function.arguments.city }}{% endfor %}\n{% endfor %}"
)
ASK = [{"role": "user", "content": "Hi"}]


def test_chat_gives_calls(path):
    llm = make(path, max_model_len=256)
    spaces = dict.fromkeys(
        llm.get_tokenizer().encode(" \n\r\t", add_special_tokens=False), -100.0
    )  # there is room for few
    any_of = {"tool_choice": "required"}
    named = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    for choice in (any_of, named):
        sampling = SamplingParams(seed=1, max_tokens=120, logit_bias=spaces)
        tools = [WEATHER] if choice is any_of else [WEATHER, NOTE]
        (answer,) = llm.chat(
            ASK,
            sampling,
            tools=tools,
            **choice,
            parallel_tool_calls=False,
            chat_template=TOOL_TEMPLATE,
        )
        output = answer.outputs[0]
        assert output.finish_reason == "tool_calls"
        (call,) = output.message.tool_calls
        assert call.name == "weather"
        assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
        assert output.message.content is None
        assert "<tool_call>" in output.text
        turn = [
            *ASK,
            output.message.to_dict(),
            {"role": "tool", "content": "sun", "tool_call_id": call.id},
        ]
        (following,) = llm.chat(turn, GREEDY, tools=[WEATHER], chat_template=TOOL_TEMPLATE)
        prompt = llm.get_tokenizer().decode(following.prompt_token_ids)
        assert f"calls {json.loads(call.arguments)['city']}" in prompt, (
            "the template had the arguments as an object"
        )


def test_chat_parts_of_an_answer(llm):
    (plain,) = llm.chat(ASK, GREEDY)
    assert plain.outputs[0].message.to_dict() == {
        "role": "assistant",
        "content": plain.outputs[0].text,
    }
    thinks = TOOL_TEMPLATE + "{# </think> #}<think>"
    wanted = StructuredOutputsParams(regex="so")
    (answer,) = llm.chat(
        ASK,
        SamplingParams(max_tokens=64, temperature=0, structured_outputs=wanted, ignore_eos=True),
        chat_template=thinks,
    )
    message = answer.outputs[0].message
    text, _, rest = answer.outputs[0].text.partition("</think>")
    assert message.reasoning_content == (text.strip() or None)
    assert message.content == rest.strip()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [WEATHER], "chat_template": "{{ messages }}"}, "tools"),
        ({"tools": [WEATHER], "chat_template": "{{ messages }}{{ tools }}"}, "tools"),
        ({"tools": [WEATHER], "tool_call_parser": "x"}, "tool_call_parser"),
    ],
)
def test_tools_that_chat_refuses(llm, given, field):
    with pytest.raises((RequestError, ConfigError)) as error:
        llm.chat(ASK, GREEDY, **{"chat_template": TOOL_TEMPLATE, **given})
    assert error.value.field == field


def test_a_stream_that_is_left_frees_everything(llm):
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    llm.core.step()
    stats = llm.stats()
    assert idle(llm)
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "field"),
    [
        ({"prompt_token_ids": []}, GREEDY, RequestError, "prompt"),
        ({"prompt_token_ids": [10**6]}, GREEDY, RequestError, "prompt_token_ids"),
        ({"prompt_token_ids": [3] * 128}, GREEDY, ContextLengthError, "prompt"),
        (
            {"prompt_token_ids": [3]},
            dataclasses.replace(GREEDY, max_tokens=500),
            ContextLengthError,
            "max_tokens",
        ),
        (
            {"prompt_token_ids": [3]},
            dataclasses.replace(GREEDY, logit_bias={10**6: 1.0}),
            RequestError,
            "logit_bias",
        ),
        (17, GREEDY, RequestError, "prompt"),
        ({"prompt_token_ids": [3]}, [GREEDY, 5], RequestError, "sampling_params"),
        ({"prompt_token_ids": [3]}, {"max_tokens": 5}, RequestError, "sampling_params"),
    ],
    ids=str,
)
def test_a_bad_request_is_refused_by_name_and_leaves_nothing(llm, prompt, sampling, error, field):
    with pytest.raises(error) as caught:
        llm.generate([PROMPTS[0], prompt], sampling)
    assert caught.value.field == field
    assert idle(llm)
    assert llm.generate([PROMPTS[1]], GREEDY)


@pytest.mark.parametrize(
    ("settings", "error", "field"),
    [
        ({"gpu_memory_utilization": 1.5}, ConfigError, "gpu_memory_utilization"),
        ({"batch_window_s": 0.1}, ConfigError, "batch_window_s"),
        ({"max_model_len": 100_000}, ConfigError, "max_model_len"),
        ({"kv_cache_bytes": 2**50}, ConfigError, "kv_cache_bytes"),
        ({"max_model_len": "128"}, ConfigError, "max_model_len"),
        ({"enforce_eager": 1}, ConfigError, "enforce_eager"),
        ({"deterministic": True, "kernels": "torch"}, ConfigError, "deterministic"),
        ({"dense_copies": True}, ConfigError, "dense_copies"),
        ({"quantization": "fp8"}, ConfigError, "quantization"),
        ({"quantization": "int5", "kernels": "reference"}, ConfigError, "quantization"),
        (
            {"quantization": "int4", "kernels": "reference"},
            ConfigError,
            "quantization",
        ),  # 32 inputs, groups of 128
        ({"kv_cache_dtype": "fp8"}, ConfigError, "kv_cache_dtype"),
        ({"kv_cache_dtype": "bfloat16"}, ConfigError, "kv_cache_dtype"),
        ({"tensor_parallel_size": 3}, ConfigError, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 99}, ConfigError, "pipeline_parallel_size"),
        ({"device": "tpu"}, ConfigError, "device"),
        ({"dtype": "int3"}, ConfigError, "dtype"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, ConfigError, "max_num_batched_tokens"),
        ({"max_num_mixed_tokens": 4, "max_num_seqs": 8}, ConfigError, "max_num_mixed_tokens"),
        (
            {"max_num_mixed_tokens": 99, "max_num_batched_tokens": 98},
            ConfigError,
            "max_num_mixed_tokens",
        ),
        (
            {
                "max_num_mixed_tokens": 64,
                "max_num_batched_tokens": 128,
                "enable_chunked_prefill": False,
            },
            ConfigError,
            "max_num_mixed_tokens",
        ),
        ({"target_itl_ms": 0.0}, ConfigError, "target_itl_ms"),
        ({"target_itl_ms": float("inf")}, ConfigError, "target_itl_ms"),
        ({"target_itl_ms": 20.0, "enable_chunked_prefill": False}, ConfigError, "target_itl_ms"),
        ({"max_model_len": 128, "kv_cache_bytes": 30_000}, OutOfMemoryError, "max_model_len"),
        ({"max_model_len": 1}, ConfigError, "max_model_len"),
        ({"max_num_batched_tokens": 10**11}, OutOfMemoryError, "max_num_batched_tokens"),
        ({"max_num_seqs": 10**9, "max_num_batched_tokens": None}, OutOfMemoryError, "max_num_seqs"),
    ],
    ids=str,
)
def test_a_bad_setting_is_refused_by_name(path, settings, error, field):
    with pytest.raises(error) as caught:
        make(path, **settings)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("settings", "there_is"),
    [
        ({"quantization": "fp8"}, "'int8', 'int8-head', 'int4', 'int4-g32', 'mxfp4', 'mxfp4-all'"),
        ({"kv_cache_dtype": "fp8"}, "'int8': take that"),
    ],
    ids=str,
)
def test_a_form_that_needs_a_gpu_names_those_of_a_cpu(path, settings, there_is):
    with pytest.raises(ConfigError, match=f"needs a GPU; a CPU's kernels have {there_is}"):
        LLM(str(path), device="cpu", **settings)


def test_a_misspelled_type_of_cache_is_not_said_to_need_a_gpu(path):
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype='int88' is not one of .*did you mean 'int8'"
    ):
        LLM(str(path), device="cpu", kv_cache_dtype="int88")


def test_sizes_that_a_scheme_can_not_cut_are_refused(tmp_path):
    tiny_models.write(tmp_path, "llama", vocab_size=250, tie_word_embeddings=False)
    for name, why in (("fp8-head", "vocab_size is 250"), ("int4", "multiples of 128")):
        with pytest.raises(ConfigError, match=why) as caught:
            make(tmp_path, quantization=name, kernels="reference", skip_tokenizer_init=True)
        assert caught.value.field == "quantization"


@pytest.mark.skipif(native.library_path() is None, reason="the C++ kernels are not built")
@pytest.mark.parametrize(
    ("kernels", "remedy"),
    [("cpu", "use 'int4-g32' or 'int8'"), ("reference", "'int4-g32', 'fp8' or")],
)
def test_a_refused_scheme_names_those_that_there_are(path, kernels, remedy):
    with pytest.raises(ConfigError, match=remedy):
        make(path, quantization="int4", kernels=kernels)


def on_a_gpu(path, capability=(9, 0), memory=2**34, **settings):
    info = DeviceInfo(
        device="cuda:0",
        name="a GPU",
        memory_bytes=memory,
        free_bytes=memory,
        best_dtype="bfloat16",
        compute_capability=capability,
    )
    return resolve(EngineArgs(model=str(path), **settings), read_spec(path), info)


def test_what_a_gpu_computes_in_16_bits_is_not_asked_for_in_32(path):
    assert on_a_gpu(path, quantization="int4").model.quantization == "int4"
    with pytest.raises(ConfigError) as caught:
        on_a_gpu(path, quantization="int4", dtype="float32")
    assert caught.value.field == "dtype"


@pytest.mark.parametrize(
    ("speculation", "is_chain"),
    [
        (ModelDrafts(model="m"), True),
        (MTPDrafts(), True),
        *((HeadDrafts(method=m, model="h"), m in ("eagle", "eagle3")) for m in FILE_METHODS),
    ],
    ids=str,
)
def test_only_a_chain_in_graphs_goes_ahead(path, speculation, is_chain):
    on_gpu, eager = on_a_gpu(path), on_a_gpu(path, enforce_eager=True)
    info = dataclasses.replace(on_gpu.device.info, device="cpu")
    on_cpu = dataclasses.replace(on_gpu, device=dataclasses.replace(on_gpu.device, info=info))
    found = [dataclasses.replace(c, speculation=speculation) for c in (on_gpu, eager, on_cpu)]
    assert [c.drafts_ahead for c in found] == [is_chain, False, False]
    assert not on_gpu.drafts_ahead


def test_each_method_of_a_head_says_whether_it_is_a_chain():
    assert get_args(FileMethod) == FILE_METHODS


def test_a_gpu_that_has_a_part_of_the_weights(path, tmp_path):
    whole = on_a_gpu(path, quantization="int4")
    part = on_a_gpu(path, quantization="int4", weights_bytes=2**20)
    assert (whole.device.dense_copies, part.device.dense_copies) == (True, False)
    assert (whole.scheduling.max_num_batched_tokens, part.scheduling.max_num_batched_tokens) == (
        8192,
        16384,
    )
    rounded_but_for_one(
        tmp_path, weights={"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    )
    assert on_a_gpu(tmp_path, weights_bytes=2**20).model.offload == StreamedLayers(2**20)
    for settings, says in (
        (dict(quantization="int4", dense_copies=True), "leave out dense_copies"),
        (dict(tensor_parallel_size=2), "one device; leave tensor_parallel_size"),
        (dict(enable_lora=True), "leave out enable_lora"),
    ):
        with pytest.raises(ConfigError, match=says) as caught:
            on_a_gpu(path, weights_bytes=2**20, **settings)
        assert caught.value.field == "weights_bytes"


def rounded_but_for_one(folder, **group):
    """A checkpoint's config whose products are rounded by `group`, but for one of its layers."""
    tiny_models.write(folder, "llama", hidden_size=64, intermediate_size=192, head_dim=16)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "output_activations": None, **group}},
        "ignore": ["lm_head", "model.layers.0.mlp.down_proj"],
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_an_older_gpu_has_no_products_of_fp8_also_where_only_some_are(tmp_path):
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    rounded_but_for_one(
        tmp_path,
        weights={**eight, "strategy": "channel", "dynamic": False},
        input_activations={**eight, "strategy": "token", "dynamic": True},
    )
    assert on_a_gpu(tmp_path).model.quantization is None
    with pytest.raises(ConfigError, match=r"7 of .* are FP8.* has 8\.0") as caught:
        on_a_gpu(tmp_path, capability=(8, 0))
    assert caught.value.field == "model"


def test_dense_copies_also_where_only_some_products_have_4_bits(tmp_path):
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
    }
    rounded_but_for_one(tmp_path, weights=weights, input_activations=None)
    found = on_a_gpu(tmp_path)
    assert found.device.dense_copies
    assert not on_a_gpu(tmp_path, dense_copies=False).device.dense_copies
    spec = read_spec(tmp_path).spec
    all_products = sum(
        p.rows * p.inner for layer in spec.all_layers for p in layer.weight_shapes(spec.hidden_size)
    )
    copies = 2 * (all_products - 64 * 192)
    assert on_a_gpu(tmp_path, memory=4 * copies).device.dense_copies
    assert not on_a_gpu(tmp_path, memory=4 * copies - 1).device.dense_copies


def test_floats_of_4_bits_get_dense_copies_and_experts_none(tmp_path):
    tiny_models.write(tmp_path, "llama", hidden_size=64, intermediate_size=192)
    assert on_a_gpu(tmp_path, quantization="nvfp4").device.dense_copies
    tiny_models.write(tmp_path, "mixtral", hidden_size=64, intermediate_size=192)
    assert not on_a_gpu(tmp_path, quantization="mxfp4").device.dense_copies


def test_the_cache_takes_what_is_left_of_its_share(path):
    """A calculation by hand: of 1,000 bytes 900 may be used, 300 are in use by us and others, 100 more will be."""
    config = on_a_gpu(path, gpu_memory_utilization=0.9)
    assert kv_budget(config, 10, total_bytes=1000, free_bytes=700, taken_bytes=100) == (900, 500)
    given = on_a_gpu(path, kv_cache_bytes=600)
    assert kv_budget(given, 10, total_bytes=1000, free_bytes=700, taken_bytes=100)[1] == 600
    with pytest.raises(OutOfMemoryError) as caught:
        kv_budget(given, 10, total_bytes=1000, free_bytes=700, taken_bytes=101)
    assert caught.value.field == "kv_cache_bytes"


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_shutdown_releases_what_nobody_holds_any_more(path, monkeypatch, kernels):
    """The model must be unused when the device gives back unused memory (a GPU does), though `llm` is still named."""
    llm = make(path, kernels=kernels)
    llm.generate(PROMPTS[:2], GREEDY)
    runner, unused = weakref.ref(llm.core.executor.runner), []
    release = property(lambda executor: lambda: unused.append(runner() is None))
    monkeypatch.setattr(type(llm.core.executor), "release_unused", release)
    llm.shutdown()
    assert unused == [True]


def test_the_first_step_begins_before_all_requests_are_queued(llm, monkeypatch):
    several = dataclasses.replace(GREEDY, n=2, temperature=0.8, seed=3)
    each = [several if i % 2 else GREEDY for i in range(len(PROMPTS))]
    expected = [[c.token_ids for c in o.outputs] for o in llm.generate(PROMPTS, each)]
    calls = []
    for name in ("add", "step"):
        kept = getattr(llm.core, name)
        noting = lambda *given, _name=name, _kept=kept: (calls.append(_name), _kept(*given))[1]
        monkeypatch.setattr(llm.core, name, noting)
    monkeypatch.setattr(llm_module, "QUEUED_TOKENS", 20)
    answers = llm.generate(PROMPTS, each)
    assert [[c.token_ids for c in o.outputs] for o in answers] == expected
    assert "".join(name[0] for name in calls).startswith("aaas" + "as" + "aas" + "a" + "s")
    assert idle(llm)
    calls.clear()
    with pytest.raises(RequestError, match="not a token id") as caught:
        llm.generate([*PROMPTS, {"prompt_token_ids": [-1]}], GREEDY)
    assert "step" in calls  # the first ones had begun
    assert caught.value.__notes__ == [f"in prompt {len(PROMPTS)} of {len(PROMPTS) + 1}"]
    assert idle(llm)


def test_a_request_refused_after_the_first_steps_ends_the_others(llm, monkeypatch):
    monkeypatch.setattr(llm_module, "QUEUED_TOKENS", 20)
    kept = llm.core.add

    def refuse_long(requests):
        if requests[0].num_prompt_tokens == 45:
            raise ContextLengthError("does not fit")
        kept(requests)

    monkeypatch.setattr(llm.core, "add", refuse_long)
    with pytest.raises(ContextLengthError, match="does not fit"):
        llm.generate(PROMPTS, GREEDY)
    assert idle(llm)


def test_warming_a_core_warms_its_features(llm, monkeypatch):
    warmed = []
    monkeypatch.setattr(MaskingGrammars, "warm", lambda self: warmed.append(self))
    llm.core.warm(0.0)
    assert len(warmed) == 1


@pytest.mark.parametrize("is_on", [True, False])
def test_new_objects_are_collected_while_requests_run_unless_collections_are_off(llm, is_on):
    seen = []
    note = lambda phase, info: seen.append((info["generation"], len(llm._output)))
    try:
        if not is_on:
            gc.disable()
        gc.callbacks.append(note)
        llm.generate(PROMPTS, GREEDY)
    finally:
        gc.callbacks.remove(note)
        gc.enable()
    assert ((0, len(PROMPTS)) in seen) == is_on


def test_the_signature_is_that_of_the_settings(path):
    ours = inspect.signature(LLM).parameters
    theirs = inspect.signature(EngineArgs).parameters
    assert list(ours.values()) == list(theirs.values())
    assert ours["model"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert all(
        p.kind is inspect.Parameter.KEYWORD_ONLY and p.annotation
        for p in ours.values()
        if p.name != "model"
    )
    explained = LLM.__init__.__doc__.splitlines()
    assert [line.split(":")[0] for line in explained] == list(ours)
    assert (
        "dtype: type of the computation: auto, float32, bfloat16 or float16 (default: auto)"
        in explained
    )


def test_a_misspelt_setting_is_answered_with_the_likely_one(path):
    for make_it in (LLM, EngineArgs):
        with pytest.raises(
            TypeError, match="'max_num_batched_token'; did you mean 'max_num_batched_tokens'"
        ):
            make_it(str(path), max_num_batched_token=3)
        with pytest.raises(TypeError, match=r"no setting 'xyzzy'$"):
            make_it(str(path), xyzzy=3)


def test_settings_that_are_together_already_and_the_phases_of_the_start(path):
    told = []
    args = EngineArgs(str(path), device="cpu", skip_tokenizer_init=True, max_model_len=64)
    with LLM.from_engine_args(args, progress=told.append) as llm:
        assert llm.config.origins["max_model_len"].source == "user"
        assert llm.config.origins["block_size"].source == "default"
    assert (told[0], told[-1]) == ("model", "tokenizer")


def test_an_interrupted_step_leaves_no_false_prefix(path, llm, monkeypatch):
    """A step that was planned but not carried out has offered blocks to the prefix cache that hold nothing."""
    prompt = {"prompt_token_ids": list(range(3, 60))}
    expected = tokens_of(llm.generate([prompt], GREEDY))
    fresh = make(path)
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise KeyboardInterrupt

        runner = fresh.core.executor.runner
        patch.setattr(runner.forwards, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fresh.generate([prompt], GREEDY)
        assert idle(fresh)
        assert not fresh.core.executor.runner.rows.rows
    assert tokens_of(fresh.generate([prompt], GREEDY)) == expected
    assert fresh.stats().num_free_blocks == fresh.stats().num_blocks


def test_only_one_may_step_the_engine(llm):
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    for again in (
        lambda: llm.generate(PROMPTS[1], GREEDY),
        lambda: next(llm.stream(PROMPTS[1], GREEDY)),
    ):
        with pytest.raises(RequestError, match="in the middle of a stream"):
            again()
    rest = [token for delta in stream for token in delta.outputs[0].token_ids]
    assert len(rest) == 11
    assert llm.generate(PROMPTS[1], GREEDY)


def test_choices_share_a_prompt_and_it_counts_once(path):
    fresh = make(path)
    before = fresh.stats()
    (output,) = fresh.generate(
        PROMPTS[3], dataclasses.replace(GREEDY, n=3, temperature=1.0, seed=1)
    )
    after = fresh.stats()
    assert output.num_cached_tokens == 0
    assert after.prompt_tokens_total - before.prompt_tokens_total == 45
    assert after.prefix_hits == 0
    assert after.generation_tokens_total - before.generation_tokens_total == 36


def test_prompt_log_probabilities_survive_preemption(path, llm):
    """A prompt that is computed again, in other pieces, has its log-probabilities once."""
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=1)
    expected = [
        [p.chosen.logprob for p in o.prompt_logprobs[1:]] for o in llm.generate(PROMPTS, sampling)
    ]
    small = make(
        path, kv_cache_bytes=llm.ledger.block_bytes * 6, max_model_len=80, max_num_batched_tokens=8
    )
    outputs = small.generate(PROMPTS, sampling)
    assert small.stats().num_preemptions > 0
    for output, values in zip(outputs, expected, strict=True):
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        assert [p.chosen.logprob for p in output.prompt_logprobs[1:]] == pytest.approx(
            values, abs=1e-4
        )


@pytest.mark.parametrize("family", ["llama", "gptj", "gemma3_text", "gpt2"])
@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        ({"quantization": "int8"}, 1e-5, 0.05),
        ({"quantization": "fp8"}, 1e-4, 0.3),
        ({"quantization": "fp8-head"}, 1e-4, 0.3),
        ({"quantization": "int4-g32"}, 1e-3, 0.8),
        ({"kv_cache_dtype": "int8"}, 1e-6, 0.05),
        ({"kv_cache_dtype": "fp8"}, 1e-5, 0.1),
    ],
    ids=lambda s: "+".join(s.values()) if isinstance(s, dict) else "",
)
def test_rounded_weights_and_caches_change_little_and_something(
    tmp_path, family, settings, least, most
):
    sizes = (
        dict(n_embd=64) if family.startswith("gpt") else dict(hidden_size=64, intermediate_size=192)
    )
    tiny_models.write(tmp_path, family, initializer_range=0.1, **sizes)

    def logprobs(**given):
        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        engine = make(tmp_path, kernels="reference", skip_tokenizer_init=True, **given)
        outputs = engine.generate(PROMPTS, sampling)
        return torch.tensor([p.chosen.logprob for o in outputs for p in o.prompt_logprobs[1:]])

    change = (logprobs(**settings) - logprobs()).abs().mean().item()
    assert least < change < most


def test_a_context_left_open_is_lowered_to_what_fits(path, llm):
    small = make(path, max_model_len=None, kv_cache_bytes=llm.ledger.block_bytes * 4)
    assert small.config.model.max_model_len == 3 * 16
    origin = small.config.origins["max_model_len"]
    assert origin.source == "memory"
    assert "lowered" in origin.reason


def test_ledger_agrees_with_the_formula(llm):
    spec = llm.core.description.spec
    attention = spec.layers[0].attention
    per_token = 2 * spec.num_layers * attention.num_kv_heads * attention.head_dim * 4
    assert llm.ledger.block_bytes == per_token * 16
    cache = sum(layer.k.nbytes + layer.v.nbytes for layer in llm.core.executor.runner.kv)
    assert llm.ledger.kv_bytes == cache


# --- The generation config's defaults -----------------------------------------------------------------------------------

USUAL = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        ),
        (
            {"temperature": 0.6, "repetition_penalty": 1.2},
            USUAL | {"repetition_penalty": 1.2},
        ),  # it does not sample
        ({}, USUAL),
    ],
    ids=str,
)
def test_the_generation_config_gives_the_defaults(tmp_path, config, expected):
    tiny_models.write_with_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **config}))
    with make(tmp_path) as llm:
        default = llm.get_default_sampling_params()
        assert default == SamplingParams(**expected)
        seeded = dataclasses.replace(default, seed=3)
        assert (
            llm.generate("hello", seeded)[0].outputs[0].token_ids
            == llm.generate("hello", seeded)[0].outputs[0].token_ids
        )
        assert llm.generate("hello")[0].finished


def test_a_wrong_generation_config_is_refused_at_the_start(tmp_path):
    tiny_models.write_with_tokenizer(tmp_path)
    for value in (-1.0, "warm"):
        (tmp_path / "generation_config.json").write_text(
            json.dumps({"do_sample": True, "temperature": value})
        )
        with pytest.raises(UnsupportedModelError, match=r"generation_config\.json: temperature"):
            make(tmp_path)
