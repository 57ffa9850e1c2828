"""Speculative decoding.

    python benchmarks/speculation.py --study speed      # beside plain decoding, in turns; `--forced X`: at a given acceptance

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "speculation", "study")
