"""Hints for settings and flags of other engines: by what they mean, not by their letters."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from slipstream import LLM, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from slipstream.base.arguments import say_without_effect
from slipstream.base.other_engines import (
    _BY_REASON,
    ADVICE,
    FIELDS,
    METHODS,
    NEEDLESS,
    OF_SERVE,
    SETTINGS,
    TAKEN,
)
from slipstream.cli.main import build_parser
from slipstream.cli.parser import UsageError
from slipstream.config import EngineArgs
from slipstream.server.state import ServerSettings

MEANT = {
    "max_num_queued_reqs": "the nearest is max_queue",
    "kv_offloading_size": "the nearest is kv_host_bytes",
    "enable_eplb": "expert_parallel_size",
    "mamba_block_size": "state_slots",
    "cudagraph_capture_sizes": "enforce_eager",
    "enable_cumem_allocator": "no such feature",
    "served_model_name": "--served-model-name",
    "shutdown_timeout": "--drain-timeout",
    "max_num_sqs": "did you mean 'max_num_seqs'",
}


@pytest.mark.parametrize("name", MEANT)
def test_a_setting_of_vllm_is_refused_with_what_it_means_here(name):
    with pytest.raises(TypeError) as caught:
        EngineArgs(model="m", **{name: 1})
    assert MEANT[name] in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--max-num-queued-reqs", "did you mean --max-queue?"),
        ("--enable-eplb", "expert_parallel_size"),
        ("--uvicorn-log-level", "--log-format"),
        ("--shutdown-timeout", "did you mean --drain-timeout?"),
        ("--allowed-origins", "did you mean --cors-origin?"),
    ],
)
def test_a_flag_of_vllm_is_refused_with_what_it_means_here(flag, said):
    with pytest.raises(UsageError) as caught:
        build_parser(["serve"]).parse_args(["serve", "m", flag, "1"])
    assert said in caught.value.message
    assert "enable-lora" not in caught.value.message


def _surface():
    """Names of vLLM 0.33 that no setting here has: arguments of LLM and EngineArgs, and flags of `vllm serve`."""
    text = (Path(__file__).parents[1] / "data" / "vllm_surface.txt").read_text()
    parts = [part.split() for part in text.split("# ")[1:]]
    return {kind: names for kind, *names in parts}


def test_every_argument_and_flag_of_vllm_is_known_or_refused_with_what_it_means_here():
    surface, parser = _surface(), build_parser(["serve"])
    assert [len(names) for names in surface.values()] == [29, 201, 278]
    unknown = []
    for name in surface["LLM"] + surface["EngineArgs"]:
        with pytest.raises(TypeError) as caught:
            EngineArgs(model="m", **{name: 7})
        ours = SETTINGS.get(name, name)
        meant = (NEEDLESS.get(name, ours), f"--{ours}".replace("_", "-"))
        if (ours == name and name not in {*NEEDLESS, *OF_SERVE}) or not any(
            one in str(caught.value) for one in meant
        ):
            unknown.append(name)
    for name in surface["serve"]:
        flag = f"--{name}".replace("_", "-")
        try:
            parser.parse_args(["serve", "m", flag, "7"])
        except UsageError as error:
            ours = f"--{SETTINGS.get(name)}".replace("_", "-")
            if NEEDLESS.get(name, f"did you mean {ours}?") not in error.message:
                unknown.append(flag)
    assert not unknown


def test_what_is_done_anyway_is_taken_and_said_to_have_no_effect(caplog):
    say_without_effect.cache_clear()
    given = dict(async_scheduling=True, tokenizer_mode="auto", max_logprobs=20, max_num_seqs=3)
    assert EngineArgs(model="m", **given) == EngineArgs(model="m", max_num_seqs=3)
    assert caplog.messages == [
        "async_scheduling has no effect: the next step is always planned while one runs",
        "tokenizer_mode has no effect: the tokenizer is the checkpoint's",
        "max_logprobs has no effect: a request may ask for up to 20",
    ]
    for name, value in (
        ("async_scheduling", False),
        ("tokenizer_mode", "slow"),
        ("max_logprobs", 21),
        ("trust_remote_code", True),
    ):
        with pytest.raises(TypeError, match=f"there is no setting '{name}'; leave it out"):
            EngineArgs(model="m", **{name: value})


def test_what_only_advises_is_taken_and_said_not_to_be_followed(caplog):
    say_without_effect.cache_clear()
    given = dict(n_gpu_layers=99, performance_mode="throughput", optimization_level=3)
    assert EngineArgs(model="m", **given, uvicorn_log_level="debug") == EngineArgs(model="m")
    assert [m.split(": ")[0].partition(" ")[2] for m in caplog.messages] == 4 * [
        "is advice that is not followed"
    ]
    assert "without a GPU the CPU computes all" in caplog.messages[0]
    assert "at one level" in caplog.messages[3]
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    anyway, _, advice = page.partition("These only advise.")
    for name in TAKEN:
        flag = f"`--{'no-' * (TAKEN[name] == ('false',))}{name}`".replace("_", "-")
        assert (flag in advice, flag in anyway) == (name in ADVICE, name not in ADVICE)


def test_an_error_of_the_settings_own_is_told_next_to_one_that_is_taken():
    with pytest.raises(TypeError, match="max_num_seqs"):
        EngineArgs(model="m", async_scheduling=True, max_num_sqs=3)
    with pytest.raises(TypeError, match="model"):
        EngineArgs(async_scheduling=True)


@pytest.mark.parametrize("name", TAKEN)
def test_each_option_that_is_taken_is_refused_with_another_value_and_documented(name):
    flag = f"--{'no-' * (TAKEN[name] == ('false',))}{name}".replace("_", "-")
    parser = build_parser(["serve"])
    for value in TAKEN[name]:
        words = [] if value in ("true", "false") else [value]
        args = parser.parse_args(["serve", "m", flag, *words])
        assert (args.models, args.taken) == (["m"], {flag: name})
        if words:
            with pytest.raises(UsageError) as caught:
                parser.parse_args(["serve", "m", flag, "xyz"])
            assert NEEDLESS[name] in caught.value.message
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert f"`{flag}`" in page


@pytest.mark.parametrize("kind", [RequestOutput, CompletionOutput])
def test_a_field_of_vllms_answers_is_read_or_refused_with_what_to_read(kind):
    own = kind(*(None for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING))
    vllms = (
        "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics lora_request "
        "encoder_prompt encoder_prompt_token_ids num_cached_tokens num_cache_creation_tokens "
        "prompt_token_id_logprobs kv_transfer_params ec_transfer_params"
        if kind is RequestOutput
        else "index text token_ids cumulative_logprob logprobs finish_reason stop_reason "
        "routed_experts lora_request sampling_mask spec_decode_metrics weight_versions"
    )
    for name in vllms.split():
        if not hasattr(own, name):
            with pytest.raises(AttributeError) as caught:
                getattr(own, name)
            assert str(caught.value).endswith(f"has no attribute {name!r}; {FIELDS[name]}")
    with pytest.raises(AttributeError, match=r"'made_up'$"):
        _ = own.made_up


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            SamplingParams,
            "watermarking stream_interval skip_clone output_text_buffer_length extra_args "
            "skip_reading_prefix_cache routed_experts_prompt_start trace_decode_token_ids flat_logprobs",
        ),
        (
            BeamSearchParams,
            "temperature include_stop_str_in_output structured_outputs skip_special_tokens allowed_token_ids",
        ),
    ],
)
def test_a_parameter_of_vllm_is_refused_with_what_to_do_instead(kind, names):
    for name in names.split():
        with pytest.raises(TypeError, match=r"; (leave it out|the nearest is)"):
            kind(**{name: 1})


def test_a_hint_of_parameters_is_told_for_their_own_class_alone():
    with pytest.raises(TypeError) as caught:
        object.__new__(LLM).embed("x", temperature=1)
    assert "continuations" not in str(caught.value)


def test_a_property_s_own_error_is_not_hidden_by_hints():
    with pytest.raises(AttributeError, match="'_core'"):
        _ = object.__new__(LLM).config


def test_a_page_that_a_hint_names_says_the_same():
    docs = Path(__file__).parents[2]
    for said in METHODS.values():
        if page := re.search(r"^(.*) \((docs/.*\.md)\)$", said):
            assert page[1] in (docs / page[2]).read_text().lower()


def test_a_method_of_vllm_s_llm_is_refused_with_what_to_do_instead():
    llm = object.__new__(LLM)
    for name, said in METHODS.items():
        with pytest.raises(AttributeError) as caught:
            getattr(llm, name)
        assert said in str(caught.value)
    assert not hasattr(llm, "made_up")


def test_the_table_names_each_setting_once_and_only_settings_that_exist():
    listed = [name for names in _BY_REASON.values() for name in names.split()]
    assert len(listed) == len(set(listed)) > 200
    own = {
        field.name for kind in (EngineArgs, ServerSettings) for field in dataclasses.fields(kind)
    }
    # A server's setting that is no option of `serve`.
    assert own & (set(NEEDLESS) | set(SETTINGS)) == {"ssl_ca_certs"}
    assert set(SETTINGS.values()) <= own | set(OF_SERVE)
