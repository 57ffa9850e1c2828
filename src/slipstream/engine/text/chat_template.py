"""Chat templates: the model's own Jinja, run in a sandbox with the names that Hugging Face templates expect.

A block tag's whole line is removed (trim_blocks, lstrip_blocks). Supported are loop controls, `raise_exception`,
`strftime_now`, a `tojson` that escapes nothing, and `{% generation %}`, which marks answers for training and here only
outputs its contents.

A template is an untrusted program, so each rendering has a `_Budget` of time and work:

1. Each loop iteration, each call, and each character of a result or of the output costs work.
2. Operations that multiply sizes (`*`, `replace`, `join`, …) are charged before they run.
3. A list, dict or tuple is charged for all its contents when it is created, so nothing that is later printed, compared or
   sorted can be larger than what was charged.
4. Filters and methods that templates don't need and whose results are unbounded are removed.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
import string
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from jinja2 import Template

MAX_WORK = 64 * 2**20
"""Work budget of a rendering: characters (of at most 4 bytes each) plus steps."""

WORK_PER_CHARACTER, MAX_EXTRA_WORK = 1024, 2**30
"""Extra work allowed per character of the messages, and its maximum. Some templates build the text
message by message and copy it each time."""

MAX_SECONDS = 1.0
"""CPU seconds of this thread that a rendering may take."""

MAX_TEMPLATE, MAX_WORDS = 2**18, 25_000
"""Maximum characters of a template, and maximum tokens of Jinja's lexer. Compiling takes about 30 µs per
token, within the first request. Long templates have 20,000 characters and about 5,000 tokens."""

_MAX_NUMBER = 100_000  # as an argument of a filter or method: width, precision or count
_FILTERS = frozenset((
    "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "filesizeformat",
    "first", "float", "forceescape", "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower",
    "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice",
    "sort", "string", "sum", "title", "tojson", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
))  # fmt: skip
_WIDTHS = frozenset((
    "batch", "center", "indent", "ljust", "rjust", "round", "slice", "tojson", "truncate", "zfill",
))  # fmt: skip
"""Filters and methods in which a numeric argument determines the output's size."""
_NO_METHODS = frozenset(
    {"translate", "format_map", "encode", "expandtabs", "maketrans", "to_bytes"}
)


class _TooMuch(Exception):  # noqa: N818 - raised inside the template, which is at fault
    pass


class _Budget:
    __slots__ = ("_extra", "_left", "_steps", "_until")

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._left = MAX_WORK
        # their size is only computed when needed
        self._extra: Mapping[str, Any] | None = variables
        self._steps = 0
        self._until = time.thread_time() + MAX_SECONDS

    def spend(self, work: int) -> None:
        self._left -= work + 16
        self._steps += 1
        if self._left < 0 or not self._steps & 63:
            self._check()

    def _check(self) -> None:
        if self._left < 0 and self._extra is not None:
            self._left += min(WORK_PER_CHARACTER * _size(self._extra), MAX_EXTRA_WORK)
            self._extra = None
        if self._left < 0:
            raise _TooMuch("it makes more text than these messages can need")
        if time.thread_time() > self._until:
            raise _TooMuch(f"it takes longer than {MAX_SECONDS:g} s")


_budget: ContextVar[_Budget] = ContextVar("budget")


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Render a chat template. RequestError (field "messages") with the template's message if it
    raised one, or if it exceeded its budget."""
    token = _budget.set(_Budget(variables))
    try:
        compiled = _compile(template)
        if isinstance(compiled, str):
            raise RequestError(compiled, field="messages")
        return compiled.render(variables)
    except RequestError:
        raise
    except _TooMuch as error:
        raise RequestError(
            f"the model's chat template was stopped: {error}", field="messages"
        ) from None
    except Exception as error:  # whatever a template raises is due to these messages
        raise RequestError(
            f"the chat template refuses these messages: {_shortened(error)}", field="messages"
        ) from error
    finally:
        _budget.reset(token)


def read_template(name: str) -> str:
    """Read a chat template from the file `name`, or take `name` itself if it is Jinja. ConfigError
    (field "chat_template") if it is not text, not Jinja, or does not output a user's message."""
    is_text = "{{" in name or "{%" in name  # the same rule as vLLM's
    try:
        text = name if is_text else Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(
            f"{name!r} can't be read as a chat template: {reason}", field="chat_template"
        ) from None
    compiled = _compile(text)
    if isinstance(compiled, str):
        reason = compiled.replace("the model's chat template", "the chat template")
        raise ConfigError(f"{name!r}: {reason}", field="chat_template")
    if not any(_contents_of(text)):
        raise ConfigError(
            f"{name!r} is no chat template: what it makes of a conversation does not show the message of the user; name a "
            "file of Jinja that writes `messages`",
            field="chat_template",
        )
    return text


MEDIA = ("image", "audio")
TAKES_TEXT = "this model takes no pictures and no sounds; leave them out, or take another model (`smolvlm:256m` sees)"


def shaped_for(
    template: str, messages: Sequence[Mapping[str, Any]], placeholder: str | None
) -> Sequence[Mapping[str, Any]]:
    """The messages with contents in the form that the template reads: strings, or lists of parts ({"type": "text", "text":
    …}, {"type": "image"} and {"type": "audio"}). A template that only reads strings gets `placeholder` for an image or a
    sound."""
    lists = [isinstance(m.get("content"), list) for m in messages]
    takes_texts, takes_lists = _contents_of(template)
    if not any(lists) and (takes_texts or not takes_lists):
        return messages
    found = []
    for message, is_list in zip(messages, lists, strict=True):
        content: Any = message.get("content")
        if is_list and not takes_lists:
            if placeholder is None and any(part.get("type") in MEDIA for part in content):
                raise RequestError(TAKES_TEXT, field="messages")
            content = "".join(
                f"{placeholder}\n" if part.get("type") in MEDIA else part["text"]
                for part in content
            )
        elif isinstance(content, str) and not takes_texts and takes_lists:
            content = [{"type": "text", "text": content}]
        found.append({**message, "content": content})
    return found


_PROBE = "\ue001probe\ue001"


@functools.lru_cache(maxsize=8)
def _contents_of(template: str) -> tuple[bool, bool]:
    """(whether the template reads contents that are strings, whether it reads lists of parts)."""

    def shows(content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            named = {"bos_token": "", "eos_token": "", "tools": None, "add_generation_prompt": True}
            text = render(template, {"messages": messages, **named})
        except RequestError:
            return False
        # a list that is output unchanged, as Python writes it
        part = (f"{mark}text{mark}: {mark}{_PROBE}" for mark in "'\"")
        return _PROBE in text and not any(shown in text for shown in part)

    return shows(_PROBE), shows([{"type": "text", "text": _PROBE}])


def _shortened(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 500 else text[:500] + "…"


def _size(value: Any, budget: _Budget | None = None) -> int:
    """Number of characters and items of a value, at any depth."""
    total, left = 0, [value]
    while left:
        item = left.pop()
        size = 0
        if isinstance(item, str):
            size = len(item)
        elif isinstance(item, Mapping):
            size = 2 * len(item)
            left.extend(item)
            left.extend(item.values())
        elif isinstance(item, (list, tuple)):
            size = len(item)
            left.extend(item)
        elif (attributes := _attributes(item)) is not None:
            left.append(attributes)
        total += 1 + size
        if budget is not None:
            budget.spend(size)
    return total


def _attributes(item: Any) -> Any:
    """Attributes of a Jinja namespace; None for other objects. Not read with getattr, because an
    undefined name raises then, yet it may be printed."""
    try:
        return object.__getattribute__(item, "_Namespace__attrs")
    except AttributeError:
        return None


def _paid(value: Any) -> Any:
    """Charges the budget for the size of `value`, and returns it."""
    budget = _budget.get()
    if isinstance(value, str):
        budget.spend(len(value))
    elif not isinstance(value, (int, float, type(None))):
        _size(value, budget)
    return value


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _before_call(name: str, value: Any, args: Iterable[Any]) -> None:
    """Charge the budget for text that a filter or string method produces beyond its arguments."""
    given = tuple(args)
    if name in _WIDTHS and any(_number(a) and abs(a) > _MAX_NUMBER for a in given):
        raise _TooMuch(f"a number above {_MAX_NUMBER} is given to {name}")
    texts = [a for a in given if isinstance(a, str)]
    match name:
        case "replace" if isinstance(value, str) and len(texts) >= 2:
            _budget.get().spend(value.count(texts[0]) * len(texts[1]))
        case "indent":
            _budget.get().spend(
                (str(value).count("\n") + 1)
                * max([0, *map(len, texts), *(a for a in given if _number(a))])
            )
        case "batch" | "slice":
            _budget.get().spend(int(max([0, *(a for a in given if _number(a))])))
        case "format":
            _before_percent(str(value), given)
        case "tojson":
            width = max([0, *map(len, texts), *(a for a in given if _number(a))])
            _budget.get().spend(_size(value, _budget.get()) * width)
        case "string":
            _paid(value)


_PLACE = re.compile(r"[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")


def _before_percent(form: str, given: Any) -> None:
    """Charge the budget for `form % given`. Its widths must be small and literal, not taken from `given`."""
    at = form.find("%")
    while at >= 0:
        at, depth = at + 1, 0
        while form.startswith("(", at) or depth:  # the key of a value, which may contain brackets
            depth += {"(": 1, ")": -1}.get(form[at : at + 1], 0)
            at += 1
            if at > len(form):
                return  # the key is not closed: Python raises an error
            if not depth:
                break
        place = _PLACE.match(form, at)
        assert place is not None
        if any(width is not None and (width == "*" or len(width) > 4) for width in place.groups()):
            raise _TooMuch("a width in a format is too large")
        at = form.find("%", place.end() + 1)
    _before_format(form, given, form.count("%"))


def _before_braces(form: str, given: tuple[Any, ...]) -> None:
    """Charge the budget for `form.format(…)`. Its widths must be small and literal."""
    for _, _, spec, _ in string.Formatter().parse(form):
        if spec and ("{" in spec or re.search(r"\d{5}", spec)):
            raise _TooMuch("a width in a format is too large")
    _before_format(form, given, form.count("{"))


def _before_format(form: str, given: Any, places: int) -> None:
    values = given if isinstance(given, tuple) else (given,)
    _budget.get().spend(
        len(form) + places * (10_000 + sum(_size(v, _budget.get()) for v in values))
    )


def _joined(value: Iterable[Any], separator: str) -> str:
    budget, parts = _budget.get(), []
    for item in value:
        budget.spend(len(separator))
        parts.append(str(_paid(item)))
    return separator.join(parts)


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.filters import make_attrgetter
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace
    from jinja2.visitor import NodeTransformer

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2's own convention)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Meter(NodeTransformer):
        """Inserts the budget's charges into a template's syntax tree. They are filters, because a filter call is the
        cheapest one that Jinja compiles."""

        def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (the visitor's names)
            self.generic_visit(node)
            fixed = sum(len(data.data) for part in node.body for data in _template_data(part))
            turn = nodes.Filter(nodes.Const(fixed), "_turn", [], [], None, None)
            # not a constant, which Jinja would evaluate only once
            turn.args = [nodes.Name("loop_turn_", "load")]
            node.body.insert(0, nodes.ExprStmt(turn))
            return node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            node.nodes = [
                n if isinstance(n, nodes.Const) else _filter(n, "_paid") for n in node.nodes
            ]
            return node  # its parts are charged

        def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            return _filter(node, "_paid")

        def visit_Dict(self, node: nodes.Expr) -> nodes.Node:  # noqa: N802
            self.generic_visit(node)
            return node if getattr(node, "ctx", "load") != "load" else _filter(node, "_paid")

        visit_List = visit_Tuple = visit_Dict  # noqa: N815

    def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def _template_data(node: nodes.Node) -> Iterable[nodes.TemplateData]:
        if not isinstance(node, nodes.TemplateData):
            return node.find_all(nodes.TemplateData)
        return [node]

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**", "%"))

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree: nodes.Template = Meter().visit(super()._parse(source, name, filename))
            tree.set_environment(self)
            return tree

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            if operator == "%" and isinstance(left, str):
                _before_percent(left, right)
            elif isinstance(left, int) and isinstance(right, int):
                if (
                    left.bit_length() * (right if operator == "**" else 1) + right.bit_length()
                    > 4096
                ):
                    raise _TooMuch("a number has more than 4096 bits")
            elif operator == "*":
                for value, times in ((left, right), (right, left)):
                    if isinstance(times, int):
                        _budget.get().spend(_size(value, _budget.get()) * max(0, times))
            return _paid(super().call_binop(context, operator, left, right))

        def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
            # the sandbox wraps str.format in its own function
            method = getattr(obj, "__wrapped__", obj)
            receiver, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
            _budget.get().spend(0)
            if isinstance(receiver, (str, int, float)):
                if name in _NO_METHODS:
                    raise _TooMuch(f"the method {name} is not there")
                if name == "join" and isinstance(receiver, str) and len(args) == 1:
                    items = []
                    for item in args[0]:
                        _budget.get().spend(len(receiver))
                        items.append(_paid(item))
                    args = (items,)
                elif name == "format" and isinstance(receiver, str):
                    _before_braces(str(receiver), (*args, *kwargs.values()))
                else:
                    _before_call(name, receiver, (*args, *kwargs.values()))
            return _paid(super().call(context, obj, *args, **kwargs))

    class PrivateNames(Namespace):
        """Hides names that begin with _ from templates, as transformers does."""

        def __init__(*args: Any, **values: Any) -> None:  # a variable may then be called `self`
            self, *given = args
            Namespace.__init__(self)
            for name, value in dict(*given, **values).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace takes no name with _ before it, got {name!r}")
            super().__setitem__(name, value)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def now(form: str) -> str:
        if len(form) > 100 or re.search(r"\d{3}", form):
            raise _TooMuch("a date's format is too long")
        return datetime.datetime.now().strftime(form)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def join(value: Any, d: str = "", attribute: str | None = None) -> str:
        items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
        return _joined(items, str(d))

    def turn(fixed: int, _: Any) -> None:
        _budget.get().spend(fixed)

    def metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # the context or environment is the first argument
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def filter_(*args: Any, **kwargs: Any) -> Any:
            if len(args) > first:
                _before_call(name, args[first], (*args[first + 1 :], *kwargs.values()))
            return _paid(function(*args, **kwargs))

        return filter_

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, GenerationTag],
        finalize=_paid,
        cache_size=0,
    )
    del environment.globals["lipsum"]
    environment.filters["tojson"], environment.filters["join"] = to_json, join
    environment.filters = {
        name: metered(name, f) for name, f in environment.filters.items() if name in _FILTERS
    }
    environment.filters |= {"_paid": _paid, "_turn": turn}
    environment.globals["namespace"] = PrivateNames
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now
    return environment


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Template | str:
    """The compiled template, or an error message. Both are cached, so that a faulty template is not
    compiled for every request."""
    from jinja2 import TemplateError

    if len(template) > MAX_TEMPLATE:
        return f"the model's chat template has {len(template)} characters, more than {MAX_TEMPLATE}"
    try:
        environment = _environment()
        if next(itertools.islice(environment.lex(template), MAX_WORDS, None), None) is not None:
            return f"the model's chat template has more than {MAX_WORDS} words of Jinja"
        compiled: Template = environment.from_string(template)
        return compiled
    except TemplateError as error:
        return f"the model's chat template is broken: {_shortened(error)}"
    except RecursionError:
        return "the model's chat template is broken: it is nested too deeply"
