"""Events of the prefix cache in vLLM's format, read as a router of others reads them."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.config.sections import CacheEventSettings
from slipstream.engine.kv_events import _extra
from slipstream.errors import ConfigError

TINY = str(Path(__file__).parents[3] / "benchmarks" / "configs" / "tiny")
SETTINGS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "max_model_len": 128,
    "block_size": 16,
    "kv_cache_bytes": 16 * 1024 * 1024,
}


def free_endpoint():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


class Index:
    """The contents of a cache, rebuilt from its events: the tokens of each key's whole prefix."""

    def __init__(self, endpoint):
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.subscribe(b"kv@")
        self.socket.connect(endpoint)
        self.prefixes, self.numbers = {}, []

    def read(self, wait_ms=300):
        while self.socket.poll(wait_ms):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b"kv@pod@tiny"
            self.numbers.append(int.from_bytes(number, "big"))
            _, events, _ = msgspec.msgpack.decode(payload)
            for kind, keys, *rest in events:
                if kind == "BlockRemoved":
                    for key in keys:
                        self.prefixes.pop(key, None)  # it may be older than the subscription
                    continue
                assert kind == "BlockStored"
                parent, tokens, size, *_ = rest
                prefix = () if parent is None else self.prefixes[parent]
                assert len(tokens) == size * len(keys)
                for i, key in enumerate(keys):
                    prefix += tuple(tokens[i * size : (i + 1) * size])
                    self.prefixes[key] = prefix
        return set(self.prefixes.values())


def test_stored_blocks_come_with_their_tokens_and_leave_when_they_are_evicted():
    endpoint = free_endpoint()
    events = {"enable_kv_cache_events": True, "endpoint": endpoint, "topic": "kv@pod@tiny"}
    index = Index(endpoint)
    with LLM(TINY, kv_events_config=events, **SETTINGS) as llm:
        pool = llm.core.scheduler.pool
        answer = SamplingParams(max_tokens=4, ignore_eos=True)

        def run(first, length=40):
            prompt = [first + i for i in range(length)]
            llm.generate({"prompt_token_ids": prompt}, answer)
            return prompt

        before = 0
        while not index.read(50):  # a subscriber hears nothing before it is connected
            run(before := before + 1)
        first = run(100)
        told = index.read()
        assert tuple(first[:16]) in told
        assert tuple(first[:32]) in told
        assert tuple(first) not in told
        run(100)  # found in the cache: nothing is stored twice
        count = len(index.numbers)
        index.read()
        assert len(index.numbers) == count
        for kv in llm.core.scheduler.kvs:
            kv.forget_all()
        run(200)
        told = index.read()
        assert tuple(first[:16]) not in told
        assert set(index.prefixes) == set(pool.cached_keys())
        begin = index.numbers[0]
        assert index.numbers == list(range(begin, begin + len(index.numbers)))
    index.socket.close(linger=0)


def test_a_salt_is_told_by_its_hash_and_in_the_first_block_alone():
    request = SimpleNamespace(spec=SimpleNamespace(media=(), prefix_salt="secret"))
    assert _extra(request, 0, 16) == [hashlib.sha256(b"secret").hexdigest()]
    assert _extra(request, 1, 16) is None


def test_a_server_of_several_models_publishes_nothing(capsys):
    events = ["--kv-events-config", '{"enable_kv_cache_events": true}']
    assert main(["serve", f"a={TINY}", f"b={TINY}", *events]) != 0
    assert "--kv-events-config does not go with several models" in capsys.readouterr().err


def test_by_default_only_this_machine_is_told():
    assert CacheEventSettings().endpoint.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enable_kv_cache_events": True, "replay_endpoint": "tcp://*:5558"}, "replay_endpoint"),
        ({"publisher": "kafka"}, "publisher"),
        ({"enable_kv_cache_events": True, "endpoint": "nowhere"}, "another endpoint"),
    ],
)
def test_settings_without_effect_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        LLM(TINY, kv_events_config=given, **SETTINGS)
