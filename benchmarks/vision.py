"""Models that see.

    python benchmarks/vision.py --study pictures    # pictures a second beside transformers
    python benchmarks/vision.py --study training    # a small model trained here: right answers over HTTP

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "vision", "study")
