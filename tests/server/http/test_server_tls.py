"""TLS certificates that are renewed while the server runs, over HTTP and gRPC."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

from slipstream.server.http import certificates
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Two certificates with their keys."""
    found = []
    for name in ("old", "new"):
        folder = tmp_path_factory.mktemp(name)
        command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
        paths = [
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            folder / "key",
            "-out",
            folder / "cert",
        ]
        subprocess.run([*command.split(), *map(str, paths)], check=True, capture_output=True)
        found.append(folder)
    return found


def shown(server):
    """The certificate that a new connection gets."""
    host, port = server.url.removeprefix("https://").split(":")
    return ssl.get_server_certificate((host, int(port)))


def test_a_renewed_certificate_is_shown_to_new_connections(
    serve, pairs, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(certificates, "LOOK_S", 0.02)
    old, new = pairs
    cert, key = tmp_path / "cert", tmp_path / "key"

    def put(source, name):
        shutil.copy(source / name, tmp_path / "next")
        os.replace(tmp_path / "next", tmp_path / name)

    for name in ("cert", "key"):
        put(old, name)
    server = serve(ssl_certfile=str(cert), ssl_keyfile=str(key), grpc_port=0)

    def ask(root):
        text = triton.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"hello"], dtype=np.object_))
        own = [("grpc.use_local_subchannel_pool", 1)]
        address = f"127.0.0.1:{server.server.grpc.port}"
        with triton.InferenceServerClient(
            address, ssl=True, root_certificates=str(root / "cert"), channel_args=own
        ) as client:
            answer = client.infer(
                "fake", [text], parameters={"max_tokens": 2}, client_timeout=PATIENCE_S
            )
            return answer.as_numpy("finish_reason")[0]

    assert shown(server) == (old / "cert").read_text()
    assert ask(old) == b"length"
    trusted = ssl.create_default_context(cafile=str(old / "cert"))
    with httpx.Client(base_url=server.url, verify=trusted, timeout=PATIENCE_S) as open_connection:
        assert open_connection.get("/live").status_code == 200
        put(new, "cert")  # half of it: the key is still the old one
        server.wait_for(
            lambda: "cannot be used, the old ones stay" in caplog.text, "nothing was said"
        )
        assert shown(server) == (old / "cert").read_text()
        put(new, "key")
        server.wait_for(
            lambda: shown(server) == (new / "cert").read_text(), "the new certificate was not taken"
        )
        assert open_connection.get("/live").status_code == 200
    assert ask(new) == b"length"
    cert.unlink()
    assert shown(server) == (new / "cert").read_text()
