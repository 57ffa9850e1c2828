"""/docs: the OpenAPI document as one HTML page, without external resources.

Each route has a form that sends a request (`docs_page.js`).
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from slipstream.base.html import head

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font-size: 1.25rem; margin: 3rem 0 .25rem; border-top: 2px solid #8888; padding-top: 1rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; border-top: 1px solid #8884; padding-top: .75rem; }
h3 + p { margin-top: 0; } nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; list-style: none; }
code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
td { border-bottom: 1px solid #8882; padding: .2rem .6rem .2rem 0; vertical-align: top; }
h2, h3, td { overflow-wrap: anywhere; } td:first-child { width: 40%; }
.verb { display: inline-block; min-width: 3.5rem; color: light-dark(#1d4ed8, #8fb4ff); }
a { color: light-dark(#1d4ed8, #8fb4ff); } summary { cursor: pointer; }
:root { color-scheme: light dark; }
body { background: light-dark(#ffffff, #17181c); color: light-dark(#1c1e21, #e8e9eb); }
textarea { width: 100%; box-sizing: border-box; } textarea, pre { font: .9em/1.45 ui-monospace, monospace; }
pre { max-height: 24rem; overflow: auto; border: 1px solid #8884; padding: .5rem; white-space: pre-wrap; }
"""

_EXAMPLES: dict[str, Any] = {
    "model": "MODEL",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 64,
    "documents": ["Cats purr.", "Dogs bark."],
    "texts": ["Cats purr.", "Dogs bark."],
    "tokens": [1, 2, 3],
}
"""Example values of fields in the forms' request bodies. Other strings are "Hello"."""


def page(document: dict[str, Any]) -> str:
    schemas = document["components"]["schemas"]
    groups: dict[str, list[str]] = {tag["name"]: [] for tag in document["tags"]}
    for path, verbs in document["paths"].items():
        for verb, told in verbs.items():
            groups[told["tags"][0]].append(_operation(path, verb, told, schemas))
    about = {tag["name"]: escape(tag["description"]) for tag in document["tags"]}
    groups = {name: routes for name, routes in groups.items() if routes}
    names = [*groups, "Bodies"]
    contents = "".join(f'<li><a href="#{_place(name)}">{escape(name)}</a></li>' for name in names)
    parts = [f'<nav aria-label="Groups"><ul>{contents}</ul></nav>']
    for name, routes in groups.items():
        parts += [_heading(name), f"<p>{about[name]}.</p>", *routes]
    parts.append(_heading("Bodies"))
    parts += [
        f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>{_fields(schema)}'
        for name, schema in schemas.items()
        if schema.get("properties")
    ]
    title = f"{escape(document['info']['title'])} {escape(document['info']['version'])}"
    key = (
        "<p>Every request needs the header <code>Authorization: Bearer KEY</code>. "
        '<label>Key for the forms below: <input id="key" type="password" autocomplete="off"></label></p>'
        if document["security"]
        else ""
    )
    script = Path(__file__).with_suffix(".js").read_text("utf-8")
    return (
        f"{head(scripts=True, connect=True)}<title>{title}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>{key}{"".join(parts)}'
        f"</main><script>{script}</script></body></html>"
    )


def _text(told: str) -> str:
    """A line with its `names` as HTML code elements."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(told))


def _heading(name: str) -> str:
    return f'<h2 id="{_place(name)}">{escape(name)}</h2>'


def _place(name: str) -> str:
    """Anchor of a group. It contains a hyphen, so it can't be a body's."""
    return "group-" + "-".join(re.findall(r"\w+", name.lower()))


def _operation(path: str, verb: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    title = f'<h3><code><span class="verb">{escape(verb.upper())}</span>{escape(path)}</code></h3>'
    body = operation.get("requestBody")
    if body is None:
        said = f"<p>{_text(operation['summary'])}</p>"
        return title + said + _form(path, verb, operation.get("parameters", []), None)
    ((kind, content),) = body["content"].items()
    schema = content["schema"]
    named = schemas[schema["$ref"].rsplit("/", 1)[1]]
    told = named.get("description", "").partition("\n")[0].partition(": ")[2]
    said = f"<p>{_text(told)}</p><p>Body: {_type(schema)}</p>"
    if kind != "application/json":  # a form with a file
        return title + said
    return title + said + _form(path, verb, operation.get("parameters", []), named)


def _form(path: str, verb: str, parameters: list[Any], schema: dict[str, Any] | None) -> str:
    """A form that sends the request. `schema` is the body's, if there is one."""
    fields = []
    for given in parameters:
        name, place = escape(given["name"]), " data-query" * (given["in"] == "query")
        fields.append(f"<p><label>{name} <input name={name}{place}></label></p>")
    if schema is not None:
        example = escape(json.dumps(_example(schema), indent=1), quote=False)
        fields.append(f'<textarea name="body" rows="8" aria-label="Body">{example}</textarea>')
    return (
        f'<details><summary>Try it</summary><form data-path="{escape(path)}" data-verb="{verb}">{"".join(fields)}'
        '<p><button>Send</button></p><pre hidden tabindex="0" aria-label="Answer"></pre></form></details>'
    )


def _example(schema: dict[str, Any]) -> dict[str, Any]:
    """A body with the required fields."""
    known = schema["properties"]
    names = [name for name in ("model", "messages", "max_tokens") if name in known]
    names += [name for name in schema.get("required", ()) if name not in names]
    return {name: _EXAMPLES.get(name, "Hello") for name in names}


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
