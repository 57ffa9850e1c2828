"""Fixtures and settings of all tests."""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import shutil
import sys

import pytest
from hypothesis import HealthCheck, settings

from slipstream.costs.hardware import bound_spinning, host_memory, import_numpy
from tests.support.scheduler_checks import check_schedulers

# What is imported stays: a tenth of the time of reading all tests went into looking for garbage among it.
gc.disable()  # `pytest_runtestloop` enables it

# Before anything loads torch or NumPy. There is a process of tests for each core: threads that spin while they wait hold the
# cores that the others' work needs, and the busier the machine is, the longer.
bound_spinning()
import_numpy()

# A gate gives the same verdict on the same code, so its examples are the same every time. New ones are looked for with
# `./check --hypothesis-profile=explore`; what they find becomes a test of its own. How fast the machine is fails no test.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", UNTIMED, derandomize=True, database=None)
settings.register_profile("explore", UNTIMED, derandomize=False)
settings.load_profile("gate")

OWN_LOGGERS = ("slipstream", "uvicorn", "asyncio", "opentelemetry")
"""Loggers to which `slipstream serve` gives a stream."""

NUM_MODULES = 0
"""Number of modules that were imported at the last call of `keep_what_is_there`."""


def pytest_addoption(parser):
    whose = "the interpreter that other programs' clients are installed for"
    parser.addoption("--clients-python", default=sys.executable, metavar="PYTHON", help=whose)
    nodes = "the folder of npm's packages for tests/server/test_server_loops.py"
    parser.addoption("--clients-node", metavar="FOLDER", help=nodes)


def pytest_xdist_auto_num_workers():
    """Number of processes of `-n auto`: three for two cores, since tests wait a third of their
    time. Each takes 1.6 GB."""
    cores, (_, free) = os.cpu_count() or 1, host_memory()
    return max(1, min(cores * 3 // 2, free // 2**31))


def pytest_collection_finish():
    if (scheduler := sys.modules.get("slipstream.core.scheduler")) is not None:
        check_schedulers(scheduler.Scheduler)
    keep_what_is_there()
    share_authorities()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    gc.enable()


def keep_what_is_there():
    """Exempts all present objects from garbage collection: thousands of tests and their imports,
    also those of the first test of a kind. The collection that an engine's start asks for took a
    third of a second over them. Objects that are exempt already are not looked at again."""
    global NUM_MODULES
    gc.collect()
    gc.freeze()
    NUM_MODULES = len(sys.modules)
    pass_on_torchs_records()


def pass_on_torchs_records():
    """pytest adds its handlers to each logger that passes nothing on, and takes them off again, six times a test. Forty of
    torch's are such."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.handlers, logger.propagate = [], True


def share_authorities():
    """httpx reads the file of known authorities for each client, which takes 45 ms of a core, and each of its functions has a
    client: there are a thousand, nearly all for servers without TLS. Those that know the same ones share what was read."""
    if "httpx" in sys.modules:
        from httpx._transports import default

        make = default.create_ssl_context
        read = functools.cache(lambda *known: make())

        def shared(verify=True, cert=None, trust_env=True):
            if verify is True and cert is None and trust_env:
                return read(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
            return make(verify, cert, trust_env)

        default.create_ssl_context = shared


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Each test draws the same numbers and computes on as many threads, whichever ran before it in its process: an engine sets
    torch's number for good. Before its fixtures, which draw, too. Tests on a GPU have a number of their own."""
    if "torch" in sys.modules and item.get_closest_marker("gpu") is None:
        sys.modules["torch"].set_num_threads(1)
    if len(sys.modules) > NUM_MODULES + 50:
        keep_what_is_there()
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        # `torch.manual_seed` keeps where it was called, and the whole stack as text, for each kind of GPU that is not in use
        seed = (
            torch.manual_seed
            if torch.cuda.is_initialized()
            else torch.default_generator.manual_seed
        )
        seed(0)


@pytest.fixture(autouse=True)
def own_logging():
    """`slipstream serve` in a test's process sends its lines to a stream that ends with the test."""
    kept = [(logger, *_settings(logger)) for logger in map(logging.getLogger, OWN_LOGGERS)]
    yield
    for logger, handlers, propagate, level in kept:
        if _settings(logger) != (handlers, propagate, level):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def _settings(logger):
    return list(logger.handlers), logger.propagate, logger.level


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of a tiny model with random weights, a tokenizer and a chat template; its context is 1,024 tokens."""
    from tests.support import tiny_models  # here, since it takes torch and transformers

    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_models.write_with_tokenizer(folder, max_position_embeddings=1024)
    return folder


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory):
    """Tools whose commands are forks of one process, the same of all processes of the session: tests/support/preloaded.py."""
    from tests.support.preloaded import Preloaded

    session = tmp_path_factory.getbasetemp()
    process = Preloaded(
        (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session) / "preloaded"
    )
    yield process
    process.close()


@pytest.fixture
def by_torch(monkeypatch):
    """Engines of this process run their steps by torch, on a CPU too: for tests that look at tensors."""
    monkeypatch.setattr("slipstream.worker.start.loading._host_loaded", lambda *_: None)


@pytest.fixture
def forked_ranks():
    """Ranks that this process's engines start are forks of one process."""
    from tests.support import forked_ranks

    with forked_ranks.used():
        yield


@pytest.fixture
def model_copy(tiny_model, tmp_path):
    """A copy of the tiny model's folder, to be spoilt."""
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory):
    """The folder of a tiny encoder with random weights, a tokenizer, and the files that say how it pools."""
    from tests.support import tiny_models

    folder = tmp_path_factory.mktemp("tiny-encoder")
    tiny_models.build_encoder(folder)
    tiny_models.write_wordpiece(folder)
    tiny_models.write_sentence_transformers(folder)
    return folder


@pytest.fixture
def config_only(tmp_path):
    """The folder of a model that is a config.json and nothing else, for load_format="dummy"."""
    import json

    from tests.support import tiny_models

    folder = tmp_path / "config-only"
    folder.mkdir()
    config = {
        **tiny_models.FAMILIES["llama"],
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 512,
    }
    more = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    return folder
