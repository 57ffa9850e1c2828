"""Features take part in scheduling through one interface, and cost nothing where they are not used."""

from __future__ import annotations

import pytest

from slipstream.config.forms import NgramDrafts
from slipstream.core.make import make_scheduler
from slipstream.core.participants.base import Participant
from slipstream.core.scheduler import Scheduler
from slipstream.errors import AdapterError, EngineOverloadedError
from slipstream.messages.finish_reason import FinishReason
from slipstream.params.lora_request import LoRARequest
from slipstream.params.sampling import SamplingParams
from tests.core.configs import config
from tests.core.test_scheduler import Engine, request


def test_a_plain_request_has_no_participants():
    scheduler = make_scheduler(**config(), max_adapters=2, whole_media=True)
    scheduler.add(request("a", range(3)))
    own = scheduler.requests.by_id["a"]
    assert (own.participants, own.guide) == ((), None)


def test_drafts_take_no_part_in_requests_whose_state_advances_token_by_token():
    scheduler = make_scheduler(**config(speculation=NgramDrafts()))
    scheduler.add(request("a", range(3)))
    mirostat = SamplingParams(max_tokens=3, mirostat_mode=2)
    scheduler.add(request("b", range(3), sampling=mirostat))
    scheduler.add(request("c", range(3), pooled=True, max_tokens=0))
    counts = [len(scheduler.requests.by_id[name].participants) for name in "abc"]
    assert counts == [1, 0, 0]


class Licences(Participant):
    """A resource of admission: one request at a time."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def concerns(self, request):
        return request.request_id.startswith("licensed")

    def admits(self, request):
        if request.request_id.endswith("broken"):
            raise AdapterError("no licence can be read", field="licence")
        return "+" not in "".join(self.log).rpartition("-")[2]

    def started(self, request):
        self.log.append("+")

    def stopped(self, request):
        self.log.append("-")


def test_a_new_participant_is_a_resource_of_admission():
    engine, licences = Engine(config()), Licences()
    engine.scheduler = Scheduler(**config(), participants=[licences], clock=lambda: engine.now)
    for name in ("licensed 1", "licensed 2", "licensed 3 broken", "plain"):
        engine.scheduler.add(request(name, range(3), max_tokens=3))
    engine.run()
    assert licences.log == ["+", "-", "+", "-"]
    admitted = [new.request_id for plan in engine.plans for new in plan.new]
    assert admitted == ["licensed 1", "plain", "licensed 2"]
    assert engine.ends["licensed 3 broken"] is FinishReason.INVALID


class Places:
    """Loads adapters into one place, as a host does."""

    def __init__(self) -> None:
        self.held, self.reads = 0, 0

    def load(self, lora, keep):
        if self.held != lora.id:
            if self.held in keep():
                raise EngineOverloadedError("no place")
            self.held, self.reads = lora.id, self.reads + 1
        return "version"


@pytest.mark.parametrize("depth", [1, 2])
def test_adapters_wait_for_a_place_like_requests_for_blocks(depth):
    places = Places()
    engine = Engine({**config(), "max_adapters": 1, "load_adapter": places.load}, depth)
    loras = [LoRARequest(name, i, name) for i, name in enumerate("ab", 1)]
    for i in range(6):
        engine.scheduler.add(request(f"r{i}", range(8), max_tokens=3, lora=loras[i % 2]))
    engine.run()
    assert sorted(engine.ends) == [f"r{i}" for i in range(6)]
    assert places.reads == 2  # those with an adapter that is there overtake
