"""A fleet: its gateway, its router, its autoscaler, its detector.

    python benchmarks/fleet.py --study serving      # what the gateway costs, and what clients see while replicas are killed
    python benchmarks/fleet.py --study phases       # prompts and answers on the same replicas, and apart
    python benchmarks/fleet.py --study detection    # injected faults over replayed days: found, named, how soon
    python benchmarks/fleet.py --study thousand     # a thousand simulated replicas

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "fleet", "study")
