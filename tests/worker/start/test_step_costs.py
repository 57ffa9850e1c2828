"""The time of steps, measured by the runner that would serve them."""

from __future__ import annotations

import itertools

import pytest

from slipstream.config import EngineArgs
from slipstream.worker.host_loading import HostLoaded
from slipstream.worker.local_executor import LocalExecutor
from slipstream.worker.start.step_costs import Step, measure_steps
from slipstream.worker.torch_loading import TorchLoaded

PROMPT = ((0, 16),)
STEPS = [
    Step(decodes=(32, 32, 32)),
    Step(prompts=PROMPT),
    Step(decodes=(32,), prompts=PROMPT),
    Step(verified=((32, 3),)),
]


def executor(model, *, by_torch, **settings):
    settings |= {"device": "cpu", "num_threads": 1, "block_size": 16, "max_num_seqs": 4}
    args = EngineArgs(model=str(model), kv_cache_bytes=2**22, skip_tokenizer_init=True, **settings)
    return LocalExecutor.build(args, by_torch=by_torch)


@pytest.mark.parametrize("cache", ["auto", "int8"])
@pytest.mark.parametrize(("by_torch", "loaded"), [(False, HostLoaded), (True, TorchLoaded)])
def test_either_runner_is_measured(tiny_model, by_torch, loaded, cache):
    made = executor(tiny_model, by_torch=by_torch, kv_cache_dtype=cache)
    assert isinstance(made.runner.loaded, loaded)
    measure_steps(made, STEPS[:1], rounds=1, least_s=0.001)
    assert made.runner.kv[0].k[1].any(), (
        "the cache was never written: its memory is one page of zeros"
    )  # decodes write block 3
    found = measure_steps(made, STEPS, rounds=1, least_s=0.001)
    assert [p.shape for p in found] == [s.shape for s in STEPS]
    assert all(p.seconds > 0 for p in found)


def test_by_a_clock_of_the_callers(tiny_model):
    ticks = itertools.count()
    found = measure_steps(
        executor(tiny_model, by_torch=False),
        STEPS[:1],
        rounds=1,
        least_s=4.0,
        clock=lambda: float(next(ticks)),
    )
    assert found[0].seconds == pytest.approx(1 / 4)  # four steps between two ticks
