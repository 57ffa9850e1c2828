"""Request fields that constrain an answer's format; a body may have one of them.

They are OpenAI's `response_format`, vLLM's `structured_outputs` and the `guided_*` of older
versions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.server.http.errors import bad_request

Text = Annotated[str, Meta(min_length=1)]
Schema = str | dict[str, Any] | bool
Choices = Annotated[list[Text], Meta(min_length=1)]


class JsonSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    """OpenAI's `json_schema`. The schema is enforced exactly, `strict` or not."""

    name: Text = "schema"
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None  # llama.cpp's and Together's, for a json_object


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's `structured_outputs`: exactly one of the first five fields."""

    json: Schema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: Text | None = None


class Structured(Struct, kw_only=True):
    """Base of bodies with fields that constrain the format."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    json_schema: Schema | None = None  # llama.cpp's names of two of these
    grammar: str | None = None  # llama.cpp's clients send "" for none


_GUIDED = ("json", "regex", "choice", "grammar")
_LLAMA = {"json_schema": "json", "grammar": "grammar"}


def structured(body: Structured) -> StructuredOutputsParams | None:
    """The constraint of a body, or None. Raises a 400 if there are several."""
    name = _name(body)
    if name is None:
        if body.guided_whitespace_pattern is not None:
            raise bad_request(
                "guided_whitespace_pattern needs guided_json", "guided_whitespace_pattern"
            )
        return None
    if name == "response_format":
        form = body.response_format
        assert form is not None
        if form.schema is not None and form.type != "json_object":
            raise bad_request(
                "response_format.schema is for the type json_object; here it is json_schema.schema",
                "response_format.schema",
            )
        if form.type == "json_object":
            if form.schema is not None:
                return StructuredOutputsParams(json=form.schema)
            return StructuredOutputsParams(json_object=True)
        if form.json_schema is None or form.json_schema.schema is None:
            raise bad_request(
                "json_schema with a schema is missing", "response_format.json_schema.schema"
            )
        return StructuredOutputsParams(json=form.json_schema.schema)
    if name == "structured_outputs":
        given = body.structured_outputs
        assert given is not None
        fields = {f: v for f in given.__struct_fields__ if (v := getattr(given, f)) is not None}
        return StructuredOutputsParams(**fields)
    if name in _LLAMA:
        return StructuredOutputsParams(**{_LLAMA[name]: getattr(body, name)})
    own = {name.removeprefix("guided_"): getattr(body, name)}
    return StructuredOutputsParams(**own, whitespace_pattern=body.guided_whitespace_pattern)


def structured_param(body: Structured, field: str) -> str:
    """The body's own name of a field of `structured_outputs` that an engine error names."""
    name = _name(body)
    if name is None or name == "structured_outputs":
        return field
    if name != "response_format":
        return "guided_whitespace_pattern" if field.endswith("whitespace_pattern") else name
    form = body.response_format
    inside = "schema" if form is not None and form.type == "json_object" else "json_schema.schema"
    return f"response_format.{inside}" if field.endswith(".json") else name


def _name(body: Structured) -> str | None:
    given = [f"guided_{name}" for name in _GUIDED if getattr(body, f"guided_{name}") is not None]
    given += [name for name in _LLAMA if getattr(body, name) not in (None, "")]
    if body.structured_outputs is not None:
        given.append("structured_outputs")
    if body.response_format is not None and body.response_format.type != "text":
        given.append("response_format")
    if len(given) > 1:
        raise bad_request(f"{given[0]} and {given[1]} are both given; give one", given[1])
    return given[0] if given else None
