"""Another server's own HTTP tests, sent to `slipstream serve`: routes and bodies as they are, only the start-up is translated.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36    # its sdist has llama.cpp's tests; or take a checkout
    pip install pytest-timeout wget
    python benchmarks/other_suites.py --suite llama.cpp --source llama_cpp_python-0.3.36.tar.gz
    python benchmarks/other_suites.py --suite vllm --source vllm-0.33.0.tar.gz --only anthropic --only tokenize

`--source` is an sdist or a checkout. The tests run in a copy outside this tree. Beside this script, for each suite:

suites/SUITE.json   the files that are run; `aside`: tests set aside, by which clause of docs/conformance.md and why;
                    `values`: numbers and texts that come from the tests' own models, and what they are with ours
suites/…_plugin.py  a plugin of pytest that starts our server where the tests start theirs
suites/models.py    the models: SmolLM2 and MiniLM as they are, a tiny random one with pictures, heads of random weights

A file that starts no server tests that program's own classes, and isn't run. Prints and records passed and failed of each
file, how many are set aside by which clause, and why each failed test fails. With `--only` the other files' results stay as
they are; with `-k` nothing is recorded.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from common import HERE, RESULTS, save

SUITES = HERE / "suites"


def copied(source: Path, inside: str, parts: list[str], into: Path) -> None:
    """Copy the folders or files `parts` of the sdist's or checkout's folder `inside`."""
    if source.is_dir():
        root = source if (source / parts[0]).exists() else source / inside
        for part in parts:
            if (root / part).is_dir():
                shutil.copytree(root / part, into / part, dirs_exist_ok=True)
            else:
                (into / part).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / part, into / part)
        return
    with tarfile.open(source) as archive:
        for member in archive:
            name = member.name.partition("/")[2].removeprefix(inside).lstrip("/")
            if member.isfile() and any(name == p or name.startswith(p + "/") for p in parts):
                member.name = name
                archive.extract(member, into, filter="data")


def with_values(folder: Path, values: list[dict[str, Any]]) -> None:
    """Write our models' numbers and texts in place of those of the tests' models. A text that isn't there ends the run."""
    for value in values:
        path = folder / value["file"]
        text = path.read_text(encoding="utf-8")
        for old, new in value["put"]:
            if old not in text:
                raise SystemExit(f"{value['file']} has no {old!r}: {value['why']}")
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


def counts(results: list[dict[str, str]]) -> dict[str, dict[str, Any]]:
    """Counts by file: passed, failed (each failed test, and why), and set aside by clause."""
    files: dict[str, dict[str, Any]] = {}
    for result in results:
        row = files.setdefault(result["file"], {"passed": 0, "failed": {}, "aside": {}})
        if result["outcome"] == "passed":
            row["passed"] += 1
        elif result["outcome"] == "failed":
            row["failed"][result["test"]] = result["why"]
        else:
            found = re.match(r"ASIDE (\d)", result["why"])
            clause = found[1] if found else "skipped by itself"
            row["aside"][clause] = row["aside"].get(clause, 0) + 1
    return files


def summed(files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    passed = sum(row["passed"] for row in files.values())
    failed = sum(len(row["failed"]) for row in files.values())
    aside: collections.Counter[str] = collections.Counter()
    for row in files.values():
        aside.update(row["aside"])
    strict = passed + failed + aside["6"]
    return {
        "passed": passed,
        "failed": failed,
        "aside": dict(sorted(aside.items())),
        "passed of those that count": round(passed / max(1, passed + failed), 4),
        "the same with clause 6 as failed": round(passed / max(1, strict), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--suite", required=True, choices=("llama.cpp", "vllm"))
    add("--source", required=True, type=Path, metavar="SDIST|CHECKOUT")
    add("--only", action="append", default=[], metavar="PART", help="of a file's path")
    add("-k", default="", metavar="EXPRESSION", help="pytest's choice of tests")
    add("--work", type=Path, help="a folder to keep the copy, logs and models in")
    add("--output", type=Path, default=RESULTS / "other_suites.json")
    args = parser.parse_args()
    plugin = args.suite.replace(".", "_")
    data = json.loads((SUITES / f"{plugin}.json").read_text(encoding="utf-8"))
    work = args.work or Path(tempfile.mkdtemp(prefix="suites"))
    copy = work / plugin
    shutil.rmtree(copy, ignore_errors=True)
    copied(args.source, data["inside"], data["parts"], copy)
    with_values(copy, data["values"])
    for folder in data.get("folders", ()):
        (copy / folder).mkdir(exist_ok=True)

    sys.path[:0] = [str(HERE.parent), str(SUITES)]
    import models

    made = models.build(work / "models")
    tests = copy / data["tests"]
    chosen = [p for part in data["files"] for p in sorted(tests.glob(part))]
    chosen = [
        p
        for p in dict.fromkeys(chosen)
        if str(p.relative_to(tests)) not in data.get("not run", {})
        and data["starts"] in p.read_text(encoding="utf-8")
        and (not args.only or any(part in str(p.relative_to(tests)) for part in args.only))
    ]
    log = work / f"{plugin}.jsonl"
    log.unlink(missing_ok=True)
    given = {"data": data, "models": made, "copy": str(copy), "log": str(log)}
    (work / f"{plugin}.given.json").write_text(json.dumps(given), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "marks", "-p", f"{plugin}_plugin"]
    command += [
        "--given",
        str(work / f"{plugin}.given.json"),
        "-p",
        "no:cacheprovider",
        "--tb=short",
    ]
    command += [
        "--continue-on-collection-errors",
        "--timeout=900",
        "--rootdir",
        str(tests),
        *data.get("pytest", ()),
    ]
    command += ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]
    command += ["-c", str(SUITES / "pytest.ini"), *(["-k", args.k] if args.k else [])]
    paths = [SUITES, HERE.parent / "src", tests if plugin == "llama_cpp" else copy]
    subprocess.run(
        [*command, *map(str, chosen)],
        check=False,
        cwd=paths[-1],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
    )

    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    found = counts(sorted(lines, key=lambda r: (r["file"], r["test"])))
    for file, row in found.items():
        aside = sum(row["aside"].values())
        print(f"{file:64} {row['passed']:4} passed {len(row['failed']):4} failed {aside:4} aside")
    print(json.dumps(summed(found), indent=1))
    if args.k:
        return
    record = json.loads(args.output.read_text("utf-8")) if args.output.exists() else {}
    suites = record.get("suites", {})
    before = suites.get(args.suite, {}).get("files", {}) if args.only else {}
    files = dict(sorted({**before, **found}.items()))
    suites[args.suite] = {"source": args.source.name, "total": summed(files), "files": files}
    save(args.output, "other_suites", suites=suites)


if __name__ == "__main__":
    main()
