"""The engine core in its own process: `python -m slipstream.engine.process.core_process ADDRESS [DESCRIPTOR]`. With
`--fork DESCRIPTOR` it is the process that forks such processes (`fork_server.py`), for a server of several models.

So HTTP, tokenizing and detokenizing never delay a step. If the engine crashes, the server survives and answers with an
error. Messages are msgpack over a ZeroMQ pair on a Unix socket, in a folder that only this user can enter. The child
ends when its standard input closes, so it never outlives its parent. DESCRIPTOR is a socket to the process that forks
ranks. `core_loop.py` has the loop.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import sys
import threading

from slipstream.costs.hardware import bound_spinning, import_numpy

import_numpy()  # before modules that import it: only a process with one thread may fork

from slipstream.engine.process.core_loop import CoreProcess  # noqa: E402


def end_with_parent(folder: str) -> None:
    """Exit when the parent closes our standard input. Removes the folder of its sockets, which a
    killed parent leaves behind."""
    # the bare descriptor, because a buffered reader would hold its lock while the interpreter exits
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def fork_cores(asked: socket.socket) -> None:
    """Fork engine processes on request, after importing everything that a core without torch needs."""
    import zmq  # noqa: F401

    import slipstream.engine.asleep  # noqa: F401
    from slipstream.worker.executor import serve_forks

    serve_forks(asked, main)


def main(words: list[str]) -> int:
    gc.disable()  # a start creates objects that all stay; `_serve` collects cycles
    bound_spinning()
    # At each wait of a step, another thread's Python code would otherwise keep the GIL for 5 ms.
    sys.setswitchinterval(0.0005)
    # Ctrl-C and a service manager's SIGTERM reach the whole process group, but the parent decides when the child ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if words[0] == "--fork":
        fork_cores(socket.socket(fileno=int(words[1])))
        return 0
    folder = os.path.dirname(words[0].removeprefix("ipc://"))
    threading.Thread(target=end_with_parent, args=(folder,), daemon=True).start()
    forks = None
    if words[1:]:
        from slipstream.worker.executor import ForkServer

        forks = ForkServer(socket.socket(fileno=int(words[1])))
    return CoreProcess(words[0], forks).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
