"""Costs and gains of compression.

    python benchmarks/compression.py --study recipes        # quality of every recipe; speed of the results
    python benchmarks/compression.py --study fidelity       # what schemes, 8-bit caches and a GPU's kernels cost

`--help` behind a study prints its options. The record is results/compression_<study>.json, of the last fidelity.json.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "compression", "study")
