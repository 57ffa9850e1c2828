"""Runs the steps of an encoder, which reads whole texts and has no cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.kernels.metadata import LayerKV
from slipstream.messages.texts import TextsPlan
from slipstream.worker.forward.eager_texts import EagerTexts
from slipstream.worker.in_flight import InFlightStep
from slipstream.worker.inputs.input_batch import NO_ROWS
from slipstream.worker.runner import Runner

if TYPE_CHECKING:
    from slipstream.worker.forward.texts import TextGraphs
    from slipstream.worker.loaded_runner import LoadedRunner


class TextRunner(Runner):
    """Runs an encoder's steps: vectors or scores of whole texts."""

    def __init__(self, loaded: LoadedRunner, kv: list[LayerKV]) -> None:
        super().__init__(loaded, kv)
        self._given = self.forwards, self.model.description.pooling, kv, self.config
        self.eager = EagerTexts(*self._given, self.platform.device)
        self.texts: EagerTexts | TextGraphs = self.eager

    def capture(self) -> None:
        from slipstream.worker.forward.texts import TextGraphs

        self.texts = graphs = TextGraphs(*self._given, self.model.description.text_task)
        graphs.capture()

    def launch(self, plan: TextsPlan) -> InFlightStep:
        with self.platform.values.inference():
            texts = self.texts if self.texts.covers(plan) else self.eager
            # copied before the next replay overwrites them
            vectors, done = self.platform.to_host(texts.run(plan)), self.platform.record()
            of_tokens = plan.task != "embed"
            return InFlightStep(plan, None, NO_ROWS, done, vectors=vectors, per_token=of_tokens)

    def max_in_flight(self, plan: TextsPlan) -> int:
        return 2 if self.platform.is_asynchronous else 1
