"""Routes that change the weights of a model that serves, and pause it, by vLLM's names and SGLang's.

Whoever uses them decides what every client is answered. So there are none without
--enable-weight-updates, which asks for a file of keys with roles, and an admin's key is needed; but
/is_paused and /get_weight_version are for users, too. Files are read within --weights-folder alone,
after links are followed, those in a checkpoint's folder as well. Nothing is unpickled.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from slipstream.messages.weights import WeightsInfo
from slipstream.server.http.decoding import register
from slipstream.server.http.errors import bad_request
from slipstream.server.http.limits import read_as
from slipstream.server.http.replies import json_response
from slipstream.server.state import ServerState, WeightsProtocol

MODES = {
    "keep": "keep",
    "in_place": "keep",
    "retract": "retract",
    "wait": "wait",
    "abort": "abort",
}
"""Modes of a pause, by vLLM's names and SGLang's."""


class InitWeightsBody(Struct, forbid_unknown_fields=True):
    init_info: dict[str, Any] = {}


class StartWeightsBody(Struct, forbid_unknown_fields=True):
    update_info: dict[str, Any] = {}
    is_checkpoint_format: Literal[True] = True  # vLLM's; tensors always have a checkpoint's names


class PieceOfWeightsBody(Struct, forbid_unknown_fields=True):
    update_info: dict[str, Any]


class FinishWeightsBody(Struct, forbid_unknown_fields=True):
    weight_version: str | None = None


class FromDiskBody(Struct, forbid_unknown_fields=True):
    """SGLang's. `flush_cache` says nothing: prefixes of old weights are never found."""

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class InitGroupBody(Struct, forbid_unknown_fields=True):
    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    group_name: str = "weights"
    backend: Literal["nccl", "gloo"] = "nccl"


class DestroyGroupBody(Struct, forbid_unknown_fields=True):
    group_name: str = "weights"


class FromGroupBody(Struct, forbid_unknown_fields=True):
    """SGLang's: a piece of an update, which this begins and, with `flush_cache`, finishes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weights"
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class PauseBody(Struct, forbid_unknown_fields=True):
    mode: Literal["abort", "retract", "in_place", "keep", "wait"] = "abort"


class EmptyBody(Struct, forbid_unknown_fields=True):
    pass


register(
    *(InitWeightsBody, StartWeightsBody, PieceOfWeightsBody, FinishWeightsBody, FromDiskBody),
    *(InitGroupBody, DestroyGroupBody, FromGroupBody, PauseBody, EmptyBody),
)


class WeightRoutes:
    def __init__(self, state: ServerState) -> None:
        self.state = state

    @property
    def engine(self) -> WeightsProtocol:
        engine: Any = self.state.engine
        return engine  # type: ignore[no-any-return]

    def routes(self) -> list[Route]:
        if not self.state.settings.enable_weight_updates:
            return []
        posts: dict[str, tuple[type[Struct], Callable[[Any], Awaitable[WeightsInfo]]]] = {
            "/init_weight_transfer_engine": (InitWeightsBody, self.init),
            "/start_weight_update": (StartWeightsBody, self.start),
            "/update_weights": (PieceOfWeightsBody, self.update),
            "/finish_weight_update": (FinishWeightsBody, self.finish),
            "/abort_weight_update": (EmptyBody, lambda _: self.engine.abort_weight_update()),
            "/update_weights_from_disk": (FromDiskBody, self.from_disk),
            "/init_weights_update_group": (InitGroupBody, self.init_group),
            "/destroy_weights_update_group": (DestroyGroupBody, self.destroy_group),
            "/update_weights_from_distributed": (FromGroupBody, self.from_group),
            "/pause_generation": (PauseBody, self.pause_generation),
            "/continue_generation": (EmptyBody, lambda _: self.engine.resume_generation()),
            "/resume": (EmptyBody, lambda _: self.engine.resume_generation()),
            "/flush_cache": (EmptyBody, self.flush_cache),
        }
        return [
            *(Route(path, self._answering(*own), methods=["POST"]) for path, own in posts.items()),
            Route("/pause", self.pause, methods=["POST"]),
            Route("/is_paused", self.is_paused),
            Route("/get_weight_version", self.version),
            Route("/weights", self.weights),
        ]

    def _answering(
        self, kind: type[Struct], answer: Callable[[Any], Awaitable[WeightsInfo]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            has_body = request.headers.get("content-length", "0") != "0" or (
                "transfer-encoding" in request.headers
            )
            body = await read_as(kind, request, self.state) if has_body else _empty(kind)
            try:
                return _reply(await answer(body))
            except (CheckpointError, UnsupportedModelError, ConfigError) as error:
                raise bad_request(error.message, error.field) from None

        return endpoint

    # --- An update ---

    async def init(self, body: InitWeightsBody) -> WeightsInfo:
        return await self.engine.init_weight_transfer_engine(body.init_info)

    async def start(self, body: StartWeightsBody) -> WeightsInfo:
        return await self.engine.start_weight_update(body.update_info)

    async def update(self, body: PieceOfWeightsBody) -> WeightsInfo:
        info = dict(body.update_info)
        if "tensors" in info:
            raise bad_request("tensors can't come in JSON; send a path or broadcast", "tensors")
        if "path" in info:
            info["path"] = self._within(info["path"], "path")
        if (handles := info.get("ipc_handles")) is not None:
            try:
                info["ipc_handles"] = [
                    {uuid: b64decode(text, validate=True) for uuid, text in own.items()}
                    for own in handles
                ]
            except (AttributeError, TypeError, ValueError, binascii.Error):
                message = (
                    "an entry of ipc_handles is base64 by a GPU's UUID, of what handle_of made"
                )
                raise bad_request(message, "ipc_handles") from None
        return await self.engine.update_weights(info)

    async def finish(self, body: FinishWeightsBody) -> WeightsInfo:
        return await self.engine.finish_weight_update(body.weight_version)

    async def from_disk(self, body: FromDiskBody) -> WeightsInfo:
        piece = {"path": self._within(body.model_path, "model_path")}
        return await self._whole(piece, body.weight_version, abort=body.abort_all_requests)

    async def init_group(self, body: InitGroupBody) -> WeightsInfo:
        return await self.engine.init_weight_transfer_engine(msgspec.structs.asdict(body))

    async def destroy_group(self, body: DestroyGroupBody) -> WeightsInfo:
        return await self.engine.leave_weight_group(body.group_name)

    async def from_group(self, body: FromGroupBody) -> WeightsInfo:
        names = ("names", "dtypes", "shapes", "group_name")
        info = await self.engine.weights()
        if not info.is_updating:
            await self.engine.start_weight_update()
        info = await self.engine.update_weights({name: getattr(body, name) for name in names})
        if not body.flush_cache:
            return info
        return await self._finished(body.weight_version, abort=body.abort_all_requests)

    async def _whole(
        self, piece: dict[str, Any], version: str | None, *, abort: bool
    ) -> WeightsInfo:
        """An update in one call. What is wrong leaves none under way."""
        await self.engine.start_weight_update()
        try:
            await self.engine.update_weights(piece)
            return await self._finished(version, abort=abort)
        except Exception:
            await self.engine.abort_weight_update()
            raise

    async def _finished(self, version: str | None, *, abort: bool) -> WeightsInfo:
        if not abort:
            return await self.engine.finish_weight_update(version)
        was_paused = (await self.engine.weights()).is_paused
        await self.engine.pause_generation(mode="abort")
        try:
            return await self.engine.finish_weight_update(version)
        finally:
            if not was_paused:
                await self.engine.resume_generation()

    def _within(self, path: Any, field: str) -> str:
        folder = self.state.settings.weights_folder
        if folder is None:
            raise bad_request(
                "start the server with --weights-folder DIR to read weights from files", field
            )
        root = Path(folder).resolve()
        try:
            found = (root / str(path)).resolve()
        except (OSError, ValueError, RuntimeError):
            raise bad_request(f"{field} is no path", field) from None
        inside = found.rglob("*") if found.is_dir() else ()  # follows no link to a folder
        if not all(p.resolve().is_relative_to(root) for p in (found, *inside)):
            message = f"{field} leads out of the folder whose weights this server reads"
            raise bad_request(message, field)
        return str(found)

    # --- Pauses ---

    async def pause(self, request: Request) -> Response:
        """Handle vLLM's ?mode=abort, wait or keep, and ?clear_cache."""
        given = dict(request.query_params)
        mode = given.pop("mode", "abort")
        clear = given.pop("clear_cache", "false").lower()
        if given:
            name = sorted(given)[0][:40]
            raise bad_request(f"{name!r} is no parameter; there are mode and clear_cache", name)
        if mode not in MODES:
            raise bad_request(f"mode must be one of {', '.join(MODES)}, got {mode[:20]!r}", "mode")
        if clear not in ("true", "false"):
            raise bad_request("clear_cache must be true or false", "clear_cache")
        clear_cache = clear == "true"
        if clear_cache and mode not in ("wait", "abort"):
            raise bad_request("clear_cache needs mode=wait or mode=abort", "clear_cache")
        return _reply(
            await self.engine.pause_generation(mode=MODES[mode], clear_cache=clear_cache)  # type: ignore[arg-type]
        )

    async def pause_generation(self, body: PauseBody) -> WeightsInfo:
        return await self.engine.pause_generation(mode=MODES[body.mode])  # type: ignore[arg-type]

    async def flush_cache(self, body: EmptyBody) -> WeightsInfo:
        await self.engine.reset_prefix_cache()
        return await self.engine.weights()

    # --- What runs ---

    async def is_paused(self, request: Request) -> Response:
        return json_response({"is_paused": (await self.engine.weights()).is_paused})

    async def version(self, request: Request) -> Response:
        return json_response({"weight_version": (await self.engine.weights()).weight_version})

    async def weights(self, request: Request) -> Response:
        """Handle ?checksums=true, which computes them."""
        checksums = request.query_params.get("checksums", "false").lower() == "true"
        return _reply(await self.engine.weights(checksums=checksums))


def _empty(kind: type[Struct]) -> Struct:
    try:
        return kind()
    except TypeError:
        raise bad_request("the body is empty; send JSON", None) from None


def _reply(info: WeightsInfo) -> Response:
    return json_response({"success": True, **msgspec.to_builtins(info)})
