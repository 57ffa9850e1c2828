"""Runs mypy beside the tests, which wait a third of their time. Wrong types end the tests.

python .ci/together.py [PYTEST ARGUMENTS]
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

MYPY = Path(__file__).parents[1] / ".venv" / "bin" / "mypy"


def main() -> int:
    with tempfile.TemporaryFile() as said:
        types = subprocess.Popen([MYPY], stdout=said, stderr=subprocess.STDOUT)
        tests = subprocess.Popen([sys.executable, "-m", "pytest", *sys.argv[1:]])
        try:
            if wrong := types.wait():
                tests.send_signal(signal.SIGINT)
            failed = tests.wait()
        except KeyboardInterrupt:  # they have it, too
            wrong, failed = types.wait(), tests.wait()
        said.seek(0)
        print(said.read().decode(), end="", flush=True)
        return wrong or failed


if __name__ == "__main__":
    sys.exit(main())
