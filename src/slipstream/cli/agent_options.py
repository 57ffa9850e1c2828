"""Options of the agents' load, shared by `bench serve` and `plan`: one for each field of `AgentLoad`."""

from __future__ import annotations

import argparse
from typing import Any

from slipstream.bench.sessions import LOAD_HELP, AgentLoad, Draw, parse_load
from slipstream.cli.parser import Rare

AGENT_OPTIONS = tuple(LOAD_HELP)
COMMON = ("sessions", "max_context", "turns", "pause")
"""Options that `--help` shows; `--help-all` shows the others."""


def add_agent_options(parser: argparse._ActionsContainer) -> None:
    usual = AgentLoad()
    for name, text in LOAD_HELP.items():
        default = getattr(usual, name)
        kind: Any = {
            "sessions": int,
            "max_context": int,
            "system_tokens": int,
            "subagent_rate": float,
        }
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=kind.get(name, str),
            default=argparse.SUPPRESS,
            metavar="D" if isinstance(default, Draw) else "X" if name == "subagent_rate" else "N",
            help=text + shown if name in COMMON else Rare(text + shown),
        )


def agent_load(args: argparse.Namespace) -> AgentLoad:
    """Load that the options describe."""
    return parse_load({name: getattr(args, name) for name in AGENT_OPTIONS if hasattr(args, name)})


AGENTS_TITLE = "sessions of --workload agents (D: a mean, fixed:N, uniform:A-B, exponential:MEAN or lognormal:MEAN:SIGMA)"


def given_agent_options(args: argparse.Namespace) -> list[str]:
    return [name for name in AGENT_OPTIONS if hasattr(args, name)]
