"""Requests that kill the process they come to, by a `sitecustomize` of child processes: the product has no such switch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

WORD = "poison"
"""A prompt with it kills the process that reads it, by SIGSEGV."""

_SITE = f"""
import importlib.util, os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "slipstream.engine.async_llm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            submit = module.AsyncLLM.submit

            async def poisoned(self, prompt, *args, **more):
                if {WORD!r} in str(prompt):
                    os.kill(os.getpid(), signal.SIGSEGV)
                return await submit(self, prompt, *args, **more)

            module.AsyncLLM.submit = poisoned

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def python_path(folder: Path) -> str:
    """PYTHONPATH of children that such a request kills."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE)
    return os.pathsep.join([str(folder), *(path for path in sys.path if path)])
