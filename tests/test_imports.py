"""Allowed imports between packages (DESIGN §3 and §10), read from the source; no circle of
imports; the modules that `slipstream --help` loads.

Imports inside functions count like those at the top: they tie parts together just the same. Those under `if
TYPE_CHECKING:` do not, since nothing is imported when the program runs. A public name (`from slipstream import LLM`) counts as
its module.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Set
from functools import cache
from pathlib import Path

import pytest

import slipstream

SRC = Path(__file__).parents[1] / "src"
FILES = {
    ".".join(f.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): f
    for f in sorted((SRC / "slipstream").rglob("*.py"))
}

PUBLIC = {f"slipstream.{name}": module for name, module in slipstream._PUBLIC.items()}
ORDER = (
    *("errors", "base", "spec", "params", "outputs", "config", "hub", "costs", "messages"),
    *("platform", "kernels", "model", "core", "worker", "engine", "server", "frontend"),
    *("conformance", "bench", "simulate"),
    *("fleet", "evals", "verify", "compress", "optimize", "cli", "__main__"),
)
"""The parts of the package, from the ground up: each imports only parts before it.

`simulate` stands below `fleet`: the autoscaler asks it what a replica carries, and the simulated
fleet (`fleet/simulation`) runs on its step times. So does `bench`, whose loads `simulate` plays.
"""

BASE = ORDER[: ORDER.index("platform")]
NARROW = {  # part: what it may import of the parts before it, where that is not all of them
    "platform": BASE,
    "kernels": ("errors", "base.priority", "spec", "platform"),
    "model": ("errors", "base", "spec", "platform", "kernels"),
    "core": BASE,
    "worker": (*BASE, "platform", "kernels", "model"),  # it is handed plans, and never sees core
    "engine": (*BASE, "core", "worker.executor"),
    "server": (*BASE, "engine"),
    "frontend": (*BASE, "engine", "server"),
    "conformance": ("errors",),  # it asks over HTTP, as any client does
    "bench": (*BASE, "engine.llm", "engine.async_llm"),  # the public names LLM and AsyncLLM
    "simulate": (*BASE, "core", "bench", "server.many.models", "server.many.slot"),
    "fleet": (
        *(*BASE, "core.cache.prefix_cache", "core.cache.block_pool"),
        *("engine", "server", "bench", "simulate"),
    ),
    "__main__": ("cli",),
}
HEAVY = {  # third-party package: the parts that may import it
    "torch": (
        *("platform", "kernels", "model", "worker", "evals", "verify", "compress"),
        "bench.adapters.transformers",
    ),
    "triton": ("platform", "kernels.triton"),
    "transformers": ("bench.adapters.transformers",),
    "datasets": ("evals.text",),
    "pyarrow": ("bench.sweep.results",),
    "optuna": ("optimize.search",),
    "lm_eval": ("evals.tasks", "evals.lm_eval_adapter"),
    "starlette": ("server", "fleet"),
    "ray": ("fleet.replicas.on_ray",),
    "cryptography": ("fleet.certificates",),
    "grpc": ("server.kserve.grpc_server",),
    "opentelemetry": ("server.operations.telemetry",),
    "google": ("server.kserve.messages",),
    "uvicorn": ("server", "fleet"),
    "river": ("fleet.detection.signals",),
}
TORCH_FREE = (
    *(*BASE, "core", "kernels.build", "evals.text", "engine.context", "compress.steps", "cli"),
    *(
        "kernels.layouts",
        "kernels.tracing.recording",
        "kernels.cpu.program.lowering",
        "kernels.cpu.program.emitter",
        "kernels.tracing.token_shape",
    ),
    *(
        "kernels.cpu.native",
        "kernels.cpu.program.native_program",
        "kernels.cpu.packed",
        "kernels.weights.forms",
        "kernels.metadata",
        "kernels.cpu.program.programs",
        "kernels.cpu.sampling.sampling",
        "kernels.cpu.host_ops",
    ),
    *(
        "kernels.positions",
        "kernels.cpu.program.moe",
        "kernels.cpu.program.mla",
        "kernels.cpu.packed_file",
    ),
    *(
        "model.layers",
        "model.encoder",
        "model.decoder",
        "model.trace",
        "model.step_program",
        "model.load.host_model",
    ),
    *(
        "model.load.checkpoint",
        "model.load.loaded",
        "model.stored.gguf_quants",
        "model.stored.gguf_blocks",
        "model.load.packed_cache",
    ),
    *(
        "worker.executor",
        "worker.local_executor",
        "worker.start.loading",
        "worker.start.sizing",
        "worker.forward.forward_paths",
        "worker.host_loading",
        "worker.loaded_runner",
        "worker.model_runner",
        "worker.forward.base",
        "worker.forward.program",
        "worker.draft.model",
    ),
    *(
        "worker.inputs.rows",
        "worker.inputs.input_batch",
        "worker.inputs.text_inputs",
        "worker.sampling.sampler",
        "worker.in_flight",
        "worker.device",
    ),
    *("worker.tiers.block_store", "worker.tiers.disk_tier", "worker.tiers.opening"),
    *(
        "worker.start.cpu_choice",
        "worker.start.canary",
        "worker.sampling.constrained",
        "engine",
        "server",
        "frontend",
    ),
    "fleet",
)
CIRCLES: dict[tuple[str, ...], str] = {}  # of imports that are left, to be removed: why


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> frozenset[str]:
    """The modules that a file imports when it runs, at the top or in a function."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(
                name if name in FILES else PUBLIC.get(name, str(node.module)) for name in whole
            )
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            children: list[ast.AST] = [*node.orelse]
        elif isinstance(node, ast.expr):
            return  # no statement is in an expression
        else:
            children = [*ast.iter_child_nodes(node)]
        for child in children:
            visit(child)

    visit(parsed(path))
    return frozenset(found)


def is_in(module: str, parts: tuple[str, ...]) -> bool:
    return any(module == part or module.startswith(part + ".") for part in parts)


def part_of(module: str) -> str:
    return module.split(".")[0]


def may_import(own: str, other: str) -> bool:
    part, of = part_of(own), part_of(other)
    if part == of:
        return True
    return ORDER.index(of) < ORDER.index(part) and is_in(other, NARROW.get(part, ORDER))


def forbidden(module: str, names: Set[str]) -> list[tuple[str, str]]:
    """Returns (module, what it imports) for each import that breaks a rule."""
    own = module.removeprefix("slipstream.")
    found = []
    for name in sorted(names):
        if name.startswith("slipstream."):
            other = name.removeprefix("slipstream.")
            if not may_import(own, other):
                found.append((own, other))
        elif name.split(".")[0] in HEAVY and not is_in(own, HEAVY[name.split(".")[0]]):
            found.append((own, name))
    return found


def test_every_part_of_the_package_stands_in_the_order():
    parts = {part_of(name.removeprefix("slipstream.")) for name in FILES} - {"slipstream"}
    assert parts == set(ORDER)


def test_a_module_imports_only_what_it_may():
    wrong = [
        pair
        for name, file in FILES.items()
        if name != "slipstream"
        for pair in forbidden(name, imported(file))
    ]
    assert not wrong


OWN_TORCH = {
    "bench.adapters.transformers": {
        "cuda": "it measures another engine, and has only torch for it"
    },
    "worker.start.diagnosis": {"version": "it shows what torch was built for"},
    "kernels.cpu.torch_ops": {"backends": "it asks for the library that it calls, on a CPU"},
    "kernels.triton.cuda": {"version": "which NVRTC came with torch"},
}
"""Attributes of torch that say what a device can do, or the build, and why a module reads them."""


def read_of_torch(file: Path) -> set[str]:
    nodes = (
        n
        for n in ast.walk(parsed(file))
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
    )
    return {n.attr for n in nodes if n.value.id == "torch"} & {"cuda", "version", "backends"}


def test_only_the_platform_asks_torch_about_a_gpu():
    """DESIGN §10: one object a device kind has streams, events, graphs, memory and capabilities."""
    found: dict[str, set[str]] = {}
    for module, file in FILES.items():
        own, text = module.removeprefix("slipstream."), file.read_text(encoding="utf-8")
        if is_in(own, ("platform",)) or not any(
            f"torch.{name}" in text for name in ("cuda", "version", "backends")
        ):
            continue  # all files' nodes would take a while
        read = read_of_torch(file) | {
            name for name in ("cuda", "backends") if f"torch.{name}" in imported(file)
        }
        if read:
            found[own] = read
    assert found == {own: set(why) for own, why in OWN_TORCH.items()}


def test_the_engine_asks_an_executor_and_not_what_is_behind_it():
    """DESIGN §10: another executor has its model in other processes."""
    files = {
        module: file
        for module, file in FILES.items()
        if is_in(module, ("slipstream.core", "slipstream.engine"))
    }
    found = {
        m
        for m, f in files.items()
        for n in ast.walk(parsed(f))
        if isinstance(n, ast.Attribute) and n.attr == "runner"
    }
    assert found == set()


def circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """The strongly connected components of more than one module (Tarjan 1972), sorted; and modules that import themselves."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], index[other])
        if lowest[node] == index[node]:
            i = stack.index(node)
            component = tuple(sorted(stack[i:]))
            del stack[i:]
            if len(component) > 1 or node in graph.get(node, ()):
                found.append(component)

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_no_circle_of_imports():
    """Imports inside functions count."""
    graph = {
        module: {n for n in imported(file) if n in FILES and n != module}
        for module, file in FILES.items()
    }
    found = {tuple(m.removeprefix("slipstream.") for m in circle) for circle in circles(graph)}
    assert not found - CIRCLES.keys()
    assert not CIRCLES.keys() - found, "delete these from CIRCLES"


def test_circles_are_found():
    graph = {
        "a": {"b"},
        "b": {"c"},
        "c": {"a", "d"},
        "d": {"e"},
        "e": set(),
        "f": {"g"},
        "g": {"f", "a"},
        "h": {"h"},
    }
    assert sorted(circles(graph)) == [("a", "b", "c"), ("f", "g"), ("h",)]


def test_the_rules_can_fail(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import numpy\n"
        "def f():\n    import torch.nn\n    from slipstream.worker import device\n    from slipstream import LLM, errors\n"
    )
    found = imported(file)
    loaded = {"slipstream.worker.device", "slipstream.engine.llm", "slipstream.errors"}
    assert found == {"typing", "numpy", "torch.nn", *loaded}
    assert forbidden("slipstream.server.app", found) == [
        ("server.app", "worker.device"),
        ("server.app", "torch.nn"),
    ]
    assert forbidden("slipstream.core.scheduler", found) == [
        *(("core.scheduler", other) for other in ("engine.llm", "worker.device", "torch.nn"))
    ]
    assert forbidden("slipstream.errors", {"slipstream.messages.steps"}) == [
        ("errors", "messages.steps")
    ]
    assert forbidden("slipstream.bench.load", {"slipstream.engine.engine_core"}) == [
        ("bench.load", "engine.engine_core")
    ]


def run_python(program: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), *(p for p in sys.path if p)])}
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_torch_free_modules_load_no_torch():
    modules = [name for name in FILES if is_in(name.removeprefix("slipstream."), TORCH_FREE)]
    for module in (
        "core.scheduler",
        "costs.memory",
        "config.resolver",
        "spec.devices.autotune_table",
        "cli.serving.serve",
    ):
        assert f"slipstream.{module}" in modules
    assert (
        run_python(f"import sys, {', '.join(modules)}; print('torch' in sys.modules)") == "False\n"
    )


def test_import_slipstream_and_help_load_nothing_heavy():
    program = """
import sys
import slipstream
from slipstream.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
heavy = {"torch", "numpy", "tokenizers", "transformers", "rich", "httpx", "starlette", "uvicorn", "msgspec", "zmq"}
print(sorted(heavy & set(sys.modules)))
print(sorted(name for name in sys.modules if name.startswith("slipstream")))
"""
    *_, heavy, ours = run_python(program).splitlines()
    assert heavy == "[]"
    own = ("", ".cli", ".cli.main", ".cli.parser", ".errors")
    assert ours == str([f"slipstream{name}" for name in own])


def test_the_help_of_the_engines_options_loads_nothing_heavy():
    program = """
import sys
from slipstream.cli.main import main
for verb in ("run", "serve", "plan", "compress"):
    try:
        main([verb, "--help"])
    except SystemExit as end:
        assert end.code == 0
heavy = {"torch", "numpy", "tokenizers", "transformers", "rich", "httpx", "starlette", "uvicorn", "msgspec", "zmq"}
print(sorted(heavy & set(sys.modules)))
"""
    assert run_python(program).splitlines()[-1] == "[]"


def test_a_report_needs_an_engine_only_for_speed_and_tasks():
    program = "import sys, slipstream.compress.report; print(sorted({'msgspec', 'zmq'} & set(sys.modules)))"
    assert run_python(program) == "[]\n"


def test_unknown_public_names_are_an_attribute_error():
    import slipstream

    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = slipstream.nothing


def test_every_module_begins_with_a_docstring():
    trees = {module: parsed(file) for module, file in FILES.items()}
    assert not [
        module for module, tree in trees.items() if tree.body and not ast.get_docstring(tree)
    ]


def test_no_registry_host_is_named():
    """Packages come from whatever pip is set up to use."""
    words = ("pypi" + ".org", "pytorch" + ".org/whl", "files.pythonhosted" + ".org")
    root = SRC.parent
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False
    ).stdout
    files = [root / name for name in tracked.split("\0") if name] or [
        *root.glob("*"),
        *FILES.values(),
    ]
    for file in files:
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            assert not [word for word in words if word in text], file
