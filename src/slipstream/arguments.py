"""A misspelt argument of a public call is answered with the likely one, and another library's with ours."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

OTHERS = {
    "guided_decoding": "structured_outputs",
    "penalty_alpha": "no_repeat_ngram_size or dry_multiplier (there is no contrastive search)",
    "max_new_tokens": "max_tokens",
    "do_sample": "temperature (0: the likeliest token)",
    "use_beam_search": "LLM.beam_search",
    "num_beams": "LLM.beam_search, with BeamSearchParams(beam_width=…)",
    "output_kind": "AsyncLLM, whose answers are streamed",
    "stop_strings": "stop",
    "num_return_sequences": "n",
}
"""Arguments that vLLM and transformers have, and the nearest that can be had here."""

SETTINGS = {
    "swap_space": "kv_host_bytes",
    "cpu_offload_gb": "weights_bytes",
    "enable_expert_parallel": "expert_parallel_size",
    "device_map": "device",
    "torch_dtype": "dtype",
    "n_ctx": "max_model_len",
    "n_threads": "num_threads",
}
"""The same of settings, also llama-cpp-python's. On the command line they are options."""

VALUES = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "full": "float32",
}
"""Values of settings that other engines know, and what they are here."""

NEEDLESS = {
    "trust_remote_code": "leave it out: a checkpoint's own code is never run",
    "distributed_executor_backend": "leave it out: ranks are processes (docs/parallelism.md)",
    "disable_log_requests": "leave it out: the log has a line a request, without its texts",
}
"""Settings of vLLM that are not missed here, and why."""


def suggesting(function: Callable[P, R], what: str = "argument") -> Callable[P, R]:
    """`function`, whose TypeError over an unknown keyword argument, which it calls `what`, names the likely one."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            known = [name for name in inspect.signature(function).parameters if name != "self"]
            for name in kwargs:
                if name not in known:
                    raise TypeError(_message(name, known, what)) from None
            raise

    return called


def suggesting_init(cls: C, what: str = "argument") -> C:
    """The same for the arguments that make an object of a class."""
    initialise: Any = cls.__init__  # type: ignore[misc]
    cls.__init__ = suggesting(initialise, what)  # type: ignore[misc]
    return cls


def likely_value(value: str, allowed: Sequence[str]) -> str:
    """The end of a message that refuses `value`: "; did you mean …?", or nothing."""
    own = VALUES.get(value.lower(), value.lower())
    near = [own] if own in allowed else difflib.get_close_matches(own, allowed, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _message(name: str, known: list[str], what: str) -> str:
    if what == "setting" and name in NEEDLESS:
        return f"there is no setting {name!r}; {NEEDLESS[name]}"
    if other := (SETTINGS if what == "setting" else OTHERS).get(name):
        return f"there is no {what} {name!r}; the nearest is {other}"
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"there is no {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
