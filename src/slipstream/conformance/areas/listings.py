"""Checks of the lists of models."""

from __future__ import annotations

from typing import Any

import httpx

from slipstream.conformance.registry import FailedError, UnsupportedError, check, expect
from slipstream.conformance.session import SHAPE_ERRORS, CheckSession


def body_of(reply: httpx.Response, what: str) -> Any:
    expect(reply.status_code == 200, f"{what}: HTTP {reply.status_code}: {reply.text[:80]}")
    try:
        return reply.json()
    except ValueError:
        raise FailedError(f"{what}: no JSON: {reply.text[:80]!r}") from None


@check("listings.models", "chat", "messages", "ollama")
async def models_are_listed(session: CheckSession) -> str:
    """The list has the model, in the protocol's shape."""
    try:
        if session.protocol.name == "ollama":
            models = body_of(await session.request("GET", "/api/tags"), "/api/tags")["models"]
            names = [model["name"].removesuffix(":latest") for model in models]
        else:
            listed = body_of(await session.request("GET", "/v1/models"), "/v1/models")
            if session.protocol.name == "chat":
                expect(listed["object"] == "list", "the list has no object: list")
                kinds = {model["object"] for model in listed["data"]}
                expect(kinds == {"model"}, f"models have the objects {kinds}")
            names = [model["id"] for model in listed["data"]]
    except SHAPE_ERRORS as error:
        raise FailedError(f"the list's shape: {error!r}") from None
    expect(session.model.removesuffix(":latest") in names, f"{session.model} is not in {names}")
    return ", ".join(names)[:60]


@check("listings.model", "chat", "ollama")
async def a_model_is_described(session: CheckSession) -> None:
    """The served model is described by its name, and an unknown one is a 404."""
    for name, status in ((session.model, 200), ("no-such-model", 404)):
        if session.protocol.name == "ollama":
            reply = await session.request("POST", "/api/show", {"model": name})
        else:
            reply = await session.request("GET", f"/v1/models/{name}")
            if status == 200 and reply.status_code in (404, 405):
                raise UnsupportedError("no route for one model")
            if status == 200:
                found = body_of(reply, f"/v1/models/{name}").get("id")
                expect(found == name, f"/v1/models/{name} has the id {found!r}")
        expect(reply.status_code == status, f"{name}: HTTP {reply.status_code}, not {status}")


@check("listings.version", "ollama")
async def the_version_is_known(session: CheckSession) -> str:
    """`/api/version` has a version, which editors compare."""
    version = str(body_of(await session.request("GET", "/api/version"), "/api/version")["version"])
    expect(version.split(".")[0].isdigit(), f"the version is {version!r}")
    return version
