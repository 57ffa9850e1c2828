"""Other programs' clients, unmodified and in an environment of their own, against our servers.

    python -m venv clients && clients/bin/pip install ".[clients]"
    pytest tests/server/test_server_clients.py --clients-python clients/bin/python

Without the option the tests' own interpreter runs them. A client that is not installed there is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "clients"
PACKAGES = {
    "openai": "openai",
    "langchain_openai": "langchain-openai",
    "llama_index": "llama-index-llms-openai-like",
    "litellm": "litellm",
    "ollama": "ollama",
    "anthropic": "anthropic",
    "lm_eval": "lm-eval",
    "guidellm": "guidellm",
}


def test_every_client_has_a_script():
    assert {script.stem for script in SCRIPTS.glob("*.py")} == set(PACKAGES)


@pytest.mark.parametrize("client", PACKAGES)
def test_each_clients_script_ends_without_an_error(client, request, tiny_path, tmp_path):
    python, package = request.config.getoption("--clients-python"), PACKAGES[client]
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    version = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    if version.returncode != 0:
        pytest.skip(f"{package} is not installed for {python} (--clients-python)")
    servers = [request.getfixturevalue(name).url for name in ("tiny_server", "tiny_encoder_server")]
    arguments = [servers[0], "smollm2", str(tiny_path), servers[1]]
    # -P: the scripts have the names of what they import. Nothing is to be fetched.
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path), "HOME": str(tmp_path)}
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    } | offline
    run = subprocess.run(
        [python, "-P", SCRIPTS / f"{client}.py", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert run.returncode == 0, (
        f"{package} {version.stdout.strip()}:\n{run.stdout[-2000:]}{run.stderr[-6000:]}"
    )
    sys.stdout.write(f"{package} {version.stdout}")
