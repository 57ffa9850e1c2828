"""Weights that the device does not hold.

    python benchmarks/offload.py --study layers     # layers that are read in each step, beside reading alone
    python benchmarks/offload.py --study experts    # experts that the host computes beside a GPU

`--help` behind a study prints what it does and its options.
"""

from __future__ import annotations

import common

STUDIES = ("layers", "experts")


def main() -> None:
    common.run_case(__doc__, "offload", {"study": STUDIES})


if __name__ == "__main__":
    main()
