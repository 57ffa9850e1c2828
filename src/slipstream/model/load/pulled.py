"""Lazy weights: each is made when the builder takes it. No torch.

A load is a chain: a source lists a checkpoint's tensors (or draws random ones), transforms cut,
expand or dequantize them, and a builder takes each parameter, packs it and drops it. The links pass
functions, not values. So at most one module is in memory unpacked, however the model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

V = TypeVar("V")


class Pulled(MutableMapping[str, V]):
    """Lazy mapping of values by name. Reading a value makes it anew each time; `pop` makes it for
    the last time. A value that was set is kept."""

    def __init__(self, makers: Mapping[str, Callable[[], V]]) -> None:
        self._makers = dict(makers)
        self._kept: dict[str, V] = {}

    def __getitem__(self, name: str) -> V:
        return self._kept[name] if name in self._kept else self._makers[name]()

    def __setitem__(self, name: str, value: V) -> None:
        self._makers.pop(name, None)
        self._kept[name] = value

    def __delitem__(self, name: str) -> None:
        if self._kept.pop(name, None) is None:
            del self._makers[name]

    def __contains__(self, name: object) -> bool:
        return name in self._kept or name in self._makers

    # The base class's `get` and `pop` would mistake a KeyError raised while making a value for a missing name.

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def pop(self, name: str, *default: Any) -> Any:
        if default and name not in self:
            return default[0]
        value = self[name]
        del self[name]
        return value

    def __iter__(self) -> Iterator[str]:
        yield from list(self._makers)
        yield from list(self._kept)

    def __len__(self) -> int:
        return len(self._makers) + len(self._kept)

    @classmethod
    def of(cls, values: Mapping[str, V]) -> Pulled[V]:
        """A mapping with these values, which are read one by one as they are taken."""
        if isinstance(values, Pulled):
            return values
        found: Pulled[V] = cls({})
        found._kept.update(values)
        return found

    def only(self, wanted: Callable[[str], bool]) -> Pulled[V]:
        """The values whose names are `wanted`, as another mapping. Taking from it leaves this one unchanged."""
        own = Pulled({name: make for name, make in self._makers.items() if wanted(name)})
        own._kept.update({name: value for name, value in self._kept.items() if wanted(name)})
        return own


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights by the names of `spec.parameters`: dense parameters (tensors or arrays),
    and already quantized linear layers without biases."""

    values: Pulled[Any]
    products: Pulled[Any]

    def layer(self, prefix: str) -> Weights:
        """Returns the weights whose names begin with `prefix`."""
        return self._only(lambda name: name.startswith(prefix))

    def ends(self) -> Weights:
        """Returns the weights outside the layers."""
        return self._only(lambda name: not name.startswith("layers."))

    def _only(self, wanted: Callable[[str], bool]) -> Weights:
        return Weights(self.values.only(wanted), self.products.only(wanted))
