"""The engine core in its own process: `python -m slipstream.engine.process.core_process ADDRESS [DESCRIPTOR]`.

HTTP, tokenising and detokenising never delay a step. If the engine crashes, the server survives and answers with an error.
Messages are msgpack over a ZeroMQ pair on a Unix socket, in a folder that only this user can enter. The child ends when its
standard input closes, so it never outlives its parent. The descriptor is that of the process that forks its ranks.
`core_loop.py` has the loop.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import sys
import threading

from slipstream.costs.hardware import bound_spinning
from slipstream.engine.process.core_loop import CoreProcess


def end_with_parent(folder: str) -> None:
    """Exit when the parent's end of our standard input closes. Removes the folder of its sockets, which a killed
    parent leaves."""
    while os.read(
        0, 1
    ):  # the bare descriptor: a buffered reader would hold its lock while the interpreter ends
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main() -> int:
    gc.disable()  # a start makes objects that all stay; `_serve` says when cycles are looked for
    bound_spinning()
    # Ctrl-C and a service manager's SIGTERM reach the whole process group. The parent decides when the child ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = os.path.dirname(sys.argv[1].removeprefix("ipc://"))
    threading.Thread(target=end_with_parent, args=(folder,), daemon=True).start()
    forks = None
    if sys.argv[2:]:
        from slipstream.worker.executor import ForkServer

        forks = ForkServer(socket.socket(fileno=int(sys.argv[2])))
    return CoreProcess(sys.argv[1], forks).run()


if __name__ == "__main__":
    sys.exit(main())
