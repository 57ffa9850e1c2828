"""A fleet: its gateway, its router, its autoscaler, its detector.

    python benchmarks/fleet.py --study serving      # what the gateway costs, and what clients see while replicas are killed
    python benchmarks/fleet.py --study chunks       # the gateway's processor time for an event of a stream
    python benchmarks/fleet.py --study routing      # the router alone: prefix hits, balance, time of a decision
    python benchmarks/fleet.py --study autoscale    # the autoscaler beside others' rules and an oracle, over a recorded trace
    python benchmarks/fleet.py --study detection    # injected faults over replayed days: found, named, how soon
    python benchmarks/fleet.py --study nab          # the detector's series on the Numenta Anomaly Benchmark

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "fleet", "study")
