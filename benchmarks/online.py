"""A server under load, over HTTP.

    python benchmarks/online.py --study loads          # throughput, first tokens, time a token and worst gaps of several loads
    python benchmarks/online.py --study connections    # what idle connections and slow readers cost the others

`--help` behind a study prints what it does and its options.
"""

import common

if __name__ == "__main__":
    common.run_case(__doc__, "online", "study")
