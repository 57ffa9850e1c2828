"""What is predicted, against what is measured.

    python benchmarks/plan.py --study steps             # what steps take here: the table that `slipstream plan` reads
    python benchmarks/plan.py --study prediction        # the simulator against loads drawn at random, or recorded ones
    python benchmarks/plan.py --study processor-time    # the same on a busy machine, by the processor's time
    python benchmarks/plan.py --study recommendation    # what `plan` would choose of a grid, against the best of it
    python benchmarks/plan.py --study optimizer         # the front that `slipstream optimize` finds, over the whole
    python benchmarks/plan.py --study worlds            # the same search in worlds that are made up
    python benchmarks/plan.py --study simulator         # how fast a million requests are simulated
    python benchmarks/plan.py --study aiconfigurator    # AIConfigurator's estimates of the recorded loads, beside ours

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "plan", "study")
