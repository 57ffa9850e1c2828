"""Hints for settings and flags of other engines: by what they mean, not by their letters."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from slipstream import LLM, BeamSearchParams, SamplingParams
from slipstream.base.other_engines import _BY_REASON, METHODS, NEEDLESS, OF_SERVE, SETTINGS
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
            EngineArgs(model="m", **{name: 1})
        ours = SETTINGS.get(name, name)
        meant = (NEEDLESS.get(name, ours), f"--{ours}".replace("_", "-"))
        if (ours == name and name not in {*NEEDLESS, *OF_SERVE}) or not any(
            one in str(caught.value) for one in meant
        ):
            unknown.append(name)
    for name in surface["serve"]:
        flag = f"--{name}".replace("_", "-")
        try:
            parser.parse_args(["serve", "m", flag, "1"])
        except UsageError as error:
            ours = f"--{SETTINGS.get(name)}".replace("_", "-")
            if NEEDLESS.get(name, f"did you mean {ours}?") not in error.message:
                unknown.append(flag)
    assert not unknown


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
