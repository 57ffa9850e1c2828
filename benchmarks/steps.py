"""Single steps of an engine.

    python benchmarks/steps.py --study scheduler    # `schedule()` and `update()` of decodes, without a model
    python benchmarks/steps.py --study hits         # the host's part of prompts that are cached, without a model
    python benchmarks/steps.py --study beams        # the same of beam search, with the choice of its beams

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "steps", "study")
