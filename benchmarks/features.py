"""Features of requests: grammars, adapters, pictures.

    python benchmarks/features.py --study grammar             # a token with schemas and without, and a new schema's first mask
    python benchmarks/features.py --study masks               # masks next to the forward of a GPU: checks, threads, tokens/s
    python benchmarks/features.py --study adapters            # many adapters at many sequences beside none
    python benchmarks/features.py --study pictures            # pictures a second beside transformers

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "features", "study")
