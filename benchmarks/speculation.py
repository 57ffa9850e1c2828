"""Speculative decoding.

    python benchmarks/speculation.py --study speed      # beside plain decoding, in turns; `--forced X`: at a given acceptance
    python benchmarks/speculation.py --study arrivals   # at a given acceptance, while requests arrive at random (GPU)
    python benchmarks/speculation.py --study answers    # greedy answers with each proposer and without, token by token
    python benchmarks/speculation.py --study stages     # where a speculating step's time goes (GPU)
    python benchmarks/speculation.py --study head       # trains a draft head and keeps its receipt

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "speculation", "study")
