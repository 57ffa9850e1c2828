"""Whole engines on one device, in process.

    python benchmarks/engine.py --study table       # one GPU, model shape and scheme: start, latency, loads
    python benchmarks/engine.py --study families    # every family on a GPU, as shares of its bounds
    python benchmarks/engine.py --study ready       # starts with no kernels, with built ones, warm; the first load
    python benchmarks/engine.py --study wheel       # from a wheel to an answer in a bare environment
    python benchmarks/engine.py --study versions    # two versions of Slipstream on a CPU, in turns
    python benchmarks/engine.py --study long        # long contexts on a GPU: steps, prompts, few tokens after cached ones
    python benchmarks/engine.py --study first-uses  # streams' gaps beside the first and the second use of each feature
    python benchmarks/engine.py --study deterministic  # deterministic on a GPU: bits kept, and its price in turns
    python benchmarks/engine.py --study update-ipc  # all weights sent by CUDA IPC to an engine on a GPU

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "engine", "study")
