"""TLS certificates that are renewed while the server runs.

The files are checked every `LOOK_S` seconds. New connections use a new certificate that fits its
key; open ones keep theirs. A pair that does not fit, such as a half-written one, is ignored and
logged once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl

_logger = logging.getLogger("slipstream.server")

LOOK_S = 10.0


class Certificates:
    """A certificate chain and its key, in one file or two."""

    def __init__(self, certfile: str, keyfile: str | None) -> None:
        self.certfile, self.keyfile = certfile, keyfile
        self._taken = self._refused = self._stamp()

    def _stamp(self) -> tuple[tuple[int, int, int], ...] | None:
        try:
            found = [os.stat(path) for path in (self.certfile, self.keyfile) if path is not None]
        except OSError:
            return None
        return tuple((file.st_ino, file.st_mtime_ns, file.st_size) for file in found)

    def renewed(self) -> bool:
        """Whether the files have changed since the last call, and fit together."""
        stamp = self._stamp()
        if stamp == self._taken:
            return False
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile)
        except OSError as error:  # ssl.SSLError is one
            if stamp != self._refused:
                _logger.warning(
                    "the new TLS certificate or key cannot be used, the old ones stay: %s", error
                )
            self._refused = stamp
            return False
        self._taken = stamp
        return True

    async def keep_fresh(self, context: ssl.SSLContext) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self.renewed():
                try:
                    context.load_cert_chain(self.certfile, self.keyfile)
                except OSError as error:  # they changed again in between
                    self._taken = None
                    _logger.warning(
                        "the new TLS certificate or key cannot be used, the old ones stay: %s",
                        error,
                    )
                    continue
                _logger.info("new connections get the new TLS certificate")
