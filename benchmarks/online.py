"""A server under load, over HTTP.

    python benchmarks/online.py --study loads          # throughput, first tokens, time a token and worst gaps of several loads
    python benchmarks/online.py --study agents         # sessions of agents, settings in turns, next to the simulator
    python benchmarks/online.py --study cost           # what the server takes of each token and request, without a model
    python benchmarks/online.py --study soak           # a million mixed requests, while the engine is killed again and again
    python benchmarks/online.py --study models         # several models on one device: swaps, kills, streams next to swaps
    python benchmarks/online.py --study fuzz           # hostile requests

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "online", "study")
