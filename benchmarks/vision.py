"""Models that see.

    python benchmarks/vision.py --study pictures    # pictures a second beside transformers
    python benchmarks/vision.py --study training    # a small model trained here: right answers over HTTP

`--help` behind a study prints what it does and its options.
"""

from __future__ import annotations

import common

STUDIES = ("pictures", "training")


def main() -> None:
    common.run_case(__doc__, "vision", {"study": STUDIES})


if __name__ == "__main__":
    main()
