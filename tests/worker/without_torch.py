"""Commands of ours where an import of torch fails, as where it is not installed.

Each is a fork of one process that has imported the rest, since that takes a third of a second.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

IMPORTED = "slipstream.cli.answers.run", "slipstream.engine.llm", "slipstream.worker.host_loading"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """`slipstream WORDS`."""
    process = _forking()
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        process.stdin.write(json.dumps([words, *map(str, files)]) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        return subprocess.CompletedProcess(
            words, code, *(file.read_text("utf-8") for file in files)
        )


@functools.cache
def _forking() -> subprocess.Popen[str]:
    """A forking server process, which ends with this one."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def serve() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]
    sys.modules["numpy.ma"] = None  # type: ignore[assignment]  # 100 ms in the middle of an answer
    for name in IMPORTED:
        __import__(name)
    gc.collect()
    gc.freeze()  # forks have nothing to collect of it
    while line := sys.stdin.readline():
        words, *files = json.loads(line)
        if not (pid := os.fork()):
            code = 1
            try:
                for number, file in enumerate(files, start=1):
                    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
                from slipstream.cli.main import main

                code = main(words)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
