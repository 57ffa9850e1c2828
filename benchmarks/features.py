"""What requests may bring: grammars, adapters, pictures.

    python benchmarks/features.py --study grammar             # a token with schemas and without, and a new schema's first mask
    python benchmarks/features.py --study schemas             # schemas taken, refused and wrongly enforced, beside xgrammar
    python benchmarks/features.py --study adapters            # many adapters at many sequences beside none
    python benchmarks/features.py --study adapter-training    # an adapter trained on a small text, and its receipt
    python benchmarks/features.py --study pictures            # pictures a second beside transformers
    python benchmarks/features.py --study picture-training    # a small model trained here: right answers over HTTP

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "features", "study")
