"""Single operators against the machine's ceilings.

    python benchmarks/kernels.py --device cpu  --op linear|step
    python benchmarks/kernels.py --device cuda --op linear|weights|attention|int4|one-token|recurrent

`--help` behind a device and an op prints that benchmark's options. The record is
benchmarks/results/kernels_<device>_<op>.json.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "kernels", "device", "op")
