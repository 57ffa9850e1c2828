"""Several models without engines: what `ModelSlots` and its app do is real, and loading takes no time or as long as told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from slipstream.config import EngineArgs
from slipstream.errors import DownloadError, EngineDeadError
from slipstream.server.many.app import ManyEngines
from slipstream.server.many.slot import ServedModel, Slot
from slipstream.server.many.slots import ModelSlots
from tests.server.fake_engine import FakeEngine

ASLEEP = 10  # bytes that a sleeping model holds


class FakeModel(FakeEngine):
    @property
    def is_alive(self):
        return not self.dead


class FakeSlot(Slot):
    """`gate`: loads wait for it. `faults`: errors of the next loads."""

    def __init__(self, model):
        super().__init__(model)
        self.gate, self.faults, self.ended = None, [], 0

    async def load(self, *, low_priority=False):
        self.loaded_at_low_priority = low_priority
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.faults:
            raise self.faults.pop(0)
        self.engine = self.engine or FakeModel()
        self.engine.dead, self.last_load_s = False, 0.25
        self.engine.config.device = SimpleNamespace(info=SimpleNamespace(is_cuda=False))

    async def unload(self):
        await asyncio.sleep(0)
        self.held_bytes = ASLEEP

    async def end(self):
        self.held_bytes, self.ended = 0, self.ended + 1


def model(name, num_bytes=100, **more):
    return ServedModel(
        **{
            "name": name,
            "args": EngineArgs(model=f"org/{name}"),
            "description": FakeEngine.description,
            "max_model_len": 512,
            "num_bytes": num_bytes,
            "keep_alive_s": 300.0,
            **more,
        }
    )


def describe(name, given, options):
    if name != "new":
        raise DownloadError(f"there is no model {name!r}", field="model")
    options.progress(5, 10)
    return model(name)


def slots_of(*models, memory=250, wait_s=30.0, **more):
    made = [model(m) if isinstance(m, str) else m for m in models]
    return ModelSlots(
        made, memory_bytes=memory, wait_s=wait_s, describe=describe, make_slot=FakeSlot, **more
    )


def engines_of(*models, **how):
    return ManyEngines(slots_of(*models, **how))


DEAD = EngineDeadError("the engine process was killed by signal 9")
