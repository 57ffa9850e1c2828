"""Who may import whom (DESIGN §3), read from the source; and what `import slipstream` and `--help` cost.

Imports inside functions count like those at the top: they tie parts together just the same. Those under `if
TYPE_CHECKING:` do not, since nothing is imported when the program runs.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
FILES = {
    ".".join(f.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): f
    for f in sorted((SRC / "slipstream").rglob("*.py"))
}

BASE = ("errors", "types", "config")
MAY_IMPORT = {  # part: the parts that it may import, besides itself
    "errors": (),
    "spec": ("errors",),
    "platform": ("plan.hardware",),
    "types": ("errors",),
    "config": ("errors", "spec"),
    "hub": ("errors",),
    "plan": (*BASE, "spec"),
    "core": (*BASE, "spec"),
    "kernels": ("errors", "spec", "platform"),
    "model": ("errors", "spec", "platform", "kernels"),
    "worker": (*BASE, "hub", "spec", "plan", "platform", "kernels", "model"),
    "engine": (*BASE, "hub", "plan", "core", "worker", "kernels.autotune_table", "spec"),
    "server": (*BASE, "plan", "engine", "compress.context"),
    "bench": (*BASE, "plan", "engine"),
    "evals": (*BASE, "hub", "spec", "plan", "kernels", "model", "worker", "engine"),
    "compress": (*BASE, "hub", "spec", "plan", "kernels", "model", "worker", "engine", "bench", "evals"),
    "cli": (
        *(*BASE, "hub", "plan", "engine", "server", "bench", "evals", "compress", "spec"),
        *("worker.device", "worker.cpu_choice", "worker.roofline", "worker.executor", "model.check", "model.trace"),
        *("kernels.ops", "kernels.autotune_table", "kernels.triton.tuning", "kernels.build"),
    ),
    "__main__": ("cli",),
}
HEAVY = {  # third-party package: the parts that may import it
    "torch": (
        *("platform", "kernels", "model", "worker", "evals", "compress"),
        *("bench.adapters.transformers", "cli.doctor", "cli.compress"),
    ),
    "triton": ("kernels.triton", "kernels.ops", "cli.doctor"),
    "transformers": ("bench.adapters.transformers",),
    "huggingface_hub": ("hub",),
    "datasets": ("evals.text",),
    "lm_eval": ("evals.tasks", "evals.lm_eval_adapter"),
    "starlette": ("server",),
    "uvicorn": ("server",),
}
TORCH_FREE = (
    *("types", "errors", "config", "hub", "plan", "core", "kernels.autotune_table", "kernels.build", "evals.text"),
    *("compress.context", "compress.steps", "spec"),
    *("kernels.layouts", "kernels.recording", "kernels.cpu_lowering", "kernels.token_shape"),
    *("model.layers", "model.encoder", "model.decoder", "model.trace"),
)


def imported(path: Path) -> set[str]:
    """The modules that a file imports when it runs, at the top or in a function."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in FILES else str(node.module) for name in whole)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            children: list[ast.AST] = [*node.orelse]
        else:
            children = [*ast.iter_child_nodes(node)]
        for child in children:
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def is_in(module: str, parts: tuple[str, ...]) -> bool:
    return any(module == part or module.startswith(part + ".") for part in parts)


def part_of(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("module", [name for name in FILES if name != "slipstream"])
def test_imports_only_what_it_may(module):
    own = module.removeprefix("slipstream.")
    for name in imported(FILES[module]):
        if name.startswith("slipstream."):
            other = name.removeprefix("slipstream.")
            allowed = part_of(other) == part_of(own) or is_in(other, MAY_IMPORT[part_of(own)])
            assert allowed, f"{own} imports {other}"
        elif name.split(".")[0] in HEAVY:
            assert is_in(own, HEAVY[name.split(".")[0]]), f"{own} imports {name}"


def test_no_circles_in_model():
    """Imports inside functions count."""
    waiting = {m: {i for i in imported(f) if i in FILES} for m, f in FILES.items() if m.startswith("slipstream.model.")}
    while waiting:
        free = {m for m, needs in waiting.items() if not needs & waiting.keys()}
        assert free, f"a circle: {sorted(waiting)}"
        waiting = {m: needs for m, needs in waiting.items() if m not in free}


def test_the_rules_can_fail(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nelse:\n    import numpy\n"
        "def f():\n    import torch.nn\n    from slipstream.worker import device\n"
    )
    assert imported(file) == {"typing", "numpy", "torch.nn", "slipstream.worker.device"}


def run_python(program: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), *(p for p in sys.path if p)])}
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_torch_free_modules_load_no_torch():
    modules = [name for name in FILES if is_in(name.removeprefix("slipstream."), TORCH_FREE)]
    assert "slipstream.core.scheduler" in modules
    assert "slipstream.plan.memory" in modules
    assert run_python(f"import sys, {', '.join(modules)}; print('torch' in sys.modules)") == "False\n"


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
"""
    assert run_python(program).splitlines()[-1] == "[]"


def test_a_report_needs_an_engine_only_for_speed_and_tasks():
    program = "import sys, slipstream.compress.report; print(sorted({'msgspec', 'zmq'} & set(sys.modules)))"
    assert run_python(program) == "[]\n"


def test_tests_of_a_gpu_leave_triton_to_the_interpreter():
    """pytest reads them before tests/kernels, which must be the first to import Triton's kernels."""
    names = [f"tests.gpu.{f.stem}" for f in sorted(Path(__file__).with_name("gpu").glob("test_*.py"))]
    program = f"import sys, {', '.join(names)}; print('slipstream.kernels.triton' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=SRC.parent, check=True)
    assert ran.stdout.strip() == "False"


def test_public_names():
    import slipstream

    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = slipstream.nothing


@pytest.mark.parametrize("module", FILES)
def test_begins_with_a_docstring(module):
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    assert not tree.body or ast.get_docstring(tree), f"{module} does not say what it is"


def test_no_registry_host_is_named():
    """Packages come from whatever pip is set up to use."""
    words = ("pypi" + ".org", "pytorch" + ".org/whl", "files.pythonhosted" + ".org")
    root = SRC.parent
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False).stdout
    files = [root / name for name in tracked.split("\0") if name] or [*root.glob("*"), *FILES.values()]
    for file in files:
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            assert not [word for word in words if word in text], file
