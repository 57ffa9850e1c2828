"""An adapter named by requests. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import AdapterError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter to answer with: a folder saved by PEFT. An `id` (above 0) must mean the same folder as long
    as the engine runs; the name is for people. The fields can also be read by vLLM's names."""

    name: str
    id: int
    path: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise AdapterError(f"the name of an adapter is a text, got {self.name!r}", field="name")
        if not isinstance(self.id, int) or isinstance(self.id, bool) or not 0 < self.id < 2**31:
            raise AdapterError(
                f"the id of an adapter is a whole number above 0, got {self.id!r}", field="id"
            )
        object.__setattr__(self, "path", str(self.path))

    @property
    def lora_name(self) -> str:
        return self.name

    @property
    def lora_int_id(self) -> int:
        return self.id

    @property
    def lora_path(self) -> str:
        return self.path
