"""Messages of a chat and their parts, and prompts in the forms that llama.cpp's clients send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import msgspec.structs
from msgspec import Meta, Raw, Struct

from slipstream.base.arguments import likely_value
from slipstream.engine.text.tools import ROLES
from slipstream.server.answers.hints import ABSENT, AnyHint
from slipstream.server.answers.tools import SentToolCall, call_dict
from slipstream.server.http.decoding import OFF, decode, refuse_unless_off, register, shorten
from slipstream.server.http.errors import bad_request


class TextOnly(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text"]
    text: str


class PromptString(Struct, forbid_unknown_fields=True, kw_only=True):
    """A text as an object, which llama.cpp's clients send where images are possible."""

    prompt_string: str | None = None
    content: Annotated[list[TextOnly], Meta(min_length=1)] | None = None
    multimodal_data: list[str] = []

    def whole(self, name: str) -> str:
        if self.multimodal_data:
            message = "pictures go to /chat/completions, as image_url; leave multimodal_data out"
            raise bad_request(message, name)
        if (self.prompt_string is None) == (self.content is None):
            raise bad_request("give either prompt_string or content", name)
        if self.content is not None:
            return "".join(part.text for part in self.content)
        return self.prompt_string or ""


def without_objects(given: Any, name: str) -> Any:
    """A prompt or prompts, with text objects replaced by texts."""
    if isinstance(given, PromptString):
        return given.whole(name)
    return [without_objects(part, name) for part in given] if isinstance(given, list) else given


Prompted: TypeAlias = "str | list[str | int]"
"""A prompt in a body: a text, or token ids possibly mixed with texts, as in llama.cpp."""


def each_prompt(given: Any, name: str) -> list[Prompted]:
    """List of prompts from a text, from token ids (possibly mixed with texts), or from a list of either."""
    if isinstance(given, str):
        return [given]
    kinds = {type(part) for part in given}
    if not kinds or kinds >= {int, list}:
        what = "mixes token ids and lists" if kinds else "is an empty list"
        raise bad_request(f"{name} {what}; give text, token ids, or a list of these", name)
    return [given] if int in kinds else given


class TextPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str
    cache_control: Raw = ABSENT  # see `answers.cache_hints`, as the next
    prompt_cache_breakpoint: Raw = ABSENT


class RefusalPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    refusal: str


@dataclass(frozen=True, slots=True)
class PicturePart:
    """An image in a message. `path`: its place in the body, for errors."""

    url: str
    detail: str
    path: str


@dataclass(frozen=True, slots=True)
class SoundPart:
    """A sound in a message. `path` is its place in the body, for errors."""

    data: str
    format: str
    path: str


MediaPart: TypeAlias = PicturePart | SoundPart


class InputAudio(Struct, forbid_unknown_fields=True, kw_only=True):
    data: str  # base64
    format: Literal["wav", "mp3", "flac", "ogg"]


class AudioPart(Struct, forbid_unknown_fields=True, tag_field="type", tag="input_audio"):
    input_audio: InputAudio
    cache_control: Raw = ABSENT
    prompt_cache_breakpoint: Raw = ABSENT


class ImageUrl(Struct, forbid_unknown_fields=True, kw_only=True):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Struct, forbid_unknown_fields=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl | str  # a plain URL is vLLM's short form
    cache_control: Raw = ABSENT
    prompt_cache_breakpoint: Raw = ABSENT


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    """A chat message. The fields after `name` belong to an assistant's answer that a client sends
    back. `reasoning` is the name of `reasoning_content` in OpenRouter and newer vLLM."""

    role: str
    content: str | list[dict[str, Raw]] | None = None
    name: str | None = None
    refusal: Raw = OFF
    tool_calls: list[SentToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Raw = OFF
    audio: Raw = OFF
    annotations: AnyHint = ABSENT
    id: AnyHint = ABSENT
    cache_control: Raw = ABSENT
    reasoning_details: AnyHint = ABSENT
    thinking_blocks: AnyHint = ABSENT
    provider_specific_fields: AnyHint = ABSENT
    parsed: AnyHint = ABSENT


def message_dict(
    message: Message, path: str, media: list[MediaPart] | None = None
) -> dict[str, Any]:
    """The message in the form for chat templates. `developer`, OpenAI's newer word for `system`, becomes
    `system`, which templates know. Images and sounds are appended to `media`; None refuses them."""
    if message.role not in ROLES:
        what = f"role {message.role!r} is not supported; use one of {', '.join(ROLES)}{likely_value(message.role, ROLES)}"
        raise bad_request(what, f"{path}.role")
    refuse_unless_off(message, _MESSAGE_OFF, path + ".")
    for name, role in (
        ("tool_calls", "assistant"),
        ("reasoning_content", "assistant"),
        ("reasoning", "assistant"),
        ("tool_call_id", "tool"),
    ):
        if getattr(message, name) is not None and message.role != role:
            raise bad_request(f"{name} is for the role {role!r}", f"{path}.{name}")
    if message.content is None and not message.tool_calls:
        raise bad_request("a message needs content", f"{path}.content")
    parts: list[str | MediaPart] = (
        [message.content or ""]
        if isinstance(message.content, str | None)
        else [
            _part(part, f"{path}.content[{i}]", media is not None)
            for i, part in enumerate(message.content)
        ]
    )
    seen = [part for part in parts if not isinstance(part, str)]
    if seen and message.role != "user":
        raise bad_request(
            f"only a user's message has pictures or sounds, not one of {message.role!r}",
            seen[0].path,
        )
    if media is not None:
        media += seen
    more = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    given: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(parts),
    }
    given |= {name: value for name, value in more.items() if value is not None}
    if message.tool_calls:
        given["tool_calls"] = [call_dict(call) for call in message.tool_calls]
    return given


_MESSAGE_OFF = {"refusal": (b"null",), "function_call": (b"null",), "audio": (b"null",)}


def _part(part: dict[str, Raw], path: str, with_media: bool) -> str | MediaPart:
    kind = bytes(part.get("type", b"null"))
    if kind == b'"image_url"' and with_media:
        image = decode(ImagePart, msgspec.json.encode(part), path + ".").image_url
        image = ImageUrl(url=image) if isinstance(image, str) else image
        return PicturePart(image.url, image.detail or "auto", f"{path}.image_url")
    if kind == b'"input_audio"' and with_media:
        sound = decode(AudioPart, msgspec.json.encode(part), path + ".").input_audio
        return SoundPart(sound.data, sound.format, f"{path}.input_audio")
    if kind == b'"refusal"':
        return decode(RefusalPart, msgspec.json.encode(part), path + ".").refusal
    if kind != b'"text"':
        known = "text, image_url and input_audio are" if with_media else "only text is"
        raise bad_request(f"content part of type {shorten(kind)}: {known} supported", path)
    return decode(TextPart, msgspec.json.encode(part), path + ".").text


def _content(parts: list[str | MediaPart]) -> str | list[dict[str, str]]:
    """The text of all parts, or a list if there are pictures or sounds."""
    if all(isinstance(part, str) for part in parts):
        return "".join(part for part in parts if isinstance(part, str))
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image" if isinstance(part, PicturePart) else "audio"}
        for part in parts
    ]


def picture_part(url: str, detail: str | None) -> dict[str, Raw]:
    """A content part with a picture, for messages translated from other protocols."""
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": Raw(b'"image_url"'), "image_url": Raw(msgspec.json.encode(image))}


def text_part(text: str) -> dict[str, Raw]:
    return {"type": Raw(b'"text"'), "text": Raw(msgspec.json.encode(text))}


register(
    *(TextPart, RefusalPart, ImagePart, AudioPart),
    parts=(PromptString, TextOnly, ImageUrl, InputAudio, Message),
)
