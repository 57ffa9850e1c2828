"""Store of captured graphs by size. They share one memory pool, and their inputs keep their
addresses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from slipstream.platform import Graph, Platform
from slipstream.worker.graphs.mixed_inputs import Size


@dataclass(frozen=True, slots=True)
class Captured:
    graph: Graph
    inputs: Tensor  # int32, in the layout that the captured work reads
    output: Tensor  # owned by the graph; every replay overwrites it


class GraphStore:
    """Store of captured graphs by size. A subclass decides what is captured, and when."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self._recorder = platform.graphs() if platform.is_asynchronous else None
        self._captured: dict[Size, Captured] = {}
        self.num_cold = 0

    def _capture(
        self, size: Size, idle: npt.NDArray[np.int32], forward: Callable[[Tensor], Tensor]
    ) -> Captured:
        """Capture a step. `idle`: inputs of a step that consists of padding."""
        inputs = self.platform.upload(idle)  # does not wait for a running step
        graph, output = self._record(lambda: forward(inputs), lambda: self._compiling(size))
        captured = self._captured[size] = Captured(graph, inputs, output)
        self.num_cold += 1
        return captured

    def _record(
        self,
        work: Callable[[], Any],
        compiling: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> tuple[Graph, Any]:
        return (self._recorder or self.platform.graphs()).capture(work, compiling)

    def _compiling(self, size: Size) -> contextlib.AbstractContextManager[None]:
        """Context around the run that compiles kernels before a capture."""
        return contextlib.nullcontext()
