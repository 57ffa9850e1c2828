"""Several HTTP front-end processes on one port, with one engine: what `slipstream serve --api-servers N` runs.

    clients ── one listening socket ──> front end 1 … N ── a ZeroMQ pair each ──> engine process
                                            └─ control ── supervisor ── starts and watches them all

The supervisor is the process that was started. No request and no token passes through it.
"""
