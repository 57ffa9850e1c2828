"""Adapters.

    python benchmarks/lora.py --study decode      # many adapters at many sequences beside none; the time to load one
    python benchmarks/lora.py --study training    # an adapter trained on a small text, and its receipt

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "lora", "study")
