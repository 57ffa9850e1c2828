"""Exit codes, errors and --json, whatever the verb."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream import __version__, errors
from slipstream.cli import main as cli
from slipstream.cli.bench.measurements import deliver
from slipstream.cli.console import print_json
from slipstream.cli.main import main
from slipstream.cli.options import ENGINE_HELP, SAMPLING_HELP
from slipstream.cli.serving import serve, serve_several


@pytest.fixture
def fails_with(monkeypatch):
    """Make `slipstream doctor` raise an error."""

    def make(error):
        def handler(args):
            raise error

        monkeypatch.setattr("slipstream.cli.doctor.run", handler)

    return make


def test_version_is_printed_with_exit_code_0(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_module_runs_as_a_program():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run(
        [sys.executable, "-m", "slipstream", "--version"], env=env, capture_output=True, check=True
    )
    assert result.stdout.decode().split() == ["slipstream", __version__]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x", field="dtype"), 2),
        (errors.ContextLengthError("x", field="prompt"), 2),
        (errors.UnsupportedModelError("x"), 3),
        (errors.CheckpointError("x"), 3),
        (errors.DownloadError("x"), 3),
        (errors.OutOfMemoryError("x"), 1),
        (errors.EngineDeadError("x"), 1),
        (RuntimeError("x"), 1),
    ],
)
def test_each_kind_of_error_has_its_exit_code(fails_with, capsys, error, code):
    fails_with(error)
    assert main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1  # one clear line
    assert "Traceback" not in err
    assert main(["doctor", "--json"]) == code
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["type"] == type(error).__name__
    assert told["field"] == getattr(error, "field", None)


def _safetensors_error(text):
    return type("SafetensorError", (Exception,), {})(text)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "a file could not be written: No space left on device",
        ),
        (OSError(errno.EROFS, "Read-only file system", "out/x"), "out/x: Read-only file system"),
        (
            PermissionError(errno.EACCES, "Permission denied", "from", None, "to"),
            "to: Permission denied",
        ),
        (
            _safetensors_error("I/O error: full (os error 28)"),
            "a file could not be written: No space left on device",
        ),
    ],
)
def test_what_a_disk_refuses_is_no_internal_error(fails_with, capsys, error, told):
    fails_with(error)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == f"slipstream: {told}\n"


@pytest.mark.parametrize(
    "error",
    [OSError("of no number"), OSError(errno.EBADF, "x"), _safetensors_error("header too large")],
)
def test_other_errors_of_files_are_internal(fails_with, capsys, error):
    fails_with(error)
    assert main(["doctor"]) == 1
    assert "internal error" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_one_json_object(capsys):
    given = argparse.Namespace(json=True, output="/dev/full")
    with pytest.raises(errors.ConfigError, match="cannot write /dev/full: No space left"):
        deliver(given, {"a": 1})
    assert capsys.readouterr().out == ""  # the error will be the object


def test_json_that_the_disk_has_no_room_for_goes_to_standard_error(monkeypatch, capsys):
    monkeypatch.setattr("slipstream.cli.doctor.run", lambda args: print_json({"measured": 1}) or 0)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["doctor", "--json"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert json.loads(told[0]) == {"measured": 1}
    assert told[1].startswith(
        "slipstream: cannot write to standard output: No space left on device; its line is above"
    )
    assert len(told) == 2


def test_an_error_that_the_disk_has_no_room_for_is_told(fails_with, monkeypatch, capsys):
    fails_with(errors.ConfigError("x"))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["doctor", "--json"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert (told[0], json.loads(told[1])["error"]["message"]) == ("slipstream: x", "x")


def test_notes_are_told(fails_with, capsys):
    error = errors.RequestError("too long")
    error.add_note("in prompt 3 of 5")
    fails_with(error)
    main(["doctor"])
    assert capsys.readouterr().err == "slipstream: too long; in prompt 3 of 5\n"


@pytest.mark.parametrize("words", [["--debug", "doctor"], ["doctor", "--debug"]])
def test_debug_shows_the_traceback(fails_with, capsys, words):
    fails_with(errors.ConfigError("x"))
    assert main(words) == 2
    assert "Traceback" in capsys.readouterr().err


def test_words_after_a_lone_dash_dash_are_no_options_of_the_command(
    fails_with, capsys, monkeypatch
):
    taken = {}
    monkeypatch.setattr(
        "slipstream.cli.answers.run.run", lambda args: taken.update(vars(args)) or 0
    )
    assert main(["run", "smollm2", "--", "--debug"]) == 0
    assert taken["debug"] is False
    assert taken["words"] == ["smollm2", "--debug"]


def test_an_interrupt_with_json_is_one_object(fails_with, capsys):
    fails_with(KeyboardInterrupt())
    assert main(["doctor", "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "Interrupted"


def test_a_mistyped_option_gets_a_hint_and_is_never_guessed(capsys):
    assert main(["run", "--max-tokns", "5", "hi"]) == 2
    assert "did you mean --max-tokens?" in capsys.readouterr().err
    assert main(["run", "--max-token", "5", "hi"]) == 2


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["serv", "x"], "serve"),
        (["compres", "x"], "compress"),
        (["bench", "latnecy", "x"], "latency"),
        (["bench", "throughput", "x", "--workload", "shared-prefx"], "shared-prefix"),
        (["--max-tokns=5", "doctor"], "--max-tokens"),
        (["info", "x", "--max-model-length", "5"], "--max-model-len"),
        (["serve", "x", "--swap-space", "4"], "--kv-host-bytes"),
        (["chat", "--n-ctx=4096"], "--max-model-len"),
        (["serve", "x", "-c", "4096"], "--max-model-len"),
        (["serve", "x", "--draft-model", "y"], "--speculative-model"),
    ],
)
def test_a_misspelt_argument_is_answered_with_the_likely_one(capsys, words, meant):
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


@pytest.mark.parametrize("words", [["frobnicate"], ["run", "x", "--n", "2"]])
def test_what_is_like_nothing_gets_no_hint(capsys, words):
    assert main(words) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["bench", "serve"], ["bench", "latency"], ["compress-prompt"], ["serve"]]
)
def test_the_usage_of_many_options_is_a_line(capsys, words):
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    usage, *more = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert usage.endswith(" [options]")
    assert usage.count("TEXT") <= 1
    assert not more


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--trust-remote-code"],
            "--trust-remote-code; leave it out: a checkpoint's own code is never run",
        ),
        (
            ["-ngl", "99"],
            "-ngl 99; leave it out: a GPU holds all but cpu_layers; without a GPU the CPU computes all (device='cuda' refuses)",
        ),
        (
            ["--data-parallel-size", "2"],
            "(docs/fleet.md); expert_parallel_size alone distributes requests",
        ),
        (["-m", "y"], "-m y; the model stands without it: slipstream serve MODEL"),
        (["--model=y"], "--model=y; the model stands without it: slipstream serve MODEL"),
        (["--enable-prefix-caching=true"], "ignored explicit argument 'true'; it takes no value"),
    ],
)
def test_an_option_that_is_not_missed_is_answered_with_why(capsys, words, told):
    assert main(["serve", "x", *words]) == 2
    assert capsys.readouterr().err.endswith(f"{told}\n")


def test_every_verb_is_listed_with_its_file():
    from slipstream.cli import __path__

    top, folder = "agent_options console main models options parser", Path(__path__[0])
    others = {
        *top.split(),
        "answers.answer",
        "answers.terminal",
        "serving.fleet_simulation",
        "serving.running",
        "serving.serve_several",
    }
    paths = [f.relative_to(folder) for f in folder.rglob("*.py") if f.name != "__init__.py"]
    files = {".".join(path.with_suffix("").parts) for path in paths}
    modules = {module for module, _ in cli.VERBS.values()}
    assert {m for m in modules if not m.startswith("bench")} == {
        f for f in files - others if not f.startswith("bench.")
    }
    assert {m for m in modules if m.startswith("bench")} == {"bench", "bench.sweep"}


def test_an_interrupt_has_exit_code_130(fails_with):
    fails_with(KeyboardInterrupt())
    assert main(["doctor"]) == 130


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["frob"],
        ["run"],
        ["run", "x", "--no-such-option"],
        ["pull", "smollm2", "word"],
        ["bench"],
        ["run", "x", "--max-tokens", "few"],
    ],
)
def test_wrong_words_exit_with_2_and_a_line_of_usage(capsys, words):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: slipstream")
    assert err.count("\n") == 2, "a line of usage, a line of the error"
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "UsageError"


@pytest.mark.parametrize(
    ("words", "whose"),
    [
        (["run", "x", "--no-such-option"], "slipstream run"),
        (["pull", "smollm2", "more"], "slipstream pull"),
        (["bench", "latency", "x", "-n", "5"], "slipstream bench latency model"),
        (["--no-such-option", "run", "x"], "slipstream"),
    ],
)
def test_what_a_verb_does_not_know_brings_its_own_usage(capsys, words, whose):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: {whose} [")
    assert "unrecognized arguments: " in err


def test_a_usage_of_several_lines_is_cut_and_names_the_help(capsys):
    assert main(["doctor", "--no-such-option"]) == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.endswith(" … (--help shows all)")
    assert error.startswith("slipstream: ")


def test_a_closed_pipe_is_quiet():
    """`slipstream … | head -0`"""
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "slipstream", "doctor", "--json"]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=env, check=False)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.parametrize(
    "verb", ["run", "chat", "serve", "pull", "info", "doctor", "bench", "bench serve"]
)
def test_help_of_every_verb(capsys, verb):
    with pytest.raises(SystemExit) as end:
        main([*verb.split(), "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "usage: slipstream " + verb in out
    assert verb == "bench" or "--json" in out


MANY = ("serve", "bench serve", "bench latency", "plan", "run", "chat", "info", "build")


@pytest.mark.parametrize("verb", MANY)
def test_help_shows_at_most_60_options_and_help_all_the_rest(capsys, verb):
    def shown(option):
        with pytest.raises(SystemExit) as end:
            main([*verb.split(), option])
        assert end.value.code == 0
        return re.findall(r"^  (-[^ ,]+)", capsys.readouterr().out, re.MULTILINE)

    few, all_ = shown("--help"), shown("--help-all")
    assert len(few) <= 60
    assert "--help-all" in few
    assert len(all_) >= len(few) + 10
    assert set(few) < set(all_)
    for flag in ("--kernels", "--dense-copies", "--local-ranks", "--sequence-parallel"):
        assert flag not in few
        assert flag in all_


def test_options_that_help_leaves_out_are_taken():
    words = ["serve", "x", "--kernels", "cpu", "--max-body-bytes", "1MiB", "--block-size", "32"]
    args = cli.build_parser(["serve"]).parse_args(words)
    assert (args.kernels, args.max_body_bytes, args.block_size) == ("cpu", 2**20, 32)


def test_help_keeps_paragraphs_and_commands_apart(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    lines = capsys.readouterr().out.splitlines()
    examples = [line for line in lines if line.startswith("    slipstream verify http")]
    assert len(examples) == 2
    assert any(line.startswith("Any server that speaks") for line in lines)


def test_help_of_audit_names_the_export_and_its_file(capsys):
    assert "export" in next(
        line for line in cli.build_parser().format_help().splitlines() if "  audit " in line
    )
    with pytest.raises(SystemExit):
        main(["audit", "export", "--help"])
    assert "--audit-log" in capsys.readouterr().out


def test_help_lists_the_exit_codes():
    text = " ".join(cli.build_parser().format_help().split())
    for code in ("0 done", "1 failed", "2 wrong argument", "3 model", "130 interrupted"):
        assert code in text


def test_a_verb_of_one_model_says_so(capsys):
    assert main(["info", "smollm2", "qwen3:0.6b"]) == 2
    assert "takes one model (slipstream serve takes several)" in capsys.readouterr().err


def test_the_usage_of_many_options_names_those_that_are_needed(capsys):
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    assert capsys.readouterr().out.startswith("usage: slipstream verify --against MODEL [url]")


def _actions(parser, verb=""):
    """(verb, its actions) of each verb and kind of a verb."""
    parser._complete()
    kinds = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    yield verb, [a for a in parser._actions if a not in kinds and a.dest != "help"]
    for name, inner in (pair for kind in kinds for pair in kind.choices.items()):
        yield from _actions(inner, f"{verb} {name}".strip())


def _spelled(action):
    """An option as options.txt has it: names, whether it is needed, how many values, default, choices."""
    values = "" if action.nargs is None else f"[{action.nargs}]"
    default = "" if action.default in (None, argparse.SUPPRESS) else f"={action.default}"
    choices = "" if action.choices is None else f"({','.join(map(str, action.choices))})"
    kind = type(action).__name__.strip("_").removesuffix("Action")
    kind = "" if kind in ("Store", "StoreTrue", "HelpAll") else f":{kind}"
    needed = "!" * action.required if action.option_strings else ""
    names = ",".join(action.option_strings) or action.dest
    return f"{names}{needed}{values}{default}{choices}{kind}".replace(" ", "_")


def test_each_verb_takes_the_options_that_the_table_says():
    """A line a verb of options.txt: how many options of the engine, of sampling and of other engines it takes; its own, and
    those of the engine and of sampling with a default of its own."""
    shared = [
        {f"--{name}".replace("_", "-") for name in told} for told in (ENGINE_HELP, SAMPLING_HELP)
    ]
    shared[0] |= {name.replace("--", "--no-", 1) for name in shared[0]}
    lines = []
    for verb, actions in _actions(cli.build_parser()):
        counts = [sum(bool(set(a.option_strings) & names) for a in actions) for names in shared]
        counts.append(sum(isinstance(a, serve._Taken) for a in actions))
        some = shared[0] | shared[1]
        own = [
            a
            for a in actions
            if not isinstance(a, serve._Taken)
            and not (set(a.option_strings) & some and a.default in (None, argparse.SUPPRESS))
        ]
        lines.append(f"{verb} {counts}: {' '.join(map(_spelled, own))}")
    assert lines == (Path(__file__).parent / "options.txt").read_text().splitlines()


def test_help_names_the_number_that_is_an_options_default():
    checked = 0
    named = [(verb, a) for verb, some in _actions(cli.build_parser()) for a in some]
    for verb, action in named:
        if "(default: " not in (action.help or ""):
            continue
        told = (action.help % vars(action)).partition("(default: ")[2]
        if isinstance(action.default, (int, float)) and not isinstance(action.default, bool):
            number = re.match(r"[\d.]+(?:e-?\d+)?", told)[0]
            assert float(number) == action.default, (verb, action.option_strings)
            checked += 1
    assert checked > 30


def test_a_models_state_is_noted_as_soon_as_it_changes(monkeypatch):
    written = []
    monkeypatch.setattr(
        serve_several, "register", lambda pid, **note: written.append(note["states"])
    )
    slot = SimpleNamespace(name="a", state="loading", facts=lambda: slot.state)
    slots = SimpleNamespace(slots={"a": slot}, held_bytes=0)
    notes = serve_several._Notes(slots, "url", "device", 1)
    notes.later()
    slot.state = "loaded"
    notes.later()
    assert written == [["loading"], ["loaded"]]
