"""Prompts whose tokens all see each other (PaliGemma): their text, whole steps, hits, ranks, and chats over HTTP."""

from __future__ import annotations

import base64
import dataclasses
import io

import pytest

from slipstream import AsyncLLM, SamplingParams
from slipstream.config import EngineArgs
from slipstream.core.cache.sessions import Sessions
from slipstream.engine.grammars.compiling import GrammarCompiler
from slipstream.errors import ConfigError, RequestError
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.params.options import RequestOptions
from tests.engine.media.test_vision import (
    GREEDY,
    engine,
    largest_difference,
    prompt_of,
    their_greedy,
    their_logprobs,
)
from tests.server.conftest import serving
from tests.support import forked_ranks
from tests.support.vision_models import PROCESSING, build_vision, picture


@pytest.fixture(scope="module")
def paligemma(tmp_path_factory):
    path = tmp_path_factory.mktemp("paligemma2")
    return path, build_vision(path, "paligemma2", seed=3)


def test_a_prompt_has_the_tokens_of_transformers_processor(paligemma):
    from transformers import PaliGemmaProcessor, PreTrainedTokenizerFast
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    path, _ = paligemma
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"),
        bos_token="<bos>",
        extra_special_tokens={"image_token": "<image>"},
    )
    settings = {k: v for k, v in PROCESSING["paligemma"].items() if k != "image_processor_type"}
    images = SiglipImageProcessorPil(**settings)
    images.image_seq_length = 64
    theirs = PaliGemmaProcessor(images, tokenizer)
    with engine(path) as llm:
        for count in (1, 2):
            prompt = prompt_of("paligemma", *[picture(i) for i in range(count)], words="")
            made = theirs(images=[prompt["multi_modal_data"]["image"]], text=[prompt["prompt"]])
            (answer,) = llm.generate(prompt, GREEDY)
            assert list(answer.prompt_token_ids) == list(made["input_ids"][0])


def test_a_step_that_can_not_hold_a_prompt_is_refused(paligemma):
    with (
        pytest.raises(ConfigError, match="max_num_batched_tokens"),
        engine(paligemma[0], max_num_batched_tokens=512),
    ):
        pass


def test_chunks_that_were_asked_for_are_refused_by_name(paligemma):
    words = "enable_chunked_prefill=True .* reads prompts whole"
    with (
        pytest.raises(ConfigError, match=words),
        engine(paligemma[0], enable_chunked_prefill=True),
    ):
        pass


def test_a_prompt_longer_than_the_window_is_refused(paligemma):
    with engine(paligemma[0]) as llm, pytest.raises(RequestError, match="window has 300"):
        llm.generate(prompt_of("paligemma2", *[picture(i) for i in range(5)]), GREEDY)


def test_hits_are_of_the_whole_prompt_or_none(paligemma):
    """A prompt's first blocks depend on its last words. The tokens after a hit see all of the prompt."""
    path, model = paligemma
    first, second = (prompt_of("paligemma2", picture(1), end=end) for end in (" what?", " where?"))
    wanted = dataclasses.replace(GREEDY, prompt_logprobs=0)
    with engine(path) as llm:
        for prompt in (first, second):
            (cold,) = llm.generate(prompt, GREEDY)
            assert cold.num_cached_tokens == 0
            (warm,) = llm.generate(prompt, GREEDY)
            left = len(warm.prompt_token_ids) - warm.num_cached_tokens
            assert 1 <= left <= 4
            ids = list(cold.prompt_token_ids)
            exact = their_greedy("paligemma2", model, ids, [picture(1)])
            assert list(cold.outputs[0].token_ids) == list(warm.outputs[0].token_ids) == exact
        together = llm.generate([first, second, first], dataclasses.replace(wanted, n=2))
        for answer in together:
            theirs = their_logprobs("paligemma2", model, answer.prompt_token_ids, [picture(1)])
            assert largest_difference(answer, theirs) < 2e-4
            assert answer.outputs[0].token_ids == answer.outputs[1].token_ids


def test_prompts_of_one_salt_share_a_compiled_grammar_and_recent_answers(paligemma, monkeypatch):
    """The keys of blocks alone are of one prompt and salt."""
    first, second = (prompt_of("paligemma2", picture(1), end=end) for end in (" what?", " where?"))
    number = StructuredOutputsParams(regex="[0-9]{12}")
    guided = SamplingParams(temperature=0, max_tokens=16, structured_outputs=number)
    drafts = {"method": "suffix", "num_speculative_tokens": 3}
    compiled, compile_ = [], GrammarCompiler.compile
    monkeypatch.setattr(
        GrammarCompiler, "compile", lambda *given: compiled.append(given[1]) or compile_(*given)
    )
    asked, arrived = [], Sessions.arrived
    monkeypatch.setattr(
        Sessions,
        "arrived",
        lambda self, keys, hints, salt: (
            asked.append((keys[0], salt)) or arrived(self, keys, hints, salt)
        ),
    )
    with engine(paligemma[0], speculative_config=drafts) as llm:
        plain = [llm.generate(x, guided)[0] for x in (first, second)]
        assert [x.num_cached_tokens for x in plain] == [0, 0]
        assert compiled == [number]
        options = [RequestOptions(cache_salt=salt) for salt in "aba"]
        made = [llm._input.prepare(first, guided, x).engine_requests[0] for x in options]
        other = llm._input.prepare(second, guided, options[0]).engine_requests[0]
    assert [salt for _, salt in asked] == ["", ""]
    assert [x.cache_salt for x in made] == ["a", "b", "a"]
    assert made[0].prefix_salt == made[2].prefix_salt != made[1].prefix_salt
    assert other.prefix_salt not in {x.prefix_salt for x in made}
    assert len({key for key, _ in asked}) == 2


@pytest.mark.slow
def test_ranks_that_share_keys_see_the_whole_prompt(paligemma):
    path, model = paligemma
    prompt = prompt_of("paligemma2", picture(1), picture(2, 64, 30))
    with forked_ranks.used(), engine(path, context_parallel_size=2) as llm:
        answers = [llm.generate(prompt, GREEDY)[0] for _ in range(2)]
    ids = list(answers[0].prompt_token_ids)
    exact = their_greedy("paligemma2", model, ids, [picture(1), picture(2, 64, 30)])
    assert [list(x.outputs[0].token_ids) for x in answers] == [exact] * 2


@pytest.mark.slow
def test_chats_over_http_have_the_prompts_of_generate(paligemma):
    path, _ = paligemma
    file = io.BytesIO()
    picture(1).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    with engine(path) as llm:
        (exact,) = llm.generate(prompt_of("paligemma2", picture(1), words="", end="cd?"), GREEDY)
        text = exact.outputs[0].text
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "cd?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "model": "x"}
    args = EngineArgs(model=str(path), dtype="float32", block_size=4, kv_cache_bytes=2**24)
    with (
        serving(start=lambda: AsyncLLM.start(args), served_model_names=("x",)) as server,
        server.http() as http,
    ):
        for _ in range(2):  # the second from the cache
            more = {"temperature": 0, "ignore_eos": True}
            answer = http.post("/v1/chat/completions", json={**body, **more}).json()
            assert answer["choices"][0]["message"]["content"] == text
            assert answer["usage"]["prompt_tokens"] == len(exact.prompt_token_ids)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
