"""An executor over real processes that meet through gloo: the same answers as one process, and how it ends."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.step_times import StepCosts
from slipstream.errors import ConfigError, EngineError, RequestError
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.worker.ranks import process_executor
from tests.support import forked_ranks, tiny_models
from tests.support.waiting import PATIENCE_S, wait_for

SETTINGS = dict(
    device="cpu",
    dtype="float32",
    max_model_len=256,
    kv_cache_bytes=4 * 2**20,
    max_num_batched_tokens=64,
)
PROMPTS = ["The capital of France is", "in the hour " * 20, "hello"]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(
        temperature=0.9,
        seed=7,
        top_p=0.9,
        max_tokens=12,
        ignore_eos=True,
        presence_penalty=0.5,
        logprobs=3,
    ),
    SamplingParams(
        temperature=0.0, max_tokens=6, prompt_logprobs=2, repetition_penalty=1.3, min_tokens=2, n=1
    ),
    SamplingParams(
        temperature=0.0,
        max_tokens=12,
        structured_outputs=StructuredOutputsParams(regex="[ab]{3,6}"),
    ),
]


def answers(llm):
    """Texts, tokens and log-probabilities, as a user sees them."""
    texts, logprobs = [], []
    for sampling in SAMPLINGS:
        for output in llm.generate(PROMPTS, sampling, progress=False):
            one = output.outputs[0]
            told = [
                *(one.logprobs or ()),
                *(p for p in output.prompt_logprobs or () if p is not None),
            ]
            texts.append((one.text, one.token_ids, one.finish_reason, len(told)))
            logprobs += [p.chosen.logprob for p in told]
    return texts, logprobs


def agree(found, wanted):
    """Log-probabilities to three places: sums of other parts round otherwise."""
    return found[0] == wanted[0] and found[1] == pytest.approx(wanted[1], abs=5e-4)


def ranks_of(llm):
    return [rank.process for rank in llm.core.executor._ranks]


@pytest.fixture(scope="module")
def split(tiny_model):
    with LLM(str(tiny_model), tensor_parallel_size=2, **SETTINGS) as llm:
        yield llm


def test_two_ranks_answer_as_one_device(tiny_model, split):
    with LLM(str(tiny_model), **SETTINGS) as llm:
        wanted = answers(llm)
    assert agree(answers(split), wanted)
    assert agree(answers(split), wanted)  # with all prompts in the cache
    assert split.core.stats().prefix_hits > 0


def test_each_rank_holds_its_part(tiny_model, split):
    first, second = split.core.executor.ledgers
    assert (first.num_blocks, first.block_bytes) == (second.num_blocks, second.block_bytes)
    with LLM(str(tiny_model), **SETTINGS) as llm:
        assert 2 * first.block_bytes == llm.core.ledger.block_bytes
        assert (
            first.weights_bytes < 0.62 * llm.core.ledger.weights_bytes
        )  # norms and position tables are whole


@pytest.mark.usefixtures("forked_ranks")
def test_a_type_is_chosen_once_for_all_ranks(tiny_model, monkeypatch):
    """All ranks use one type, whatever each would measure."""
    from slipstream.worker import device
    from slipstream.worker.ranks import process_executor

    measured = []

    def choose(folder, **how):
        measured.append(folder)
        return dataclasses.replace(real(folder, **how), dtype="float32")

    real = device.choose_cpu
    monkeypatch.setattr(device, "choose_cpu", choose)
    sent = []
    send = process_executor.ProcessExecutor._send
    monkeypatch.setattr(
        process_executor.ProcessExecutor, "_send", lambda *a: (sent.append(a[2]), send(*a))
    )
    with LLM(str(tiny_model), **{**SETTINGS, "dtype": "auto"}, tensor_parallel_size=2) as llm:
        assert llm.core.config.model.dtype == "float32"
    assert len(measured) == 1
    assert [begin.device.best_dtype for begin in sent] == ["float32", "float32"]


def test_a_step_that_was_interrupted_leaves_nothing(split, monkeypatch):
    """The interruption is a Ctrl-C between two steps."""
    from slipstream.messages.requests import EngineRequest

    sampling = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    wanted = split.generate(["hello"], sampling, progress=False)[0].outputs[0].token_ids
    core = split.core
    core.add(
        [
            EngineRequest(
                request_id="a", prompt_token_ids=(5, 6, 7), sampling=sampling, max_tokens=50
            )
        ]
    )
    core.step()
    monkeypatch.setattr(core.scheduler, "update", _stop)
    with pytest.raises(RuntimeError, match="stopped here"):
        _run_on(core)
    monkeypatch.undo()
    assert split.generate(["hello"], sampling, progress=False)[0].outputs[0].token_ids == wanted


def _run_on(core):
    while True:
        core.step()


def _stop(*_):
    raise RuntimeError("stopped here")


def test_a_question_keeps_no_result(split):
    """The chosen experts and all other figures may be asked for while steps are in flight, even by another thread."""
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    wanted = split.generate(PROMPTS, sampling, progress=False)
    executor, stop = split.core.executor, threading.Event()

    def ask():
        while not stop.is_set():
            assert executor.expert_load() == ()

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        found = split.generate(PROMPTS, sampling, progress=False)
        stop.set()
        asking.result(timeout=PATIENCE_S)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]


def test_ranks_answer_again_after_sleep(tiny_model, split):
    with pytest.raises(RequestError, match="level=2"):
        split.sleep(level=1)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("count", [3, "auto"])
def test_a_draft_model_of_each_rank(tiny_model, tmp_path, count, monkeypatch):
    """Each rank has it whole and proposes the same, also where a grammar is to know the drafts."""
    add = StepCosts.add  # each token more costs a tenth of a plain step, whatever this machine does
    monkeypatch.setattr(StepCosts, "add", lambda self, n, m, _: add(self, n, m, 0.9 + 0.1 * m / n))
    tiny_models.write_with_tokenizer(tmp_path, num_hidden_layers=1, max_position_embeddings=1024)
    drafting = {"method": "draft", "model": str(tmp_path), "num_speculative_tokens": count}
    with LLM(str(tiny_model), **SETTINGS) as llm:
        wanted = answers(llm)
    with LLM(
        str(tiny_model), tensor_parallel_size=2, speculative_config=drafting, **SETTINGS
    ) as llm:
        assert agree(answers(llm), wanted)
        assert llm.stats().spec_draft_tokens > 20


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_all_with_its_reason(tiny_model, victim):
    with LLM(str(tiny_model), tensor_parallel_size=2, **SETTINGS) as llm:
        processes = ranks_of(llm)
        processes[victim].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(EngineError, match=f"rank {victim} was killed by signal 9"):
            llm.generate(PROMPTS, SAMPLINGS[0], progress=False)
        assert time.monotonic() - begin < PATIENCE_S / 2
        assert all(process.wait(PATIENCE_S) is not None for process in processes)
        with pytest.raises(EngineError, match=f"rank {victim} was killed"):  # and stays so
            llm.generate(["hello"], SAMPLINGS[0], progress=False)


def test_no_rank_outlives_a_process_that_is_killed(tiny_model):
    forks = forked_ranks.server().fileno()  # ranks of the program are forks, too
    program = (
        "import socket, sys; from slipstream import LLM; from tests.support import forked_ranks\n"
        "forked_ranks.take_from(socket.socket(fileno=int(sys.argv[2])))\n"
        "llm = LLM(sys.argv[1], device='cpu', tensor_parallel_size=2, max_model_len=64, kv_cache_bytes=2**20)\n"
        "print(*(r.process.pid for r in llm.core.executor._ranks), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tiny_model), str(forks)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    parent = subprocess.Popen(command, **pipes, pass_fds=[forks], text=True)
    ids = [int(n) for n in parent.stdout.readline().split()]
    assert len(ids) == 2
    parent.kill()
    parent.wait()
    wait_for(lambda: not [n for n in ids if Path(f"/proc/{n}").exists()], "a rank lives on")


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        ({"tensor_parallel_size": 64}, "tensor_parallel_size", "num_attention_heads"),
        ({"tensor_parallel_size": 4, "device": "cuda"}, "device", "no GPU"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size", "above 0"),
        ({"tensor_parallel_size": 2, "expert_parallel_size": 4}, "expert_parallel_size", "equal"),
        ({"expert_parallel_size": 2}, "expert_parallel_size", "no experts"),
        ({"pipeline_parallel_size": 9}, "pipeline_parallel_size", "more than the model's layers"),
        ({"pipeline_layers": "1,1"}, "pipeline_layers", "only with pipeline_parallel_size"),
        (
            {"pipeline_parallel_size": 2, "pipeline_layers": "1,x"},
            "pipeline_layers",
            "2 numbers above 0",
        ),
        ({"sequence_parallel": True}, "sequence_parallel", "only with tensor_parallel_size"),
        (
            {
                "tensor_parallel_size": 2,
                "local_ranks": 1,
                "rank_address": "127.0.0.1:1",
                "speculative_model": "draft",
            },
            "rank_address",
            "drafts of a model are not for ranks of several hosts",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_a_process_starts(
    tiny_model, monkeypatch, settings, field, says
):
    from slipstream.worker.ranks import process_executor

    monkeypatch.setattr(
        process_executor, "spawn", lambda number: pytest.fail("a process was started")
    )
    with pytest.raises(ConfigError, match=says) as error:
        LLM(str(tiny_model), **{**SETTINGS, **settings})
    assert error.value.field == field


def test_more_ranks_than_cores_are_refused(tiny_model, monkeypatch):
    from slipstream.worker.ranks import process_executor

    monkeypatch.setattr(process_executor, "available_cores", lambda: 3)
    with pytest.raises(ConfigError, match="4 ranks need a core each, and there are 3") as error:
        LLM(str(tiny_model), tensor_parallel_size=4, **SETTINGS)
    assert error.value.field == "tensor_parallel_size"


@pytest.mark.usefixtures("forked_ranks")
def test_what_a_rank_refuses_is_raised_as_it_is(tiny_model):
    """Groups of 128 inputs don't fit a half of 64."""
    with pytest.raises(ConfigError, match="of 2 ranks has a part") as error:
        LLM(str(tiny_model), tensor_parallel_size=2, quantization="int4", **SETTINGS)
    assert error.value.field == "quantization"


@pytest.mark.usefixtures("forked_ranks")
def test_links_stay_open_until_the_message_to_end_is_sent(tiny_model, monkeypatch):
    """A link's number may be another engine's as soon as it is closed."""
    with LLM(str(tiny_model), tensor_parallel_size=2, **SETTINGS) as llm:
        executor, sent_to = llm.core.executor, []
        send = process_executor._send_end

        def late(ranks):
            time.sleep(0.3)  # until all have ended
            sent_to.extend(rank.link._connection.closed for rank in ranks)
            send(ranks)

        monkeypatch.setattr(process_executor, "_send_end", late)
        executor._group.kill()
    assert sent_to == [False, False]
