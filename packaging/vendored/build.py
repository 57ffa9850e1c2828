"""Builds the JavaScript that the pages ship, from the locked packages, and compares it with `checksums`.

    python packaging/vendored/build.py            compare: each file that is built equals the shipped one
    python packaging/vendored/build.py --write    write the shipped files and `checksums`

Needs npm. To take a newer package, change package.json, run `npm install --package-lock-only
--omit-lockfile-registry-resolved` in this folder, and then this script with `--write`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHECKSUMS = HERE / "checksums"
"""SHA-256 and path of each shipped file, as `sha256sum` writes them."""


def shipped() -> dict[str, str]:
    """SHA-256 of each shipped file, by its path in the repository."""
    lines = CHECKSUMS.read_text().splitlines()
    return {path: digest for digest, path in (line.split("  ") for line in lines)}


def main() -> int:
    writes = sys.argv[1:] == ["--write"]
    found, differing = dict[str, str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for source in (*HERE.glob("*.js"), *HERE.glob("package*.json")):
            shutil.copy(source, folder)
        for step in (["ci", "--no-audit", "--no-fund", "--ignore-scripts"], ["run", "-s", "build"]):
            subprocess.run(["npm", *step], cwd=folder, check=True)
        for path, digest in shipped().items():
            built = Path(folder) / Path(path).name
            found[path] = hashlib.sha256(built.read_bytes()).hexdigest()
            if found[path] != digest:
                differing.append(path)
            if writes:
                shutil.copy(built, ROOT / path)
    if writes:
        CHECKSUMS.write_text("".join(f"{digest}  {path}\n" for path, digest in found.items()))
    elif differing:
        print(f"built otherwise: {', '.join(differing)}; --write takes them", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
