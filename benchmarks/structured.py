"""Grammars and JSON schemas.

    python benchmarks/structured.py --study cost       # a token with schemas and without, and a new schema's first mask
    python benchmarks/structured.py --study schemas    # schemas taken, refused and wrongly enforced, beside xgrammar

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "structured", "study")
