"""Single operators against the machine's ceilings.

    python benchmarks/kernels.py --device cpu  --op linear|moe|mla|torch|step
    python benchmarks/kernels.py --device cuda --op linear|moe|mxfp4|mla|rows|one-token|lora|power
    python benchmarks/kernels.py --device cuda --op attention|attention-decode

`--help` behind a device and an op prints that benchmark's options. The record is
benchmarks/results/kernels_<device>_<op>.json.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "kernels", "device", "op")
