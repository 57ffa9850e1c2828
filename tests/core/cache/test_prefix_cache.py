"""Keys of prefixes: what must part them."""

from __future__ import annotations

from array import array
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.cache.kv_cache_manager import KVCacheManager
from slipstream.core.cache.prefix_cache import extend_keys, root_key, salted
from slipstream.core.request import Request, Status
from slipstream.core.step import StepBuilder
from slipstream.messages.media import MediaSpan
from tests.core.configs import BLOCK, config
from tests.core.test_scheduler import Engine, request


def test_salts_are_told_apart_wherever_one_ends():
    """A model's salt and a tenant's are not read as one text: no tenant can name itself into another model's prefixes."""
    salts = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("abc",)]
    assert len({root_key(*given) for given in salts}) == len(salts)


def test_adapters_and_tenants_are_told_apart():
    kv = KVCacheManager(config()["cache"], 6, "model")
    asked = [(tenant, adapter) for tenant in ("", "a", "b") for adapter in ("", "a", "b")]
    assert len({kv.root_key(*each) for each in asked}) == len(asked)
    for (
        tenant,
        adapter,
    ) in asked:  # as a fleet's gateway makes it, which knows the root of each adapter
        assert kv.root_key(tenant, adapter) == salted(kv.root_key("", adapter), tenant)


def test_a_salted_root_is_no_key_of_a_block():
    """A salt may be any text, also one that is the bytes of a block's tokens."""
    root, keys = root_key("model", ""), list[bytes]()
    extend_keys(keys, root, [97] * 4, 4, 1)
    assert salted(root, "a\0\0\0" * 4) not in (root, *keys)
    assert salted(root, "") == root


def test_a_chain_is_the_same_at_once_and_piece_by_piece():
    tokens, whole, pieces = range(12), list[bytes](), list[bytes]()
    extend_keys(whole, root_key("model"), tokens, 4, 3)
    for count in (1, 2, 3):
        extend_keys(pieces, root_key("model"), tokens, 4, count)
    assert pieces == whole
    assert len(set(whole)) == 3


def test_a_picture_is_told_apart_by_where_it_begins():
    """All placeholders are the same token, and a text may hold that token after a picture."""
    chains = set()
    for offset in (0, 1, 4, 5):
        keys = list[bytes]()
        image = MediaSpan(
            offset=offset, rows=1, columns=3, key=b"picture", height=1, width=1, data=b""
        )
        extend_keys(keys, root_key("model"), [9] * 8, 4, 2, [image])
        chains.add(tuple(keys))
    assert len(chains) == 4


def test_a_block_with_a_token_that_is_not_known_is_not_cached():
    """Steps in flight may have computed tokens that a grammar forces, before the request knows them."""
    kv = KVCacheManager(config()["cache"], 6, "")
    own = Request(request("a", range(BLOCK + 2)), (0, 0.0, 0), b"", 1)
    own.status = Status.RUNNING
    assert kv.allocate(StepBuilder(config()["scheduling"], {}), own, 2 * BLOCK)
    own.num_computed_tokens = 2 * BLOCK
    kv.register(own, 1)
    assert own.num_registered == 1
    assert [kv.pool.hashes[block] is not None for block in own.blocks[0]] == [True, False]


def test_hits_are_of_prompts_alone():
    """An answer that began elsewhere is computed like a prompt, and may be cached, but is none of the prompt's hits."""
    engine = Engine(config(num_blocks=40))
    for name in "ab":
        engine.scheduler.add(
            request(name, range(6), max_tokens=10, answer_token_ids=tuple(range(6)))
        )
        engine.step()
        found = engine.scheduler.requests.by_id[name].num_cached_tokens
        engine.run()
    assert found == 6
    stats = engine.scheduler.stats()
    assert (stats.prefix_hits, stats.prefix_queries) == (6, 12)


@given(st.lists(st.integers(0, 3), max_size=200), st.lists(st.integers(1, 70), max_size=12))
def test_keys_are_the_same_however_many_are_made_at_once(tokens, counts):
    """Stretches are remembered, so texts that differ late share some and not others."""
    expected, found, num_blocks = [], [], len(tokens) // 2
    key = b"root"
    for i in range(num_blocks):
        data = array("i", tokens[2 * i : 2 * i + 2]).tobytes()
        key = blake2b(key + data, digest_size=16).digest()
        expected.append(key)
    for count in (*counts, num_blocks):
        extend_keys(found, b"root", tokens, 2, max(len(found), min(len(found) + count, num_blocks)))
    assert found == expected
