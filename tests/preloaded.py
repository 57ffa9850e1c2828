"""A process that has imported torch and Slipstream, and forks for each command. So a command does not wait for imports.

`Preloaded(folder)` starts it, and leaves a `slipstream` and a `python` for the PATH in `folder`. These are small clients. The
command runs in a fork, with the client's arguments, folder, environment and standard streams. The client ends with its exit
code. Forks share nothing but what was imported.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

CLIENT = """#!{python} -SE
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect({address!r})
    fds = array.array("i", [0, 1, 2])
    s.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    s.sendall(json.dumps([{kind!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    sys.exit(int(s.makefile().readline() or 70))
"""


class Preloaded:
    def __init__(self, folder: Path) -> None:
        self.tools = folder
        address = str(folder / "socket")
        for kind in ("slipstream", "python"):
            client = folder / kind
            client.write_text(CLIENT.format(python=sys.executable, address=address, kind=kind))
            client.chmod(0o755)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "src"), *filter(None, sys.path)])}
        command = [sys.executable, __file__, address]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)


def load() -> None:
    """Import what commands import."""
    from slipstream.plan.hardware import bound_spinning

    bound_spinning()
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import slipstream.__main__
    import slipstream.bench.adapters.slipstream
    import slipstream.compress.run
    import slipstream.evals.scorer
    import slipstream.kernels.cpu  # noqa: F401


def serve(address: str) -> None:
    load()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    # The parent's end of our standard input is closed when it is done, or dead.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    print("ready", flush=True)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:  # this one waits for the command
            listening.close()
            answer(connection)
            os._exit(0)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def answer(connection: socket.socket) -> None:
    fds = array.array("i")
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_LEN(3 * fds.itemsize))
    fds.frombytes(ancillary[0][2])
    kind, words, folder, env = json.loads(connection.makefile().readline())
    command = fork_command(kind, words, folder, env, list(fds), prepare=connection.close)
    _, status = os.waitpid(command, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status) & 255}\n".encode())


def fork_command(
    kind: str,
    words: list[str],
    folder: str,
    env: dict[str, str],
    fds: Sequence[int],
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """The process id of a fork that runs the command with the standard streams `fds`. `prepare` is called in it first."""
    if command := os.fork():
        return command
    prepare()
    for at, fd in enumerate(fds):
        os.dup2(fd, at)
        os.close(fd)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    code = 1
    try:
        code = run(kind, words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        import atexit

        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(kind: str, words: list[str]) -> int:
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode, closefd=False) for fd, mode in enumerate("rww"))
    if kind == "python":
        import runpy

        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")
        return 0
    from slipstream.__main__ import command

    sys.argv = [sys.modules["slipstream.__main__"].__file__ or "slipstream", *words]
    found = command()
    return found if isinstance(found, int) else 0


if __name__ == "__main__":
    serve(sys.argv[1])
