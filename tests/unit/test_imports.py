"""Who may import whom, and what stays unloaded until it is needed."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for package in ("mpi_tp", "sharder") for path in (ROOT / package).rglob("*.py"))

# A part of the program, then what it may import of the others. Longer names go first: the first that fits counts.
ALLOWED = {
    "mpi_tp.errors": set(),
    "mpi_tp.config": {"mpi_tp.errors"},
    "mpi_tp.options": {"mpi_tp.errors"},
    "mpi_tp.model_files": {"mpi_tp.errors"},
    "mpi_tp.atomic": {"mpi_tp.errors"},
    "mpi_tp.partition": set(),
    "mpi_tp.shards": {"mpi_tp.errors", "mpi_tp.model_files", "mpi_tp.partition"},
    "mpi_tp.comm": {"mpi_tp.errors"},
    "mpi_tp.kernels": {"mpi_tp.errors"},
    "mpi_tp.layers": {"mpi_tp.comm.base", "mpi_tp.config", "mpi_tp.kernels.base", "mpi_tp.partition"},
    "mpi_tp.models": {
        "mpi_tp.comm.base",
        "mpi_tp.config",
        "mpi_tp.errors",
        "mpi_tp.kernels.base",
        "mpi_tp.layers",
        "mpi_tp.partition",
    },
    "mpi_tp.engine": {
        "mpi_tp.comm.base",
        "mpi_tp.config",
        "mpi_tp.detokenizer",
        "mpi_tp.errors",
        "mpi_tp.kernels.base",
        "mpi_tp.kernels.gpu",
        "mpi_tp.layers",
        "mpi_tp.models",
        "mpi_tp.partition",
        "mpi_tp.tokenizer",
    },
    "mpi_tp.records": {"mpi_tp.atomic", "mpi_tp.engine.request", "mpi_tp.errors"},
    "sharder": {
        "mpi_tp.atomic",
        "mpi_tp.config",
        "mpi_tp.errors",
        "mpi_tp.model_files",
        "mpi_tp.models",
        "mpi_tp.options",
        "mpi_tp.partition",
        "mpi_tp.shards",
        "mpi_tp.tokenizer",
    },
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Yield every module that a file imports, also inside functions and for types only."""
    yield from _imports(ast.parse(path.read_text(encoding="utf-8")))


def imports_when_run(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the same but for what stands under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    skipped = {inner for node in for_types for inner in ast.walk(node)}
    return (found for found in _imports(tree) if found[1] not in skipped)


def _imports(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert node.module is not None
            yield node.module, node
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)


def is_part(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def own_modules() -> set[str]:
    return {module_name(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    name = module_name(path)
    part = next((part for part in ALLOWED if is_part(name, part)), None)
    known = own_modules()
    # `from mpi_tp.comm import blocks` says where it goes by the longer name only.
    targets = {target for target, _ in imports(path) if target in known}
    targets -= {target for target in targets if any(is_part(other, target) and other != target for other in targets)}
    for target in targets:
        assert is_part(name, "sharder") or not is_part(target, "sharder"), f"{name} imports {target}"
        if part is not None and not is_part(target, part):
            assert any(is_part(target, other) for other in ALLOWED[part]), f"{name} imports {target}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_mpi_and_nccl_are_the_communicators_own(path: Path) -> None:
    name = module_name(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    for target, node in imports_when_run(path):
        if is_part(target, "mpi4py"):
            assert is_part(name, "mpi_tp.comm") or name == "mpi_tp.launch", f"{name} imports MPI"
            assert lines[node.lineno - 1].startswith(" "), f"{name} starts MPI when it is imported"
        if is_part(target, "nccl") or is_part(target, "cuda"):
            assert is_part(name, "mpi_tp.comm"), f"{name} imports {target}"


def test_the_partition_needs_nothing_but_the_standard_library() -> None:
    for path in FILES:
        if is_part(module_name(path), "mpi_tp.partition"):
            for target, _ in imports(path):
                assert is_part(target, "mpi_tp.partition") or target.split(".")[0] in sys.stdlib_module_names


STATEMENTS = ["import mpi_tp", "import sharder", "import mpi_tp.models.families", "from sharder import Sharder"]


def modules_after(code: str) -> set[str]:
    """Return what is loaded once `code` has run in a new interpreter."""
    code += "\nimport sys\nprint(list(sys.modules), file=sys.stderr)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return set(ast.literal_eval(done.stderr))


def help_of(program: str) -> str:
    return (
        f"import runpy, sys\nsys.argv = ['program', '--help']\n"
        f"try: runpy.run_module({program!r}, run_name='__main__')\n"
        "except SystemExit as end: assert end.code in (0, None)"
    )


@pytest.mark.parametrize("statement", STATEMENTS)
def test_an_import_alone_loads_nothing_slow(statement: str) -> None:
    assert not {"torch", "numba", "h5py", "mpi4py.MPI"} & modules_after(statement)


@pytest.mark.parametrize("program", ["mpi_tp.infer", "mpi_tp.bench", "mpi_tp.doctor", "sharder"])
def test_help_loads_nothing_slow(program: str) -> None:
    assert not {"torch", "numba", "h5py", "mpi4py.MPI"} & modules_after(help_of(program))


@pytest.mark.parametrize("program", ["sharder.verify", "sharder.inspect", "sharder.merge"])
def test_help_starts_no_mpi(program: str) -> None:
    assert "mpi4py.MPI" not in modules_after(help_of(program))


def test_importing_everything_starts_neither_mpi_nor_cuda() -> None:
    names = sorted(own_modules() - {"sharder.__main__"})
    code = "".join(f"import {name}\n" for name in names) + "import torch\nassert not torch.cuda.is_initialized()"
    assert "mpi4py.MPI" not in modules_after(code)


def test_the_public_names_are_there() -> None:
    code = "import mpi_tp\nfrom mpi_tp import LLM, SamplingParams\nassert LLM and SamplingParams\n"
    code += "try: mpi_tp.missing\nexcept AttributeError as error: assert 'missing' in str(error)\nelse: assert False"
    assert "mpi4py.MPI" not in modules_after(code)
