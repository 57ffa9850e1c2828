"""Kernels in CUDA's C++, compiled for the CPU with `instructions_on_cpu.h`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from slipstream.base.files import write_whole

INSTRUCTIONS = Path(__file__).with_name("instructions_on_cpu.h").read_text()
HEADERS = [line for line in INSTRUCTIONS.splitlines() if line.startswith("#include <")]
OPTIONS = ("-std=c++17", "-Og", "-w", "-U_FORTIFY_SOURCE", "-fPIC")
COMPILING = threading.Lock()


def load(folder: Path, text: str, definitions: Mapping[str, float]) -> ctypes.CDLL:
    """The library of `text`. One for equal texts and definitions, in the folder of the test session that has `folder`, which
    the session's processes share; and so the standard library's headers, whose parsing is half of the work. The definitions
    stand in the text: g++ parses the headers again where a word of theirs is defined before them."""
    session = folder.parents[1 if "PYTEST_XDIST_WORKER" in os.environ else 0]
    values = {
        k: f"{v}f" if isinstance(v, float) else int(v)
        for k, v in definitions.items()
        if k != "THIS_RANK"
    }
    lines = [
        *(f"#define {k} {v}" for k, v in values.items()),
        *(line for line in text.splitlines() if line not in HEADERS),
    ]
    text = "\n".join(lines)
    library = session / (hashlib.sha256(text.encode()).hexdigest() + ".so")
    with COMPILING:  # ranks want the same one
        if not library.exists():
            headers = session / "standard_headers.h"
            if not headers.with_suffix(".h.gch").exists():
                write_whole(headers, "\n".join(HEADERS) + "\n")
                compile_(headers.with_suffix(".h.gch"), "-x", "c++-header", str(headers))
            compile_(library, "-shared", "-include", str(headers), "-x", "c++", "-", text=text)
    return ctypes.CDLL(str(library))


def compile_(made: Path, *words: str, text: str = "") -> None:
    own = made.with_suffix(f".{os.getpid()}")
    subprocess.run(
        [shutil.which("g++") or "g++", *OPTIONS, *words, "-o", own],
        check=True,
        input=text,
        text=True,
    )
    own.replace(made)
