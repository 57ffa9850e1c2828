"""A process that has imported everything that its forks need: ranks, or the engines of several models.

Importing torch takes 3 s of a core, an engine's other modules half a second, and a fork milliseconds. So
ranks are forked from one process, which outlives them: when an engine restarts after a rank's death, nothing
is imported again. `core_process.py` has the process that forks engines.

    a server, or the executor ── socket ──> fork server ── fork ──> rank 0, rank 1, …
                              <── a report for each fork: its process id, later its exit code ──

1. A request passes file descriptors: a file with the fork's command line and environment; its folder;
   standard input, output and error; the report; those named in the command line.
2. The fork server runs no operator of torch and does not touch a GPU, so a fork may do both.
3. It ends when all processes with the other end of the socket have closed it or ended. A fork ends when its
   own standard input closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence

from slipstream.errors import EngineError

ANSWER_S = 300.0
"""Seconds that the fork server may take to fork. The first answer comes after its imports (for
ranks: torch)."""

_FAILED = "the process that starts others {}; start the engine again"
_REPORT = struct.Struct("!i")
_FORK, _MAX_FDS = b"fork", 16
_NUM_OWN_FDS = 4  # standard input, output and error, and the report


class ForkServerEndedError(EngineError):
    """The fork server ended before it forked; another one can."""


class ForkedProcess:
    """A process that a fork server started, with the methods of `subprocess.Popen`.

    When the fork server ends, it is killed, unless it `stays`."""

    def __init__(self, report: socket.socket, stdin_fd: int, *, stays: bool = False) -> None:
        self._report, self._lock = report, threading.Lock()
        # not earlier, as other threads may wait for it
        weakref.finalize(self, report.close).atexit = False
        self.stdin = os.fdopen(stdin_fd, "wb")
        self.returncode: int | None = None
        report.settimeout(ANSWER_S)  # `wait` only receives what has arrived
        error: EngineError | None = None
        try:
            found = report.recv(_REPORT.size)
        except TimeoutError:
            found, error = b"", EngineError(_FAILED.format(f"has not answered for {ANSWER_S:g} s"))
        if not found:
            self.stdin.close()
            raise error or ForkServerEndedError(_FAILED.format("has ended"))
        self.pid: int = _REPORT.unpack(found)[0]
        self._pid_fd = -1  # becomes readable when the process ends, whoever is its parent
        if stays:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                self._pid_fd = os.pidfd_open(self.pid)
                weakref.finalize(self, os.close, self._pid_fd).atexit = False
        self._is_orphan = False

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code; -SIGKILL if the fork server ended first,
        because then nobody reports it. `subprocess.TimeoutExpired` if it still runs."""
        if self.returncode is None:
            poll = select.poll()  # `select.select` refuses descriptors from 1,024 on
            poll.register(self._pid_fd if self._is_orphan else self._report, select.POLLIN)
            if not poll.poll(None if timeout is None else 1e3 * max(0.0, timeout)):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        with self._lock:
            if self.returncode is None and not self._is_orphan:
                if found := self._report.recv(_REPORT.size):
                    self.returncode = _REPORT.unpack(found)[0]
                    return self.returncode
                # the fork server is gone, so the exit code will not be reported
                self._is_orphan = self._pid_fd >= 0
                if not self._is_orphan:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self.pid, signal.SIGKILL)
                    self.returncode = -signal.SIGKILL
            elif self.returncode is None:
                self.returncode = -signal.SIGKILL  # the most likely cause, as with the fork server
        return self.wait(timeout) if self.returncode is None else self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """This process's end of the socket to a fork server. `start` starts one."""

    def __init__(
        self,
        end: socket.socket,
        process: subprocess.Popen[bytes] | None = None,
        *,
        forks_stay: bool = False,
    ) -> None:
        """`process`: None if another process started the fork server. `forks_stay`: forks continue when it ends."""
        self._end, self._process, self._forks_stay = end, process, forks_stay
        self._finalizer = weakref.finalize(self, _close, end, process)

    @classmethod
    def start(
        cls, module: str = "slipstream.worker.ranks.rank_process", *, forks_stay: bool = False
    ) -> ForkServer:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", module, "--fork", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
            return cls(ours, process, forks_stay=forks_stay)

    @property
    def is_alive(self) -> bool:
        return self._finalizer.alive and (self._process is None or self._process.poll() is None)

    def fileno(self) -> int:
        """Descriptor that a child process needs to use this fork server, too."""
        return self._end.fileno()

    def fork(
        self, words: Sequence[str], *, passed: Sequence[int], environment: Mapping[str, str]
    ) -> ForkedProcess:
        """Start a process with the command line `words`. Returns when its process id is known.

        `ForkServerEndedError`: the fork server ended first; `is_alive` is then false."""
        try:
            return self._fork(words, passed, environment)
        except ForkServerEndedError:
            self.close()  # its sockets close a moment before the system says that it has ended
            raise

    def _fork(
        self, words: Sequence[str], passed: Sequence[int], environment: Mapping[str, str]
    ) -> ForkedProcess:
        given = {"words": list(words), "environment": dict(environment), "passed": list(passed)}
        ours, theirs = socket.socketpair()
        theirs_stdin, our_stdin = os.pipe()
        folder = os.open(".", os.O_PATH)  # works even if the folder was deleted
        try:
            with os.fdopen(os.memfd_create("fork"), "wb") as request:  # too long for a message
                request.write(json.dumps(given).encode())
                request.flush()
                standard = (theirs_stdin, 1, 2)
                fds = [request.fileno(), folder, *standard, theirs.fileno(), *passed]
                socket.send_fds(self._end, [_FORK], fds)
        except OSError as error:
            ours.close()
            os.close(our_stdin)
            if isinstance(error, BrokenPipeError | ConnectionResetError):
                raise ForkServerEndedError(_FAILED.format(f"has ended ({error})")) from error
            raise EngineError(f"a process can't be started: {error}") from error
        finally:
            theirs.close()
            os.close(theirs_stdin)
            os.close(folder)
        return ForkedProcess(ours, our_stdin, stays=self._forks_stay)

    def close(self) -> None:
        """End the fork server, if this process started it. Forks that are waited for afterwards are
        killed, unless they stay (`ForkedProcess`)."""
        self._finalizer()


def _close(end: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
    end.close()
    if process is not None:
        process.kill()
        process.wait()


def serve(asked: socket.socket, run: Callable[[list[str]], int]) -> None:
    """Fork for each request, until the other end of the socket is closed by all.

    A fork calls `run` with its command line and exits with the code that it returns.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    reports: dict[int, socket.socket] = {}  # by process id
    poll = select.poll()
    poll.register(asked, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if woken in ready:
            os.read(woken, 4096)
            for pid in list(reports):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with reports.pop(pid) as report, contextlib.suppress(OSError):
                        report.send(_REPORT.pack(os.waitstatus_to_exitcode(status)))
        if asked.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(asked, len(_FORK), _MAX_FDS)
        if not message:
            return
        request, folder, *fds = fds
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for mine in (asked.fileno(), woken, wake, *(r.fileno() for r in reports.values())):
                os.close(mine)
            _become(request, folder, fds, run)
        reports[pid] = report = socket.socket(fileno=fds[_NUM_OWN_FDS - 1])
        for theirs in (request, folder, *fds[: _NUM_OWN_FDS - 1], *fds[_NUM_OWN_FDS:]):
            os.close(theirs)
        with contextlib.suppress(OSError):  # the requester is gone, so the fork will end
            report.send(_REPORT.pack(pid))


def _become(request: int, folder: int, fds: list[int], run: Callable[[list[str]], int]) -> None:
    """Turn this fork into the requested process: run it, then exit. Does not return."""
    code = 1
    try:
        for standard, own in enumerate(fds[:3]):
            os.dup2(own, standard)
        for own in fds[:_NUM_OWN_FDS]:
            os.close(own)
        with os.fdopen(request, "rb") as file:
            file.seek(0)
            given = json.load(file)
        words, passed, environment = given["words"], given["passed"], given["environment"]
        assert isinstance(words, list)
        assert isinstance(passed, list)
        assert isinstance(environment, dict)
        names = dict(zip(map(str, passed), map(str, fds[_NUM_OWN_FDS:]), strict=True))
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        os.close(folder)
        code = run([names.get(str(word), str(word)) for word in words])
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()
        os._exit(code)  # skips the fork server's exit handlers
