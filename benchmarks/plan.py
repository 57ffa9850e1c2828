"""Predictions against measurements.

    python benchmarks/plan.py --study steps             # what steps take here: the table that `slipstream plan` reads
    python benchmarks/plan.py --study prediction        # the simulator against loads drawn at random, or recorded ones
    python benchmarks/plan.py --study optimizer         # the front that `slipstream optimize` finds, over the whole

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "plan", "study")
