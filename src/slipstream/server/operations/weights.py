"""Routes that change the weights of a model that serves, and pause it, by vLLM's names and SGLang's.

Users of these routes determine every client's answers. So they exist only with --enable-weight-updates, which
requires a file of keys with roles, and need an admin's key; /is_paused and /get_weight_version are for users,
too. Files are only read inside --weights-folder, with links resolved, including those in a checkpoint's
folder. Nothing is unpickled.
"""

from __future__ import annotations

import binascii
import logging
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

logger = logging.getLogger("slipstream.server")

MODES = {"keep": "keep", "in_place": "keep", "retract": "retract", "wait": "wait", "abort": "abort"}
"""Modes of a pause, by vLLM's names and SGLang's."""


class InitWeightsBody(Struct, forbid_unknown_fields=True):
    """POST /init_weight_transfer_engine: join the group in which a trainer broadcasts."""

    init_info: dict[str, Any] = {}


class StartWeightsBody(Struct, forbid_unknown_fields=True):
    """POST /start_weight_update: begin an update; the body may be left out."""

    update_info: dict[str, Any] = {}
    is_checkpoint_format: Literal[True] = True  # vLLM's; tensors always have a checkpoint's names


class PieceOfWeightsBody(Struct, forbid_unknown_fields=True):
    """POST /update_weights: a piece of the update."""

    update_info: dict[str, Any]


class FinishWeightsBody(Struct, forbid_unknown_fields=True):
    """POST /finish_weight_update: write the update; the body may be left out."""

    weight_version: str | None = None


class FromDiskBody(Struct, forbid_unknown_fields=True):
    """POST /update_weights_from_disk: a whole update from a folder (SGLang's).

    `flush_cache` has no effect: prefixes of old weights are never found.
    """

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class InitGroupBody(Struct, forbid_unknown_fields=True):
    """POST /init_weights_update_group: join the group in which a trainer broadcasts (SGLang's)."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    group_name: str = "weights"
    backend: Literal["nccl", "gloo"] = "nccl"


class DestroyGroupBody(Struct, forbid_unknown_fields=True):
    """POST /destroy_weights_update_group: leave the group (SGLang's)."""

    group_name: str = "weights"


class FromGroupBody(Struct, forbid_unknown_fields=True):
    """POST /update_weights_from_distributed: a piece of an update, which this begins and, with
    `flush_cache`, finishes (SGLang's)."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weights"
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class PauseBody(Struct, forbid_unknown_fields=True):
    """POST /pause_generation: make no step until /continue_generation."""

    mode: Literal["abort", "retract", "in_place", "keep", "wait"] = "abort"


class QueriedPauseBody(Struct, forbid_unknown_fields=True):
    """POST /pause: make no step until /resume; the same fields may be in the query."""

    mode: Literal["abort", "retract", "in_place", "keep", "wait"] = "abort"
    clear_cache: bool = False


class EmptyBody(Struct, forbid_unknown_fields=True):
    pass


register(
    *(InitWeightsBody, StartWeightsBody, PieceOfWeightsBody, FinishWeightsBody, FromDiskBody),
    *(InitGroupBody, DestroyGroupBody, FromGroupBody, PauseBody, QueriedPauseBody),
    EmptyBody,
)

BODIES: dict[str, type[Struct]] = {
    "/init_weight_transfer_engine": InitWeightsBody,
    "/start_weight_update": StartWeightsBody,
    "/update_weights": PieceOfWeightsBody,
    "/finish_weight_update": FinishWeightsBody,
    "/update_weights_from_disk": FromDiskBody,
    "/init_weights_update_group": InitGroupBody,
    "/destroy_weights_update_group": DestroyGroupBody,
    "/update_weights_from_distributed": FromGroupBody,
    "/pause_generation": PauseBody,
    "/pause": QueriedPauseBody,
}
BODILESS = {
    "/abort_weight_update": "Forget an update that is not finished; the old weights go on",
    "/continue_generation": "End a pause",
    "/resume": "The same as /continue_generation",
    "/flush_cache": "Forget cached prefixes; no request may run",
    "/reset_prefix_cache": "The same as /flush_cache",
}
GETS = {
    "/is_paused": "Whether generation is paused",
    "/get_world_size": "The engine's ranks, each of which joins a trainer's group",
    "/server_info": "Settings that a trainer looks at, in vLLM's shape",
    "/get_weight_version": "The version of the weights that run",
    "/weights": "The weights that run; ?checksums=true: with those of all parameters",
}
"""All routes by verb, for /openapi.json."""


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
        posts: dict[str, Callable[[Any], Awaitable[WeightsInfo]]] = {
            "/init_weight_transfer_engine": self.init,
            "/start_weight_update": self.start,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish,
            "/abort_weight_update": lambda _: self.engine.abort_weight_update(),
            "/update_weights_from_disk": self.from_disk,
            "/init_weights_update_group": self.init_group,
            "/destroy_weights_update_group": self.destroy_group,
            "/update_weights_from_distributed": self.from_group,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.resume,
            "/resume": self.resume,
            "/flush_cache": self.flush_cache,
            "/reset_prefix_cache": self.flush_cache,
        }
        return [
            *(
                Route(path, self._answering(BODIES.get(path, EmptyBody), own), methods=["POST"])
                for path, own in posts.items()
            ),
            Route("/pause", self.pause, methods=["POST"]),
            Route("/is_paused", self.is_paused),
            Route("/get_weight_version", self.version),
            Route("/weights", self.weights),
            Route("/get_world_size", self.world_size),
            Route("/server_info", self.server_info),
        ]

    def _answering(
        self, kind: type[Struct], answer: Callable[[Any], Awaitable[WeightsInfo]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            _query(request)
            body = await read_as(kind, request, self.state) if _has_body(request) else _empty(kind)
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
        return await self._written(body.weight_version)

    async def from_disk(self, body: FromDiskBody) -> WeightsInfo:
        piece = {"path": self._within(body.model_path, "model_path")}
        await self.engine.start_weight_update()
        return await self._take(piece, body, is_new=True, is_last=True)

    async def init_group(self, body: InitGroupBody) -> WeightsInfo:
        return await self.engine.init_weight_transfer_engine(msgspec.structs.asdict(body))

    async def destroy_group(self, body: DestroyGroupBody) -> WeightsInfo:
        return await self.engine.leave_weight_group(body.group_name)

    async def from_group(self, body: FromGroupBody) -> WeightsInfo:
        names = ("names", "dtypes", "shapes", "group_name")
        piece = {name: getattr(body, name) for name in names}
        is_new = not (await self.engine.weights()).is_updating
        if is_new:
            await self.engine.start_weight_update()
        return await self._take(piece, body, is_new=is_new, is_last=body.flush_cache)

    async def _take(
        self,
        piece: dict[str, Any],
        body: FromDiskBody | FromGroupBody,
        *,
        is_new: bool,
        is_last: bool,
    ) -> WeightsInfo:
        """Send a piece of an update, and finish the update after the last one. If an error occurs,
        an update begun by the same call (`is_new`) is aborted."""
        try:
            info = await self.engine.update_weights(piece)
            if not is_last:
                return info
            return await self._finished(body.weight_version, abort=body.abort_all_requests)
        except Exception:
            if is_new:
                await self.engine.abort_weight_update()
            raise

    async def _finished(self, version: str | None, *, abort: bool) -> WeightsInfo:
        if not abort:
            return await self._written(version)
        was_paused = (await self.engine.weights()).is_paused
        await self.state.interrupt_checks()
        await self.engine.pause_generation(mode="abort")
        try:
            return await self._written(version)
        finally:
            if not was_paused:
                await self.engine.resume_generation()

    async def _written(self, version: str | None) -> WeightsInfo:
        info = await self.engine.finish_weight_update(version)
        fields = {
            "version": info.weight_version,
            "checksum": info.checksum,
            "seconds": round(info.seconds, 4),
        }
        logger.info("weights were updated", extra={"fields": fields})
        return info

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
        """Handle vLLM's ?mode=abort, wait or keep, and ?clear_cache. A body may have them instead."""
        given = _query(request, "mode", "clear_cache")
        if _has_body(request):
            body = await read_as(QueriedPauseBody, request, self.state)
            if given:
                name = min(given)
                raise bad_request(f"{name} is in the query, and there is a body; send one", name)
            return _reply(await self._pause(body.mode, clear_cache=body.clear_cache))
        mode = given.get("mode", "abort")
        if mode not in MODES:
            raise bad_request(f"mode must be one of {', '.join(MODES)}, got {mode[:20]!r}", "mode")
        return _reply(await self._pause(mode, clear_cache=_flag(given, "clear_cache")))

    async def _pause(self, mode: str, *, clear_cache: bool = False) -> WeightsInfo:
        if clear_cache and mode not in ("wait", "abort"):
            raise bad_request("clear_cache needs mode=wait or mode=abort", "clear_cache")
        own: Any = MODES[mode]
        await self.state.interrupt_checks()
        info = await self.engine.pause_generation(mode=own, clear_cache=clear_cache)
        logger.info("generation was paused", extra={"fields": {"mode": own}})
        return info

    async def pause_generation(self, body: PauseBody) -> WeightsInfo:
        return await self._pause(body.mode)

    async def resume(self, body: EmptyBody) -> WeightsInfo:
        info = await self.engine.resume_generation()
        logger.info("generation was resumed")
        return info

    async def flush_cache(self, body: EmptyBody) -> WeightsInfo:
        await self.state.interrupt_checks()
        await self.engine.reset_prefix_cache()
        return await self.engine.weights()

    # --- What runs ---

    async def is_paused(self, request: Request) -> Response:
        _query(request)
        return json_response({"is_paused": (await self.engine.weights()).is_paused})

    async def version(self, request: Request) -> Response:
        _query(request)
        return json_response({"weight_version": (await self.engine.weights()).weight_version})

    async def world_size(self, request: Request) -> Response:
        """Handle vLLM's request for the number of the engine's ranks."""
        _query(request)
        return json_response({"world_size": self.state.engine.config.parallel.num_ranks})

    async def server_info(self, request: Request) -> Response:
        """Handle vLLM's request for its configuration, in which trainers look for a way to send weights."""
        _query(request, "config_format")
        model, backends = self.state.engine.config.model, {"backend": "nccl"}
        told = {"dtype": model.dtype, "max_model_len": model.max_model_len}
        return json_response({"vllm_config": {**told, "weight_transfer_config": backends}})

    async def weights(self, request: Request) -> Response:
        """Handle ?checksums=true, which computes them."""
        checksums = _flag(_query(request, "checksums"), "checksums")
        return _reply(await self.engine.weights(checksums=checksums))


def _has_body(request: Request) -> bool:
    told = request.headers
    return told.get("content-length", "0") != "0" or "transfer-encoding" in told


def _query(request: Request, *known: str) -> dict[str, str]:
    """The query's parameters, or a 400 that names one that is not `known`."""
    given = dict(request.query_params)
    if unknown := sorted(given.keys() - set(known)):
        name = unknown[0][:40]
        there = f"there is {' and '.join(known)}" if known else "this route has none"
        raise bad_request(f"{name!r} is no parameter of the query; {there}", name)
    return given


def _flag(given: dict[str, str], name: str) -> bool:
    value = given.get(name, "false").lower()
    if value not in ("true", "false"):
        raise bad_request(f"{name} must be true or false", name)
    return value == "true"


def _empty(kind: type[Struct]) -> Struct:
    try:
        return kind()
    except TypeError:
        raise bad_request("the body is empty; send JSON", None) from None


def _reply(info: WeightsInfo) -> Response:
    return json_response({"success": True, **msgspec.to_builtins(info)})
