"""Builds libslipstream_cpu into this package: `python -m slipstream.kernels.build [--sanitize]
[--into FOLDER]`.

It is for source trees that run without being installed, and uses the compiler and CMake of the
machine. `pip install .` does the same through scikit-build-core. Without a compiler it installs the
package without the library; `remedy` says what to do then. No torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

BUILD = "python -m slipstream.kernels.build"
PACKAGE = Path(__file__).parent
SOURCE = PACKAGE.parents[2] / "csrc" / "cpu"
COMPILERS = ("c++", "g++", "clang++")


def remedy() -> str:
    """Returns the command that installs the library where it is missing or outdated, with its
    requirements."""
    if (SOURCE / "CMakeLists.txt").is_file():
        command = BUILD
    else:  # pip caches a wheel that it built without a compiler, and would install that again
        command = f"pip install --force-reinstall --no-deps --no-cache-dir {_origin()}"
    return (
        command
        if has_compiler()
        else f"install a C++ compiler (Debian: apt install g++), then {command}"
    )


def has_compiler() -> bool:
    """Tells whether CMake would find a compiler: the one in CXX, or one by its usual names."""
    named = os.environ.get("CXX", "").split()
    return any(shutil.which(name) for name in (*named[:1], *COMPILERS))


def _origin() -> str:
    """Returns what this package was installed from, as an argument of pip (PEP 610). The name alone
    won't do: on the package index it belongs to another project."""
    try:
        recorded = distribution("slipstream").read_text("direct_url.json")
    except PackageNotFoundError:
        recorded = None
    return json.loads(recorded)["url"] if recorded else ". in a clone of Slipstream"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m slipstream.kernels.build", description=__doc__)
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="with AddressSanitizer and UndefinedBehaviorSanitizer",
    )
    parser.add_argument(
        "--into",
        type=Path,
        default=PACKAGE,
        help="another folder than this package's",
        metavar="FOLDER",
    )
    args = parser.parse_args(arguments)
    if not args.into.is_dir():
        print(f"--into: {args.into} is no folder", file=sys.stderr)
        return 1
    if not (SOURCE / "CMakeLists.txt").is_file():
        print(f"{SOURCE} is missing: this is not a source tree; {remedy()}", file=sys.stderr)
        return 1
    if not has_compiler():
        print(f"there is no C++ compiler on the PATH: {remedy()}", file=sys.stderr)
        return 1
    if shutil.which("cmake") is None:
        print("cmake is needed and not on the PATH: pip install cmake", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as build:
        sanitize = f"-DSLIPSTREAM_SANITIZE={'ON' if args.sanitize else 'OFF'}"
        subprocess.run(
            ["cmake", "-S", SOURCE, "-B", build, "-DCMAKE_BUILD_TYPE=Release", sanitize], check=True
        )
        subprocess.run(
            ["cmake", "--build", build, "--parallel", str(os.cpu_count() or 1)], check=True
        )
        (built,) = Path(build).glob("libslipstream_cpu.*")
        target = args.into / built.name
        temporary = target.with_suffix(".new")  # a running process may have the old one mapped
        shutil.copy2(built, temporary)
        temporary.replace(target)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
