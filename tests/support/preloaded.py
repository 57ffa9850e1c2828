"""A process that has imported torch and Slipstream, and forks for each command. So a command does not wait for imports.

`Preloaded(folder)` starts it, and leaves a `slipstream` and a `python` for the PATH in `folder`. These are small clients. The
command runs in a fork, with the client's arguments, folder, environment and standard streams. The client ends with its exit
code. A client that is killed ends its command. Forks share nothing but what was imported. Ranks of a command's engine are
forks, too (tests/support/forked_ranks.py), of the process that waits for the command.

Processes of tests that name the same folder share the one that imports, since that takes seconds. It ends when all of them have
closed it, or are dead.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import json
import os
import select
import signal
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


KIND_S = 20.0
"""How long a command may take to end after its client."""

JOIN = b"j"
"""Message of a process of tests that wants to keep a process which another has started."""


class Preloaded:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.tools = folder
        address = str(folder / "socket")
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._open = self._join(address) or self._start(address)

    @staticmethod
    def _join(address: str) -> socket.socket | None:
        """A socket that keeps the process of `address`, if there is one that does not end just now."""
        ours = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            ours.connect(address)
            ours.sendall(JOIN)
            if ours.recv(len(JOIN)):
                return ours
        ours.close()
        return None

    def _start(self, address: str) -> socket.socket:
        for kind in ("slipstream", "python"):
            client = self.tools / kind
            client.write_text(CLIENT.format(python=sys.executable, address=address, kind=kind))
            client.chmod(0o755)
        Path(address).unlink(missing_ok=True)
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parents[2] / "src"), *filter(None, sys.path)]
            ),
        }
        ours, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, address], env=env, stdin=theirs, start_new_session=True
            )
        assert ours.recv(len(JOIN))
        return ours

    def close(self) -> None:
        self._open.close()


def load() -> None:
    """Import what commands import. The collection of garbage leaves it alone: it would take each fork a third of a second, and
    a copy of most pages."""
    gc.disable()
    from slipstream.costs.hardware import bound_spinning

    bound_spinning()
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import slipstream.__main__
    import slipstream.bench.adapters.slipstream
    import slipstream.compress.run
    import slipstream.evals.scorer
    import slipstream.kernels.cpu.ops
    import slipstream.worker.model_runner
    import slipstream.worker.ranks.process_executor
    import slipstream.worker.ranks.rank_process
    import slipstream.worker.torch_loading  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.enable()


def serve(address: str) -> None:
    load()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    users = [
        socket.socket(fileno=os.dup(0))
    ]  # of these the other end closes when they are done, or dead
    users[0].sendall(JOIN)
    while users:
        ready = select.select([listening, *users], [], [])[0]
        users = [user for user in users if user not in ready]
        if listening not in ready:
            continue
        connection, _ = listening.accept()
        if connection.recv(1, socket.MSG_PEEK) == JOIN:
            connection.sendall(connection.recv(1))
            users.append(connection)
            continue
        if os.fork() == 0:  # this one waits for the command
            listening.close()
            answer(connection)
            os._exit(0)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def answer(connection: socket.socket) -> None:
    from slipstream.worker.ranks import fork_server, rank_process
    from tests.support import forked_ranks

    fds = array.array("i")
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_LEN(3 * fds.itemsize))
    fds.frombytes(ancillary[0][2])
    kind, words, folder, env = json.loads(connection.makefile().readline())
    asking, asked = socket.socketpair(type=socket.SOCK_SEQPACKET)

    def prepare() -> None:
        connection.close()
        asked.close()
        forked_ranks.take_from(asking)

    command = fork_command(kind, words, folder, env, list(fds), prepare)
    asking.close()
    watch = threading.Thread(
        target=end_with, args=(connection, os.pidfd_open(command)), daemon=True
    )
    watch.start()
    fork_server.serve(asked, rank_process.main)  # until the command has ended
    _, status = os.waitpid(command, 0)
    with contextlib.suppress(BrokenPipeError):  # the client is dead
        connection.sendall(f"{os.waitstatus_to_exitcode(status) & 255}\n".encode())


def end_with(client: socket.socket, command: int) -> None:
    """End the process of the pidfd `command` once its client is dead: kindly, and by force after `KIND_S`."""
    if client.recv(1):
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(command, number)
        select.select([command], [], [], KIND_S)


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
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(fd, mode, closefd=False) for fd, mode in enumerate("rww")
    )
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
