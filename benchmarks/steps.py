"""Single steps of an engine.

    python benchmarks/steps.py --study scheduler    # `schedule()` and `update()` of decodes, without a model

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "steps", "study")
