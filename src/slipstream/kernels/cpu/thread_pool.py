"""The threads of the C++ kernels."""

from __future__ import annotations

from slipstream.base.priority import after_low_priority, at_callers_priority
from slipstream.errors import ConfigError
from slipstream.kernels.cpu.native import instruction_sets, isa_names, load
from slipstream.spec.devices.cpu_isas import CPU_ISAS


class ThreadPool:
    """A pool of threads, the caller's included; `num_used` work. `isa`: by default the fastest."""

    def __init__(self, num_threads: int, isa: str | None = None) -> None:
        usable = instruction_sets(
            emulated=isa is not None and isa in CPU_ISAS and CPU_ISAS[isa].emulated
        )
        if isa is not None and isa not in usable:
            raise ConfigError(f"isa={isa!r} can't run here; {', '.join(usable)} can", field="isa")
        self.isa = usable[-1] if isa is None else isa
        self.num_threads = self.num_used = num_threads
        number = isa_names().index(self.isa)
        self.pointer = at_callers_priority(load().ss_engine_create, num_threads, number)
        if after_low_priority(self.use, num_threads):
            self.use(1)  # the others have the caller's priority

    def use(self, num_threads: int) -> None:
        """Sets the number of threads that work. Results stay the same, bit by bit."""
        assert 1 <= num_threads <= self.num_threads
        self.num_used = num_threads
        load().ss_engine_use(self.pointer, num_threads)

    @property
    def last_s(self) -> float:
        """Seconds of the last step from its beginning to its end, once it was waited for."""
        return int(load().ss_engine_last_ns(self.pointer)) * 1e-9

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            load().ss_engine_destroy(self.pointer)
