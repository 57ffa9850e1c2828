"""/docs: the OpenAPI document as one HTML page, without scripts or external resources."""

from __future__ import annotations

import json
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1rem; margin: 2rem 0 .5rem; border-top: 1px solid #8884; padding-top: 1rem; }
code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td { border-bottom: 1px solid #8882; padding: .2rem .6rem .2rem 0; vertical-align: top; }
h2, td { overflow-wrap: anywhere; } td:first-child { width: 40%; }
.verb { display: inline-block; min-width: 3.5rem; color: #2563eb; }
:root { color-scheme: light dark; }
"""


def page(document: dict[str, Any]) -> str:
    schemas = document["components"]["schemas"]
    paths = document["paths"].items()
    parts = [
        _operation(path, verb, told, schemas)
        for path, verbs in paths
        for verb, told in verbs.items()
    ]
    parts += [
        f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2>{_fields(schema)}'
        for name, schema in schemas.items()
        if schema.get("properties")
    ]
    title = f"{escape(document['info']['title'])} {escape(document['info']['version'])}"
    key = (
        "<p>Every request needs the header <code>Authorization: Bearer KEY</code>.</p>"
        if document["security"]
        else ""
    )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
    return (
        f'<!doctype html><html lang="en">{head}<title>{title}</title><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>{key}{"".join(parts)}</html>'
    )


def _operation(path: str, verb: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    head = f'<h2><code><span class="verb">{escape(verb.upper())}</span>{escape(path)}</code></h2>'
    body = operation.get("requestBody")
    if body is None:
        return f"{head}<p>{escape(operation['summary'])}</p>"
    (content,) = body["content"].values()
    schema = content["schema"]
    named = schemas[schema["$ref"].rsplit("/", 1)[1]]
    said = named.get("description", "").partition("\n")[0].partition(": ")[2]
    return f"{head}<p>{escape(said)}</p><p>Body: {_type(schema)}</p>"


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = (
        f"<tr><td><code>{escape(name)}</code>{' (required)' if name in required else ''}<td>{_type(field)}"
        for name, field in schema["properties"].items()
    )
    return f"<table>{''.join(rows)}</table>"


def _type(schema: dict[str, Any]) -> str:
    """The type of a field, in words. Other schemas are links."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[1])
        return f'<a href="#{name}"><code>{name}</code></a>'
    if "enum" in schema:
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of ({_type(schema.get('items') or {})})"
    bounds = [f"{sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema]
    return escape(" ".join([kind if isinstance(kind, str) else " or ".join(kind), *bounds]))


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
