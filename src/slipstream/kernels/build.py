"""Build libslipstream_cpu into this package: `python -m slipstream.kernels.build [--sanitize]`.

For source trees that are run without being installed, with the compiler and CMake that are there. `pip install .` does the same
through scikit-build-core.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m slipstream.kernels.build", description=__doc__)
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UndefinedBehaviorSanitizer")
    args = parser.parse_args(arguments)
    package = Path(__file__).parent
    source = package.parents[2] / "csrc" / "cpu"
    if not (source / "CMakeLists.txt").is_file():
        print(
            f"{source} is not there: this is no source tree; `pip install slipstream` brings the library",
            file=sys.stderr,
        )
        return 1
    if shutil.which("cmake") is None:
        print("cmake is needed and not on the PATH: pip install cmake", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as build:
        sanitize = f"-DSLIPSTREAM_SANITIZE={'ON' if args.sanitize else 'OFF'}"
        subprocess.run(["cmake", "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Release", sanitize], check=True)
        subprocess.run(["cmake", "--build", build, "--parallel"], check=True)
        (built,) = Path(build).glob("libslipstream_cpu.*")
        target = package / built.name
        temporary = target.with_suffix(".new")  # a running process may have the old one mapped
        shutil.copy2(built, temporary)
        temporary.replace(target)
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
