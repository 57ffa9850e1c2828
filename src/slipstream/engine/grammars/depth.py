"""Limits on a grammar's nesting depth and on optional parts of a terminal, computed without recursion.

llguidance follows references recursively in native code, and a stack overflow there ends the process. So
grammars deeper than `MAX_DEPTH` are refused before llguidance reads them. The depth counts

1. the schemas inside each other, and those that a `$ref` names;
2. the rules and terminals of a Lark or GBNF grammar that refer to one another in a chain, the groups (parentheses) around
   each reference, and the schemas that `%json` names.

For a terminal with n optional parts in a row llguidance builds n² expressions at once, and has no limit for that:
40,000 parts take 6 GB. So n is limited here, too.

A reference that closes a cycle counts nothing, because grammars may be recursive. Limits of llguidance's own
(nested groups, JSON text and regular expressions) are checked here, too, for an error with a remedy.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 400
"""Maximum nesting of schemas, rules and groups. llguidance's compilation takes up to 5 KB of stack
for each level: an 8 MiB stack, a thread's default, suffices for nested objects to depth 1,700, a 2
MiB stack to 420. A compiled grammar is flat. At a depth of 6,000 its masks and copies, and freeing
it, take less than 256 KiB, so any thread may do that."""

MAX_NESTED_JSON = 120
"""Maximum nesting of objects and lists in the text of a schema. llguidance reads 123 levels."""

MAX_NESTED_GROUPS = 28
"""Maximum nesting of groups in a rule: llguidance's own limit."""

MAX_NESTED_REGEX = 250
"""Maximum nesting of groups in a regular expression: llguidance's own limit."""

MAX_OPTIONAL = 4000
"""Maximum number of optional parts of a regular expression, or of a terminal including the
terminals that it names. That many take half a second and 80 MB to compile."""

MAX_RESOURCES = 64
"""Maximum number of schemas with an `$id` that are tried as the base of a relative reference."""

Edges = Iterable[tuple[Hashable, int]]

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
_REGEX_PART = re.compile(
    r"""\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\(\?[a-zA-Z-]+\)|(?P<open>\((?:\?(?:P?<\w*>|[a-zA-Z-]*:))?)|(?P<close>\))
    |(?P<optional>[?*]|\{0)|(?P<bar>\|)""",
    re.DOTALL | re.VERBOSE,
)
_OPTIONAL_GROUP = re.compile(r"\[|\{\s*0|\(\s*\|")
_SPACE = re.compile(r"\s*")
# llguidance's rule to tell Lark from GBNF, as a pattern that runs in linear time
_LARK = re.compile(r"(?m)^[^\S\n]*(%llguidance\b|start\s*:)")
# An unterminated token extends to the end of the text. Otherwise each opening would be searched for its end, while holding
# the GIL.
_LARK_TOKEN = re.compile(
    r"""(?P<skip>(?:\#|//)[^\n]*|"(?:[^"\\]|\\.)*"?|<[^<>\s]+>|@[\w-]+|::)|/(?P<regex>(?:\\.|[^/\\])+)/?
    |(?P<json>%(?:json|regex|llguidance))\b|(?P<inner>%lark\s*\{)|%\w+|(?P<name>_?(?:[a-z][_a-z0-9-]*|[A-Z][_A-Z0-9-]*))
    |(?P<optional>[?*~]|\|(?=\s*(?:[|)\n]|\Z)))|(?P<is>:)|(?P<line>\n)|(?P<open>[(\[{])|(?P<close>[)\]}])""",
    re.DOTALL | re.VERBOSE,
)
_GBNF_TOKEN = re.compile(
    r"""(?P<skip>\#[^\r\n]*|"(?:[^"\\]|\\.)*"?|\[(?:[^\]\\]|\\.)*\]?)|(?P<name>[\w-]+)
    |(?P<optional>[?*])|(?P<is>::=)|(?P<line>[\r\n])|(?P<open>[({])|(?P<close>[)}])""",
    re.DOTALL | re.VERBOSE,
)


class TooDeepError(ValueError):
    """A grammar is deeper than llguidance can take, or a terminal has too many optional parts."""


def check_json_text(text: str) -> None:
    """Raise TooDeepError if objects and lists are nested too deeply."""
    depth = 0
    for found in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > MAX_NESTED_JSON:
            raise TooDeepError(
                f"objects and lists are nested deeper than {MAX_NESTED_JSON}; move inner schemas to $defs, and refer to them"
            )


def check_schema(schema: Any) -> None:
    """Raise TooDeepError if a schema is too deep, or a regular expression in it."""
    if _schema_depth(schema) > MAX_DEPTH:
        raise TooDeepError(
            f"schemas in each other, and behind $ref, are deeper than {MAX_DEPTH}; shorten the chain of references"
        )


def check_regex(pattern: str) -> int:
    """Number of optional parts of a regular expression. TooDeepError if there are too many, or if
    groups are nested too deeply."""
    depth = optional = 0
    before, end = "open", 0
    for found in _REGEX_PART.finditer(pattern):
        kind = found.lastgroup
        depth += (kind == "open") - (kind == "close")
        if depth > MAX_NESTED_REGEX:
            raise TooDeepError(
                f"groups of a regular expression are nested deeper than {MAX_NESTED_REGEX}; take out groups"
            )
        is_empty = end == found.start() and (
            (kind == "bar" and before in ("open", "bar")) or (kind == "close" and before == "bar")
        )
        optional += kind == "optional" or is_empty
        before, end = kind or "", found.end()
    _check_optional(optional)
    return optional


def _check_optional(optional: int) -> None:
    if optional > MAX_OPTIONAL:
        raise TooDeepError(
            f"more than {MAX_OPTIONAL} parts of one terminal are optional; make one repetition of them, or several terminals"
        )


def check_grammar(text: str) -> None:
    """Raise TooDeepError if a grammar in Lark's form, or llama.cpp's, is too deep."""
    edges, optional = _rule_edges(text)
    if _longest(edges, lambda rule: edges[rule]) > MAX_DEPTH:
        raise TooDeepError(
            f"rules behind each other are deeper than {MAX_DEPTH}; shorten the chain of references"
        )
    _check_terminals(edges, optional, is_lark(text))


def is_lark(text: str) -> bool:
    """Whether a grammar is in Lark's form, and not in llama.cpp's."""
    return _LARK.search(text) is not None


def _longest(nodes: Iterable[Hashable], edges: Callable[[Any], Edges]) -> int:
    """Length of the longest path in a graph whose edges have lengths, or any number above
    `MAX_DEPTH` if it is longer. Edges that close a cycle count nothing."""
    longest: dict[Hashable, int] = {}
    on_path: set[Hashable] = set()
    for first in nodes:
        if first in longest:
            continue
        path, best = [(first, 0, iter(edges(first)))], [0]
        on_path.add(first)
        while path:
            node, length, rest = path[-1]
            for target, more in rest:
                if target in longest:
                    best[-1] = max(best[-1], more + longest[target])
                elif target not in on_path:
                    on_path.add(target)
                    path.append((target, more, iter(edges(target))))
                    best.append(0)
                    break
            else:
                path.pop()
                on_path.discard(node)
                longest[node] = best.pop()
                if best:
                    best[-1] = max(best[-1], length + longest[node])
                if longest[node] > MAX_DEPTH:
                    return longest[node]
    return max(longest.values(), default=0)


# --- Schemas --------------------------------------------------------------------------------------------------------


class _SchemaParts:
    """The parts of a schema, identified by object identity."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.weights: dict[int, int] = {id(root): 1}
        """Weight of each object and list by its identity: 1 for a schema, else 0."""
        self.parts: dict[int, Any] = {id(root): root}
        self._resources: dict[str, list[Any]] = {}  # by the last segment of their $id
        self._anchors: dict[str, list[Any]] = {}
        waiting, maps = [root], set[int]()
        while waiting:
            part = waiting.pop()
            is_map = id(part) in maps
            if isinstance(part, dict) and not is_map:
                self._note(part)
            for key, value in part.items() if isinstance(part, dict) else enumerate(part):
                if isinstance(value, (dict, list)):
                    self.parts[id(value)] = value
                    if isinstance(value, dict) and not is_map and key in _MAPS:
                        maps.add(id(value))
                    self.weights[id(value)] = int(isinstance(value, dict) and id(value) not in maps)
                    waiting.append(value)

    def _note(self, schema: dict[str, Any]) -> None:
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(key), str):
                self._anchors.setdefault(name, []).append(schema)
        for key in ("$id", "id"):
            if isinstance(name := schema.get(key), str):
                # a reference without a base may be relative to any `$id`
                for end in {_last(name), ""}:
                    self._resources.setdefault(end, []).append(schema)
                if name.startswith("#"):
                    self._anchors.setdefault(name[1:], []).append(schema)
        if isinstance(pattern := schema.get("pattern"), str):
            check_regex(pattern)
        if isinstance(named := schema.get("patternProperties"), dict):
            for pattern in named:
                check_regex(pattern)

    def edges(self, key: int) -> Edges:
        part = self.parts[key]
        values = part.values() if isinstance(part, dict) else part
        for value in values:
            if isinstance(value, (dict, list)):
                yield id(value), self.weights[id(value)]
        if isinstance(part, dict):
            for name in ("$ref", "$dynamicRef", "$recursiveRef"):
                if isinstance(reference := part.get(name), str):
                    for target in self._targets(reference):
                        yield id(target), 1

    def _targets(self, reference: str) -> Iterable[Any]:
        """The parts to which a reference may point; several if an `$id` makes its base
        ambiguous."""
        base, _, fragment = reference.partition("#")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(fragment, ())
        own = self._resources.get(_last(base), ())[:MAX_RESOURCES]
        found = [_pointed(schema, fragment) for schema in (self.root, *own)]
        return [target for target in found if isinstance(target, (dict, list))]


def _last(uri: str) -> str:
    """Last segment of a URI's path, equal in absolute and relative spelling."""
    return uri.partition("#")[0].rstrip("/").rpartition("/")[2]


def _pointed(schema: Any, pointer: str) -> Any:
    for step in pointer.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict):
            schema = schema.get(step)
        elif isinstance(schema, list) and step.isdecimal() and int(step) < len(schema):
            schema = schema[int(step)]
        else:
            return None
    return schema


def _schema_depth(schema: Any) -> int:
    if not isinstance(schema, (dict, list)):
        return 1
    document = _SchemaParts(schema)
    return 1 + _longest([id(schema)], document.edges)


# --- Grammars -------------------------------------------------------------------------------------------------------


def _rule_edges(
    text: str,
) -> tuple[Mapping[Hashable, list[tuple[Hashable, int]]], Mapping[Hashable, int]]:
    """Read a grammar's rules and terminals. Returns two mappings by rule or terminal:

    1. The rules, terminals and schemas that it names, each with a depth: 1 plus the number of
       groups around it, or the schema's own depth.
    2. The number of optional parts in its own text.
    """
    form = _LARK_TOKEN if is_lark(text) else _GBNF_TOKEN
    edges: dict[Hashable, list[tuple[Hashable, int]]] = {}
    optional = Counter[Hashable]()
    numbers = itertools.count()  # ids of inner grammars, whose rules are local, and of schemas
    outer: list[tuple[int, str, int]] = []
    grammar, rule, depth, at = next(numbers), "", 0, 0
    line: list[tuple[Hashable, int]] = []

    def put(targets: Iterable[tuple[Hashable, int]]) -> None:
        edges.setdefault((grammar, rule), []).extend(targets)

    while (found := form.search(text, at)) is not None:
        at, kind = found.end(), found.lastgroup
        if kind == "name":
            line.append(((grammar, found[0]), 1 + depth))
        elif kind == "is" and line:
            ((_, rule), _), *line = line  # type: ignore[misc]  # others are attributes and parameters
            depth = 0
        elif kind == "line":
            put(line)
            line = []
        elif kind == "open":
            depth += 1
            optional[grammar, rule] += _OPTIONAL_GROUP.match(text, found.start()) is not None
            if depth > MAX_NESTED_GROUPS:
                raise TooDeepError(
                    f"groups are nested deeper than {MAX_NESTED_GROUPS}; make inner ones rules of their own"
                )
        elif kind == "inner":
            inner = next(numbers)
            put([*line, ((inner, "start"), 1 + depth)])
            outer.append((grammar, rule, depth))
            grammar, rule, depth, line = inner, "", 0, []
        elif kind == "close" and not depth and outer:
            put(line)
            line = []
            grammar, rule, depth = outer.pop()
        elif kind == "close":
            depth = max(0, depth - 1)
        elif kind == "regex":
            optional[grammar, rule] += check_regex(found["regex"])
        elif kind == "optional":
            optional[grammar, rule] += 1
        elif kind == "json":
            value, at = _json_at(text, at, found["json"])
            own = _schema_depth(value) if found["json"] == "%json" else 0
            put([(next(numbers), depth + own)])
    put(line)
    for target, _ in [edge for targets in edges.values() for edge in targets]:
        edges.setdefault(target, [])
    return edges, optional


def _check_terminals(
    edges: Mapping[Hashable, list[tuple[Hashable, int]]], own: Mapping[Hashable, int], lark: bool
) -> None:
    """Raise TooDeepError if a terminal has too many optional parts, including those of the
    terminals that it names, each time. GBNF doesn't distinguish terminals from rules: all that are
    not recursive count as terminals."""
    found: dict[Hashable, int | None] = {}  # None: not a terminal
    begun: set[Hashable] = set()

    def is_terminal(node: Any) -> bool:
        if not isinstance(node, tuple):  # a schema
            return False
        return node[1].lstrip("_")[:1].isupper() if lark else node[1] not in ("", "root")

    for first in filter(is_terminal, edges):
        path = [first]
        while path:
            node = path[-1]
            named = [name for name, _ in edges[node] if is_terminal(name)]
            waiting = dict.fromkeys(n for n in named if n not in found and n not in begun)
            if node not in found and waiting:
                begun.add(node)
                path += waiting
                continue
            path.pop()
            counts = [found.get(name) for name in named]
            if node not in found:
                found[node] = None if None in counts else own[node] + sum(c or 0 for c in counts)
                _check_optional(found[node] or 0)


def _json_at(text: str, at: int, keyword: str) -> tuple[Any, int]:
    """Parses the JSON value after a keyword. Returns (value, index of the character after it).
    ValueError if it is not JSON."""
    space = _SPACE.match(text, at)
    assert space is not None, "it matches nothing, too"
    try:
        value, end = json.JSONDecoder().raw_decode(text, space.end())
    except RecursionError:
        raise TooDeepError(
            f"the JSON behind {keyword} is nested deeper than {MAX_NESTED_JSON}"
        ) from None
    except ValueError as error:
        raise ValueError(f"what stands behind {keyword} is no JSON: {error}") from None
    check_json_text(text[space.end() : end])
    return value, end
