"""Gains of memory: cached prefixes, and models that are larger than it.

    python benchmarks/memory.py --study tiers      # a prompt found in the host's memory or on a disk over computing it

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "memory", "study")
