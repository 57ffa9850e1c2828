"""Keys of prefixes: what must part them."""

from __future__ import annotations

from slipstream.core.prefix_cache import extend_keys, root_key
from slipstream.types import ImageSpan


def test_salts_are_told_apart_wherever_one_ends():
    """A model's salt and a tenant's are not read as one text: no tenant can name itself into another model's prefixes."""
    salts = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("abc",)]
    assert len({root_key(*given) for given in salts}) == len(salts)


def test_a_chain_is_the_same_at_once_and_piece_by_piece():
    tokens, whole, pieces = range(12), list[bytes](), list[bytes]()
    extend_keys(whole, root_key("model"), tokens, 4, 3)
    for count in (1, 2, 3):
        extend_keys(pieces, root_key("model"), tokens, 4, count)
    assert pieces == whole
    assert len(set(whole)) == 3


def test_a_picture_is_told_apart_by_where_it_begins():
    """Its placeholders are the same tokens everywhere, and a text may hold the same token behind a picture."""
    chains = set()
    for offset in (0, 1, 4, 5):
        keys = list[bytes]()
        image = ImageSpan(offset=offset, rows=1, columns=3, key=b"picture", height=1, width=1, pixels=b"")
        extend_keys(keys, root_key("model"), [9] * 8, 4, 2, [image])
        chains.add(tuple(keys))
    assert len(chains) == 4
