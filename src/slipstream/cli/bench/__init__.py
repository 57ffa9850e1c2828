"""`slipstream bench latency|throughput|serve|folder|roofline`: measures, and prints the definitions
next to every result.

Decoding is greedy and ignores the end of the sequence. Prompts are random token ids and there is no
prefix cache, unless options say otherwise. docs/benchmarking.md explains each number. An option
without effect on the chosen workload or engine is an error, because the result would list it as if
it had been measured."""

from __future__ import annotations

import argparse

from slipstream.cli.bench.folder import add_arguments as add_folder
from slipstream.cli.bench.measurements import finish
from slipstream.cli.bench.offline import add_latency, add_throughput
from slipstream.cli.bench.roofline import add_arguments as add_roofline
from slipstream.cli.bench.roofline import run as run_roofline
from slipstream.cli.bench.serve import add_arguments as add_serve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)
    text = "time to first token and decode step, by batch size"
    add_latency(kinds.add_parser("latency", help=text))
    add_throughput(kinds.add_parser("throughput", help="all requests at once, offline"))
    text = "a CPU's ceilings, and each operator's share of them"
    roofline = kinds.add_parser("roofline", help=text, description=__doc__)
    add_roofline(roofline)
    finish(roofline, run_roofline)
    text = "requests over time, to servers or an engine started here"
    add_serve(kinds.add_parser("serve", help=text))
    text = "whether a folder of `slipstream optimize` keeps here what it promised"
    add_folder(kinds.add_parser("folder", help=text))
