"""Blocks that one engine computes and another one takes over: the same answers, hits, losses, what is refused."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import threading
import time
import tracemalloc

import numpy as np
import pytest

from slipstream import LLM, SamplingParams
from slipstream.core.cache.invariants import check_pool
from slipstream.errors import ConfigError
from slipstream.params.lora_request import LoRARequest
from slipstream.params.options import RequestOptions
from slipstream.worker.tiers import exchange as exchanges
from slipstream.worker.tiers import opening, peers
from tests.support import adapters, tiny_models
from tests.support.waiting import PATIENCE_S, wait_for

SIZES = dict(
    device="cpu",
    dtype="float32",
    max_model_len=256,
    max_num_seqs=4,
    num_threads=1,
    skip_tokenizer_init=True,
    kv_cache_bytes=2**21,
)
PROMPTS = [{"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in (40, 100, 130)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("handover") / "model"
    tiny_models.write(path, "llama")
    return path


def here():
    return f"unix:test-{secrets.token_hex(8)}"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def engine(model, address=None, **more):
    given = {"kv_handover_bytes": 2**24, **SIZES, **more}
    return LLM(str(model), kv_handover_address=address or here(), **given)


def prefill(llm, prompts=PROMPTS, **options):
    llm._run(
        prompts, FIRST, [RequestOptions(hands_over=True, **options)] * len(prompts), progress=False
    )
    return llm.config.cache.handover.address


def answers(llm, prompts=PROMPTS, **options):
    given = [RequestOptions(**options)] * len(prompts)
    return [a.outputs[0].token_ids for a in llm._run(prompts, GREEDY, given, progress=False)]


def nothing_is_held(*engines):
    for llm in engines:
        wait_for(lambda llm=llm: not llm.core.tend(), "copies do not end")
        pools = [llm.core.scheduler.kv.pool, *llm.core.scheduler.slot_pools]
        for pool in pools:
            check_pool(pool)
            assert pool.num_free == pool.num_usable
        if (exchange := llm.core.executor.stores[0].exchange) is not None:
            held = exchange._entries.values()
            # Unpinned when the reader's next message arrives, on a thread of the exchange.
            wait_for(lambda held=held: not any(e.num_pins for e in [*held]), "blocks stay pinned")
            exchange.check()


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {}),
        ("llama", dict(kv_cache_dtype="int8")),
        ("llama", dict(kv_cache_dtype="fp8", kernels="reference")),
        ("llama", dict(kernels="torch")),
        ("gemma3_text", {}),
        ("deepseek_v3", {}),
        ("granitemoehybrid", {}),
        ("mamba2", {}),
    ],
)
def test_another_engine_goes_on_from_the_prompt(tmp_path, family, how):
    tiny_models.write(tmp_path, family)
    with engine(tmp_path, **how) as first, engine(tmp_path, **how) as second:
        address = prefill(first)
        found = answers(second, handover_from=address)
        stats = second.stats()
        assert stats.tiers.peer_hit_tokens == stats.prefix_hits == 32 + 96 + 128
        assert stats.tiers.failed_blocks == stats.tiers.late_loads == 0
        assert stats.tiers.peer_bytes_per_s > 0
        nothing_is_held(first, second)
        assert first.stats().tiers.exchange_bytes == first.stats().tiers.handed_bytes > 0
        assert found == answers(first)  # from its own cache
        first.reset_prefix_cache()
        assert found == answers(first)
        assert first.stats().tiers.exchange_bytes == 0


def test_blocks_come_over_tcp(made):
    address = f"tcp://127.0.0.1:{free_port()}"
    with engine(made, address) as first, engine(made) as second:
        prefill(first)
        assert answers(second, handover_from=address) == answers(first)
        assert second.stats().tiers.peer_hit_tokens == 256
        nothing_is_held(first, second)


def test_an_engine_that_started_again_at_its_address_is_found_at_once(made):
    address = here()
    with engine(made) as second:
        for turn in (1, 2):
            with engine(made, address) as first:
                prefill(first)
                assert answers(second, handover_from=address) == answers(first)
            assert second.stats().tiers.peer_hit_tokens == turn * 256
            assert second.stats().tiers.failed_blocks == 0
            second.reset_prefix_cache()


def test_salt_and_adapter_keep_blocks_apart(made, tmp_path):
    from transformers import AutoModelForCausalLM

    adapters.write(AutoModelForCausalLM.from_pretrained(made), tmp_path)
    lora = LoRARequest("one", 1, str(tmp_path))
    with engine(made, enable_lora=True) as first, engine(made, enable_lora=True) as second:
        address = prefill(first, cache_salt="a", lora_request=lora)
        for options, hits in (
            ({}, 0),
            ({"cache_salt": "b", "lora_request": lora}, 0),
            ({"cache_salt": "a"}, 0),
            ({"cache_salt": "a", "lora_request": lora}, 256),
        ):
            expected = answers(first, **options)
            assert answers(second, handover_from=address, **options) == expected
            assert second.stats().tiers.peer_hit_tokens == hits
        nothing_is_held(first, second)


def test_what_is_on_the_device_does_not_come_again(made):
    with engine(made) as first, engine(made) as second:
        address = prefill(first)
        answers(second, PROMPTS[2:])
        longer = [{"prompt_token_ids": PROMPTS[2]["prompt_token_ids"] + [*range(4, 60)]}]
        prefill(first, longer)
        assert answers(second, longer, handover_from=address) == answers(first, longer)
        assert second.stats().tiers.loaded_blocks == (130 + 56 - 2) // 16 - 130 // 16
        nothing_is_held(first, second)


def test_without_an_exchange_or_after_its_death_the_prompt_is_computed(made):
    with engine(made) as second:
        expected = answers(second)
        second.reset_prefix_cache()
        assert answers(second, handover_from=here()) == expected  # nobody is there
        second.reset_prefix_cache()
        with engine(made) as first:
            address = prefill(first)
            assert answers(second, handover_from=address) == expected
        second.reset_prefix_cache()
        assert answers(second, handover_from=address) == expected  # the connection broke
        stats = second.stats().tiers
        assert stats.failed_blocks == 2 * (2 + 6 + 8)
        nothing_is_held(second)


def test_an_exchange_that_hangs_is_waited_for_a_little(made, monkeypatch):
    monkeypatch.setattr("slipstream.core.tiers.tiers.PEER_PATIENCE_S", 0.2)
    monkeypatch.setattr(peers, "REPLY_S", 1.0)
    address = here()
    with socket.socket(socket.AF_UNIX) as listener, engine(made) as second:
        listener.bind("\0" + address.removeprefix("unix:"))
        listener.listen()  # and nobody accepts
        expected = answers(second)
        second.reset_prefix_cache()
        assert answers(second, handover_from=address) == expected
        assert second.stats().tiers.late_loads == 3
        nothing_is_held(second)


def test_longrope_s_factors_must_be_the_same(tmp_path, caplog):
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 5.0, 30.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    more = {"rope_theta": None, "rope_parameters": rope, "original_max_position_embeddings": 150}
    tiny_models.write(tmp_path, "phi3", **more)
    with (
        engine(tmp_path) as long,
        engine(tmp_path, max_model_len=150) as short,
        engine(tmp_path, max_model_len=200) as also_long,
    ):
        address = prefill(long, PROMPTS[:2])
        answers(short, PROMPTS[:2], handover_from=address)
        assert "LongRoPE's factors, which follow max_model_len, is long there" in caplog.text
        assert short.stats().tiers.peer_hit_tokens == 0
        answers(also_long, PROMPTS[:2], handover_from=address)
        assert also_long.stats().tiers.peer_hit_tokens == 32 + 96


@pytest.mark.parametrize(
    ("more", "name"),
    [(dict(block_size=32), "block_size"), (dict(kv_cache_dtype="int8"), "kv_cache_dtype")],
)
def test_blocks_of_another_layout_are_refused_by_name(made, caplog, more, name):
    with engine(made) as first, engine(made, **more) as second:
        address = prefill(first)
        expected = answers(second)
        second.reset_prefix_cache()
        assert answers(second, handover_from=address) == expected
        assert f"{name} is " in caplog.text
        assert second.stats().tiers.peer_hit_tokens == second.stats().prefix_hits == 0


def test_the_exchange_is_bounded_and_forgets(made, monkeypatch):
    block = 4096
    with engine(made, kv_handover_bytes=10 * block) as first, engine(made) as second:
        assert first.ledger.handover_bytes == 10 * block
        address = prefill(first)
        nothing_is_held(first)
        stats = first.stats().tiers
        assert stats.exchange_bytes <= stats.exchange_limit_bytes == 10 * block
        assert stats.expired_blocks + stats.dropped_blocks == 6  # of 16
        expected = answers(second)
        second.reset_prefix_cache()
        assert answers(second, handover_from=address) == expected
        monkeypatch.setattr(exchanges, "TTL_S", 0.0)
        wait_for(lambda: first.stats().tiers.exchange_bytes == 0, "it keeps what nobody fetches")
        nothing_is_held(first, second)


def test_strangers_do_no_harm(made):
    with engine(made) as first:
        address = prefill(first)
        place = "\0" + address.removeprefix("unix:")
        for junk in (b"", b"\xff" * 64, b"\x04\0\0\0junk", b"\xff\xff\xff\xff"):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(place)
                sock.sendall(junk)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(place)
            peers.send(sock, peers.Get([b"x"]))  # before the greeting
            reply = peers.receive(sock)
            assert isinstance(reply, peers.PeerRefused)
            assert "block_size is 16 there and unknown here" in reply.why
        with engine(made) as second:
            answers(second, handover_from=address)
            assert second.stats().tiers.peer_hit_tokens == 256


def listening():
    listener, address = socket.socket(socket.AF_UNIX), here()
    listener.bind("\0" + address.removeprefix("unix:"))
    listener.listen()
    return listener, address


def asking(layout=()):
    return peers.Peers(dict(layout), lambda copy: [], lambda number, done: None)


def test_the_socket_of_another_user_is_not_asked(monkeypatch):
    monkeypatch.setattr(peers, "REPLY_S", 0.5)
    monkeypatch.setattr(peers.os, "getuid", lambda: 4711)
    listener, address = listening()
    with listener, pytest.raises(PermissionError, match="another user"):
        asking().connect(address)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_memory_that_may_shrink_is_not_mapped(seals):
    listener, address = listening()
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 4096)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)

    def welcome():
        sock, _ = listener.accept()
        with sock, contextlib.suppress(BrokenPipeError):
            peers.receive(sock)
            peers.send(sock, peers.Welcome(4096), [file])

    thread = threading.Thread(target=welcome)
    thread.start()
    with listener, pytest.raises(ValueError, match="may shrink"):
        asking().connect(address)
    thread.join()
    os.close(file)


@pytest.fixture
def remote():
    """An exchange over TCP with one block, and what connects to it."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    exchange = exchanges.BlockExchange(64, (64, 0), {"block_size": "16"}, address)
    assert exchange.reserve(b"a", False)
    assert exchange.fill(b"a", [np.full(64, 7, np.uint8)])
    yield exchange, lambda: socket.create_connection(("127.0.0.1", port))
    exchange.close()


def test_a_greeting_has_few_bytes_and_one_deadline(remote, monkeypatch):
    monkeypatch.setattr(exchanges, "_HELLO_S", 0.5)
    _, connect = remote
    with connect() as large, connect() as slow:
        large.sendall((2**20).to_bytes(4, "little"))
        assert large.recv(1) == b""
        slow.settimeout(0.1)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            slow.sendall((100).to_bytes(4, "little"))
            while time.monotonic() < began + PATIENCE_S:  # each byte comes soon after the last one
                slow.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    assert slow.recv(1) == b""
                    break
        assert time.monotonic() < began + 9  # the hundred bytes take ten seconds


def test_memory_is_taken_for_what_came():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(peers.MAX_MESSAGE.to_bytes(4, "little") + b"xyz")
        theirs.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        with pytest.raises(EOFError):
            peers.receive(ours)
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()


def test_strangers_who_say_nothing_make_room(remote):
    _, connect = remote
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect()) for _ in range(exchanges._MAX_GREETING)]
        last = stack.enter_context(connect())
        assert silent[0].recv(1) == b""
        peers.send(last, peers.Hello({"block_size": "16"}))
        assert isinstance(peers.receive(last), peers.Welcome)


def test_a_reader_that_is_silent_over_tcp_holds_blocks_for_a_while(remote, monkeypatch):
    monkeypatch.setattr(exchanges, "_DONE_S", 0.3)
    exchange, connect = remote
    with connect() as sock:
        peers.send(sock, peers.Hello({"block_size": "16"}))
        peers.receive(sock)
        peers.send(sock, peers.Get([b"a"]))
        assert peers.receive(sock).places == [0]
        assert peers.read(sock, 64) == bytes([7]) * 64
        assert exchange.reserve(b"b", False) is None
        wait_for(lambda: exchange.reserve(b"b", False), "it stays pinned")
        assert sock.recv(1) == b""


def test_a_reader_that_dies_frees_what_it_read():
    layout = {"block_size": "16"}
    exchange = exchanges.BlockExchange(2 * 64, (64, 0), layout, here())
    try:
        for key in (b"a", b"b"):
            assert exchange.reserve(key, False)
            assert exchange.fill(key, [np.full(64, 7, np.uint8)])
        assert exchange.reserve(b"a", False) is False
        place = "\0" + exchange.address.removeprefix("unix:")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(place)
            peers.send(sock, peers.Hello(layout))
            peers.receive(sock, [])
            peers.send(sock, peers.Get([b"b", b"x", b"a"]))
            assert peers.receive(sock).places == [64, peers.MISSING, 0]
            assert exchange.reserve(b"c", False) is None  # both are read
        wait_for(lambda: exchange.reserve(b"c", False), "they stay pinned")
        waiting = threading.Thread(target=lambda: exchange.unpin(exchange.pin([b"c"])))
        waiting.start()
        assert exchange.fill(b"c", [np.zeros(64, np.uint8)])
        waiting.join()
        exchange.check()
    finally:
        exchange.close()


def test_an_exchange_larger_than_free_memory_is_refused_by_name(made, monkeypatch):
    monkeypatch.setattr(opening, "host_memory", lambda: (2**30, 2**24 + 2**20))
    with engine(made):
        pass
    with pytest.raises(ConfigError, match="is more than the 17825792 bytes") as error:
        engine(made, kv_handover_bytes=2**25)
    assert error.value.field == "kv_handover_bytes"


@pytest.mark.parametrize(
    ("more", "field", "why"),
    [
        (dict(kv_handover_address="somewhere"), "kv_handover_address", "unix:NAME"),
        (dict(kv_handover_address=None, kv_handover_bytes=5), "kv_handover_bytes", "only with"),
        (dict(enable_prefix_caching=False), "kv_handover_address", "enable_prefix_caching"),
        (dict(kv_handover_bytes=100), "kv_handover_bytes", "too small"),
        (dict(kv_handover_bytes=0), "kv_handover_bytes", "above 0"),
    ],
)
def test_what_can_not_work_is_refused_by_name(made, more, field, why):
    with pytest.raises(ConfigError, match=why) as error:
        LLM(str(made), **{**SIZES, "kv_handover_address": here(), **more})
    assert error.value.field == field


def test_a_taken_address_is_refused_by_name(made):
    address = here()
    with engine(made, address), pytest.raises(ConfigError, match="can't be listened at"):
        engine(made, address)
