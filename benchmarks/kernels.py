"""Single operators against the machine's ceilings.

    python benchmarks/kernels.py --device cpu  --op linear|moe|mla|torch|step
    python benchmarks/kernels.py --device cuda --op linear|moe|moe-tiles|attention|attention-tiles|mla|rows|one-token|lora|power

`--help` behind a device and an op prints that benchmark's options. The record is
benchmarks/results/kernels_<device>_<op>.json.
"""

from __future__ import annotations

import common

OPS = {
    "cpu": ("linear", "moe", "mla", "torch", "step"),
    "cuda": ("linear", "moe", "moe-tiles", "attention", "attention-tiles", "mla", "rows", "one-token", "lora", "power"),
}


def main() -> None:
    every = sorted({op for ops in OPS.values() for op in ops})
    common.run_case(__doc__, "kernels", {"device": tuple(OPS), "op": every})


if __name__ == "__main__":
    main()
