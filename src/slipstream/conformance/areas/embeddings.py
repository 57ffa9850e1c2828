"""Checks of embeddings, if the model has them."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

from slipstream.conformance.registry import FailedError, check, expect, offered
from slipstream.conformance.session import SHAPE_ERRORS, CheckSession

TEXTS = ("A man is eating.", "Someone has a meal.", "The stock market fell.")
PATHS = {"chat": "/v1/embeddings", "ollama": "/api/embed"}


async def ask(session: CheckSession, given: Any, **more: Any) -> Any:
    path = PATHS[session.protocol.name]
    reply = await session.post({"model": session.model, "input": given, **more}, path)
    if reply.status_code != 200:
        raise session.refused(reply.status_code, reply.content)
    return reply.json()


def vectors_of(session: CheckSession, body: Any) -> list[Any]:
    try:
        if session.protocol.name == "ollama":
            return list(body["embeddings"])
        numbers = [row["index"] for row in body["data"]]
        expect(numbers == list(range(len(numbers))), f"the rows' indexes are {numbers}")
        return [row["embedding"] for row in body["data"]]
    except SHAPE_ERRORS as error:
        raise FailedError(f"the shape of embeddings: {error!r}") from None


def cosine(a: list[float], b: list[float]) -> float:
    norms = math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norms


@check("embeddings.vectors", *PATHS)
async def a_text_has_one_vector(session: CheckSession) -> str:
    """Each text has a vector, in order: the same alone and among others, and one of finite
    numbers."""
    with offered("embeddings"):
        body = await ask(session, list(TEXTS))
    vectors = vectors_of(session, body)
    expect(len(vectors) == len(TEXTS), f"{len(vectors)} vectors of {len(TEXTS)} texts")
    sizes = {len(vector) for vector in vectors}
    expect(len(sizes) == 1 and 0 not in sizes, f"vectors have the sizes {sizes}")
    expect(all(math.isfinite(x) for v in vectors for x in v), "a number is not finite")
    for text, vector in zip(TEXTS, vectors, strict=True):
        (alone,) = vectors_of(session, await ask(session, text))
        expect(
            cosine(alone, vector) > 0.999, f"{text!r} has another vector alone than among others"
        )
    return f"{sizes.pop()} dimensions"


@check("embeddings.base64", "chat")
async def base64_is_the_same(session: CheckSession) -> None:
    """`encoding_format: base64`, which OpenAI's clients ask for, holds the same numbers."""
    with offered("embeddings"):
        (plain,) = vectors_of(session, await ask(session, TEXTS[0], encoding_format="float"))
    (packed,) = vectors_of(session, await ask(session, TEXTS[0], encoding_format="base64"))
    expect(isinstance(packed, str), "the vector is no text in base64")
    raw = base64.b64decode(packed)
    expect(len(raw) == 4 * len(plain), f"{len(raw)} bytes of {len(plain)} numbers")
    numbers = struct.unpack(f"<{len(plain)}f", raw)
    same = all(abs(a - b) <= 1e-5 + 1e-3 * abs(b) for a, b in zip(numbers, plain, strict=True))
    expect(same, "the numbers differ from those of encoding_format: float")
