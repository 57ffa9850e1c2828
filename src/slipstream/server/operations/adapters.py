"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM.

Clients of these routes decide what is read from disk and served, so they are off without
--lora-folder. Only folders inside that one, with links resolved, are read.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from slipstream.server.http.errors import ApiError, bad_request
from slipstream.server.http.limits import read_as
from slipstream.server.openai.protocol import LoadAdapterRequest, UnloadAdapterRequest
from slipstream.server.state import ServerState


class AdapterRoutes:
    def __init__(self, state: ServerState) -> None:
        self.state = state

    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        folder = self._folder()
        body = await read_as(LoadAdapterRequest, request, self.state)
        if body.lora_name in self.state.model_names:
            raise bad_request(
                f"{body.lora_name!r} is the model's own name; take another", "lora_name"
            )
        path = str(_within(folder, body.lora_path))
        how = {"load_inplace": True} if body.load_inplace else {}
        await self.state.engine.load_adapter(body.lora_name, path, **how)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.\n")

    async def unload(self, request: Request) -> Response:
        self._folder()
        body = await read_as(UnloadAdapterRequest, request, self.state)
        await self.state.engine.unload_adapter(body.lora_name)
        return PlainTextResponse(
            f"Success: LoRA adapter '{body.lora_name}' removed successfully.\n"
        )

    def _folder(self) -> Path:
        folder = self.state.settings.lora_folder
        if folder is None:
            raise ApiError(
                403,
                "start the server with --enable-lora --lora-folder DIR to use this route",
                code="lora_disabled",
            )
        return Path(folder).resolve()


def _within(folder: Path, path: str) -> Path:
    try:
        found = (folder / path).resolve()
    except (OSError, ValueError, RuntimeError):
        raise bad_request("lora_path is no path", "lora_path") from None
    if not found.is_relative_to(folder):
        raise bad_request(
            "lora_path leads out of the folder whose adapters this server loads", "lora_path"
        )
    return found
