r"""JSON schemas that are enforced, those that are refused, and whether what is enforced is right: beside xgrammar, in one run.

    git clone https://github.com/guidance-ai/jsonschemabench          # MaskBench, in maskbench/data
    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python benchmarks/features.py --study schemas --maskbench jsonschemabench/maskbench/data \
        --suite JSON-Schema-Test-Suite [--every 10]

Each schema comes with instances that are valid and others that are not. An engine takes the schema or refuses it. Of one that
it takes each instance is read as the model would have to write it: compact JSON, properties in the schema's order where the
schema has them. An invalid instance that the grammar accepts is *wrongly accepted*; a valid one that it does not is *wrongly
rejected*. Where nothing can tell the order (keys behind `$ref` or patterns) the given one is kept.

Engines run in processes of their own, one schema at a time; one that takes longer than `--limit` seconds, or dies, is counted.
xgrammar is left out if it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from slipstream.bench.report import print_table

Test = tuple[bool, Any]
Case = tuple[str, str, Any, list[Test]]
"""Where it is from, its name, the schema, and instances with whether they are valid."""


def maskbench(folder: Path, every: int) -> Iterator[Case]:
    for path in sorted(folder.glob("*.json"))[::every]:
        given = json.loads(path.read_text("utf-8"))
        yield (
            "MaskBench",
            path.stem,
            given["schema"],
            [(t["valid"], t["data"]) for t in given.get("tests", ())],
        )


def suite(folder: Path) -> Iterator[Case]:
    for draft in ("draft2020-12", "draft7"):
        for path in sorted((folder / "tests" / draft).glob("*.json")):
            for group in json.loads(path.read_text("utf-8")):
                tests = [(t["valid"], t["data"]) for t in group["tests"]]
                yield (
                    f"test suite, {draft}",
                    f"{path.stem}: {group['description']}",
                    group["schema"],
                    tests,
                )


def ordered(value: Any, schema: Any) -> Any:
    """`value` with its keys in the order of the schema's properties."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, dict):
        properties = schema.get("properties") if isinstance(schema.get("properties"), dict) else {}
        names = [
            *(name for name in properties if name in value),
            *(name for name in value if name not in properties),
        ]
        return {
            name: ordered(value[name], properties.get(name, schema.get("additionalProperties")))
            for name in names
        }
    if isinstance(value, list):
        return [ordered(item, schema.get("items")) for item in value]
    return value


def slipstream_engine() -> Callable[[Any], Callable[[str], bool]]:
    """As a request is: checked first, by the same limits. RequestError says why a schema is refused."""
    from llguidance import LLMatcher, LLTokenizer

    from slipstream.engine.grammars.grammar import check, compose, limits
    from slipstream.errors import RequestError
    from slipstream.types import StructuredOutputsParams

    vocabulary = LLTokenizer("byte")

    def take(schema: Any) -> Callable[[str], bool]:
        params = StructuredOutputsParams(json=schema)
        check(params)
        first = LLMatcher(vocabulary, compose(params), log_level=0, limits=limits())
        if first.is_error():
            raise RequestError(first.get_error().splitlines()[0])

        def accepts(text: str) -> bool:
            matcher = first.deep_copy()
            tokens = vocabulary.tokenize_str(text)
            return (
                matcher.validate_tokens(tokens) == len(tokens)
                and matcher.consume_tokens(tokens)
                and matcher.is_accepting()
            )

        return accepts

    return take


def xgrammar_engine(**options: Any) -> Callable[[Any], Callable[[str], bool]]:
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    def take(schema: Any) -> Callable[[str], bool]:
        grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), **options)
        return lambda text: bool(_is_grammar_accept_string(grammar, text))

    return take


ENGINES: dict[str, tuple[str, Callable[[], Callable[[Any], Callable[[str], bool]]]]] = {
    "slipstream": ("llguidance", slipstream_engine),
    "xgrammar": ("xgrammar", xgrammar_engine),
    "xgrammar, not strict": ("xgrammar", lambda: xgrammar_engine(strict_mode=False)),
}


def serve(name: str, pipe: Connection) -> None:
    take = ENGINES[name][1]()
    pipe.send("ready")
    while True:
        try:
            schema, tests = pipe.recv()
        except EOFError:
            return
        begin = time.perf_counter()
        try:
            accepts = take(schema)
        except BaseException as error:  # a panic is no Exception
            pipe.send(("refused", str(error) or type(error).__name__, [], 0.0))
            continue
        seconds = time.perf_counter() - begin
        try:
            pipe.send(("taken", "", [accepts(text) for text in tests], seconds))
        except BaseException as error:
            pipe.send(("failed", str(error) or type(error).__name__, [], seconds))


class Process:
    """An engine's. It is started again if it dies or hangs."""

    def __init__(self, name: str, limit: float) -> None:
        self.name, self.limit = name, limit
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(self.name, theirs), daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "ready"

    def ask(self, schema: Any, tests: list[str]) -> tuple[str, str, list[bool], float]:
        self.pipe.send((schema, tests))
        try:
            if self.pipe.poll(self.limit):
                return self.pipe.recv()
            what = "too slow"
        except (EOFError, ConnectionResetError):
            what = "died"
        self.process.kill()
        self.process.join()
        self.start()
        return what, what, [], self.limit


RECORD = "schemas"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--maskbench", type=Path)
    parser.add_argument("--suite", type=Path)
    parser.add_argument(
        "--every", type=int, default=1, help="take every so many of MaskBench's schemas"
    )
    parser.add_argument(
        "--limit", type=float, default=20.0, help="seconds for a schema and its instances"
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    cases = [
        *(maskbench(args.maskbench, args.every) if args.maskbench else ()),
        *(suite(args.suite) if args.suite else ()),
    ]
    versions = {}
    for package in {package for package, _ in ENGINES.values()}:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} is not installed and is left out", file=sys.stderr)
    engines = {
        name: Process(name, args.limit)
        for name, (package, _) in ENGINES.items()
        if package in versions
    }
    counts: dict[tuple[str, str], Counter[str]] = {}
    wrong: list[dict[str, str]] = []
    reasons: dict[str, Counter[str]] = {name: Counter() for name in engines}
    for number, (source, case, schema, tests) in enumerate(cases):
        texts = [
            json.dumps(ordered(value, schema), separators=(",", ":"), ensure_ascii=False)
            for _, value in tests
        ]
        for name, engine in engines.items():
            verdict, reason, found, _ = engine.ask(schema, texts)
            count = counts.setdefault((source, name), Counter())
            count["schemas"] += 1
            count[verdict] += 1
            if verdict != "taken":
                reasons[name][reason.splitlines()[0][:90]] += 1
                continue
            right = True
            for (valid, _), text, accepted in zip(tests, texts, found, strict=True):
                count["valid" if valid else "invalid"] += 1
                if accepted and not valid:
                    count["wrongly accepted"] += 1
                    wrong.append(
                        {"engine": name, "case": f"{source}: {case}", "instance": text[:200]}
                    )
                elif valid and not accepted:
                    count["wrongly rejected"] += 1
                    right = False
                right = right and (accepted is valid)
            count["all right"] += right
        if number % 500 == 499:
            print(f"{number + 1} of {len(cases)} schemas", file=sys.stderr, flush=True)
    keys = (
        "schemas",
        "taken",
        "refused",
        "failed",
        "too slow",
        "died",
        "all right",
        "valid",
        "wrongly rejected",
        "invalid",
    )
    keys = (*keys, "wrongly accepted")
    for source in dict.fromkeys(source for source, _ in counts):
        rows = [(name, *(str(counts[source, name][key]) for key in keys)) for name in engines]
        print_table(source, ("engine", *keys), rows)
    results = [
        {"source": s, "engine": n, **{key: count[key] for key in keys}}
        for (s, n), count in counts.items()
    ]
    save(
        engines=versions,
        workload={"every": args.every, "limit_s": args.limit},
        results=results,
        refusals={name: dict(found.most_common(40)) for name, found in reasons.items()},
        wrongly_accepted=[w for w in wrong if w["engine"] == "slipstream"],
        wrongly_accepted_by_others=[w for w in wrong if w["engine"] != "slipstream"][:60],
    )
