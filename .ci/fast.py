"""Checks the files that changed since a commit: format, lint, types, and the tests that import them.

    ./check fast [COMMIT]        default: the last commit, so what is not committed yet

Takes under a minute for a change of a few files. It installs nothing. Where more than `MAX_TEST_FILES` import what changed, the
ones with the module's name or in the folder that mirrors its package run, and the rest is named as not run: `./check` runs all.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = ROOT / ".venv" / "bin"
MAX_TEST_FILES = 6


def lines(*command: str) -> list[str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def changed(since: str) -> list[Path]:
    """Returns the Python files that differ from the commit, and those git does not know yet."""
    names = lines("git", "diff", "--name-only", "--diff-filter=d", since)
    names += lines("git", "ls-files", "--others", "--exclude-standard")
    folders = ("src/", "tests/", "benchmarks/", ".ci/", "examples/")
    return [Path(n) for n in sorted(set(names)) if n.endswith(".py") and n.startswith(folders)]


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")


def tests_of(path: Path) -> tuple[list[Path], int]:
    """Returns the test files to run for a changed file, and how many more import it."""
    if path.parts[0] == "tests":
        return ([path] if path.name.startswith("test_") else []), 0
    if path.parts[0] != "src":
        return [], 0
    parent, _, name = module_of(path).rpartition(".")
    named = rf"(from {re.escape(parent)} import [^\n]*\b{name}\b|{re.escape(parent)}\.{name}\b)"
    importing = [
        test.relative_to(ROOT)
        for test in sorted((ROOT / "tests").rglob("test_*.py"))
        if "gpu" not in test.parts and re.search(named, test.read_text())
    ]
    if len(importing) <= MAX_TEST_FILES:
        return importing, 0
    folder = path.parts[2]
    near = [t for t in importing if name in t.stem or folder == t.parts[1]]
    first = sorted(near, key=lambda t: (name not in t.stem, t.stat().st_size))[:MAX_TEST_FILES]
    return first, len(importing) - len(first)


def main() -> int:
    since = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    files = changed(since)
    if not files:
        print(f"check fast: no Python file differs from {since}")
        return 0
    names = [str(f) for f in files]
    tests, left = set(), 0
    for file in files:
        own, more = tests_of(file)
        tests.update(own)
        left += more
    steps = [[BIN / "ruff", "format", "--check", *names], [BIN / "ruff", "check", *names]]
    if any(file.parts[0] == "src" for file in files):
        steps.append([BIN / "mypy"])
    if tests:
        steps.append([BIN / "python", "-m", "pytest", "-n", "auto", "--dist", "worksteal"])
        steps[-1] += ["-m", "not slow and not gpu and not ray", *sorted(map(str, tests))]
    print(
        f"check fast: {len(files)} files differ from {since}, {len(tests)} test files", flush=True
    )
    failed = [Path(s[0]).name for s in steps if subprocess.run(s, cwd=ROOT, check=False).returncode]
    if left:
        print(f"check fast: {left} more test files import what changed; ./check runs them")
    print("check fast: " + (f"FAILED: {', '.join(failed)}" if failed else "passed"))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
