"""Weights that the device does not hold.

    python benchmarks/offload.py --study layers     # layers that are read in each step, beside reading alone
    python benchmarks/offload.py --study experts    # experts that the host computes beside a GPU

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "offload", "study")
