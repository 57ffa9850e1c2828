"""`subprocess` for `child_ranks`: ranks are forks of one process that has imported torch, which takes a process of its own
two seconds of a core.

A fork is what `Popen` gives: a process with its own standard input, environment and folder, that runs the module as `-m` does
and ends by a code or a signal. Its parent is the process that was forked, so a test that looks for children does not take this
one. `test_ranks.py` starts ranks as users do.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from unittest import mock

PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired
PATCHED = "slipstream.worker.ranks.children.subprocess"
IMPORTED = (
    "slipstream.worker.ranks.rank_process",
    "slipstream.worker.torch_loading",
    "slipstream.model.load.loader",
)


class Popen:
    """A process like that of `python -m MODULE ARGUMENTS`, forked from a warm one."""

    def __init__(self, command, *, stdin, pass_fds, env):
        assert (command[:2], stdin) == ([sys.executable, "-m"], PIPE)
        theirs, ours = os.pipe()
        self._end, end = os.pipe()
        given = {
            "words": command[2:],
            "environment": env,
            "folder": os.getcwd(),
            "passed": pass_fds,
        }
        with _asking:
            fds = [theirs, end, 1, 2, *pass_fds]
            socket.send_fds(parent(), [json.dumps(given).encode()], fds)
            self.pid = int(parent().recv(100))
        os.close(theirs)
        os.close(end)
        self.stdin, self.returncode, self._lock = os.fdopen(ours, "wb"), None, threading.Lock()
        weakref.finalize(
            self, os.close, self._end
        )  # not sooner: another thread may wait for it, too

    def poll(self):
        try:
            return self.wait(0)
        except TimeoutExpired:
            return None

    def wait(self, timeout=None):
        if self.returncode is None and not select.select([self._end], [], [], timeout)[0]:
            raise TimeoutExpired(IMPORTED[0], timeout)
        with self._lock:
            if self.returncode is None:
                self.returncode = int(os.read(self._end, 100) or -signal.SIGKILL)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def used():
    """Engines that this process starts meanwhile start their ranks so."""
    with mock.patch(PATCHED, sys.modules[__name__]):
        yield


def take_from(end: socket.socket) -> None:
    """Engines that this process starts from now on have their ranks of the process that `serve`s the other end."""
    global _parent
    _parent = end
    mock.patch(PATCHED, sys.modules[__name__]).start()


_asking = threading.Lock()


def parent() -> socket.socket:
    """The socket to the process that forks."""
    global _parent
    _parent = _parent or start()[0]
    return _parent


_parent: socket.socket | None = None


def start() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A process that forks, and a socket to it. It ends when this closes."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        return ours, subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )


@contextlib.contextmanager
def used_by_engine_processes():
    """Ranks of engines that `AsyncLLM` starts meanwhile, each in a process of its own, are forks of the one that is given. At
    most one of them may start ranks at a time."""
    ours, forking = start()

    def popen(command, **how):
        assert command[:2] == [sys.executable, "-m"]
        words = [*command[:2], __name__, str(ours.fileno()), *command[2:]]
        return subprocess.Popen(words, pass_fds=[ours.fileno()], **how)

    patched = types.SimpleNamespace(PIPE=PIPE, TimeoutExpired=TimeoutExpired, Popen=popen)
    with ours, mock.patch("slipstream.engine.process.child_link.subprocess", patched):
        yield forking


def serve(asked: socket.socket) -> None:
    """Fork for each message; tell the codes of those that ended."""
    ends: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(asked, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in ends:
                pid, end = ends.pop(fd)
                poll.unregister(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # whoever had it started is dead
                    os.write(end, str(code).encode())
                os.close(end)
                os.close(fd)
                continue
            message, fds, _, _ = socket.recv_fds(asked, 2**20, 16)
            if not message:
                return
            pid = os.fork()
            if not pid:
                for mine in (asked.fileno(), *ends, *(end for _, end in ends.values())):
                    os.close(mine)
                become(json.loads(message), *fds)
            pidfd = os.pidfd_open(pid)
            ends[pidfd] = pid, fds[1]
            poll.register(pidfd, select.POLLIN)
            for theirs in (fds[0], *fds[2:]):
                os.close(theirs)
            asked.send(str(pid).encode())


def become(given: dict, stdin: int, end: int, stdout: int, stderr: int, *passed: int) -> None:
    for own, standard in ((stdin, 0), (stdout, 1), (stderr, 2)):
        os.dup2(own, standard)
        os.close(own)
    os.close(end)
    named = dict(zip(map(str, given["passed"]), map(str, passed), strict=True))
    module, *words = given["words"]
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["folder"])
    sys.argv = [module, *(named.get(word, word) for word in words)]
    sys.modules.pop(module)  # `-m` runs it as __main__
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        os._exit(1)  # a rank ends before


if __name__ == "__main__":
    end = socket.socket(fileno=int(sys.argv[1]))
    if sys.argv[2:]:  # a module, whose ranks are forks of the process at the other end
        take_from(end)
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        gc.disable()
        for name in IMPORTED:
            __import__(name)
        gc.collect()
        gc.freeze()  # forks have nothing to collect of it
        gc.enable()
        serve(end)
