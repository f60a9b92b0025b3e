"""The repository's shape: two links that make `kernels/` and `models/` importable, and who may import whom."""

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "models")

# From the ground up. A module may import its own layer and those below it, never one above.
LAYERS = (
    {"kernels"},
    {
        "tree",
        "topology",
        "layout",
        "rows",
        "partial",
        "moves",
        "layer_scratch",
        "ahead",
        "cache",
        "device_trees",
        "parallel",
        "watch",
        "launch",
        "memory",
        "target",
    },
    {"models"},
    {"noise", "sampling_params", "processors", "sampling", "stats"},
    {"verifying", "drafting", "shaping"},
    {"accepting", "requests", "proposing", "whole", "decode"},
    {
        "stopping",
        "prefix",
        "generate",
        "text",
        "chat",
        "streaming",
        "grammar",
        "hf",
        "hf_processors",
        "needs",
        "inspection",
    },
    {"__init__"},
    {"measure", "training", "testing", "numerics"},
    {"commands", "demo"},
    {"cli"},
    {"__main__"},
)
# A module that has every name asked of it: a class, taken with any arguments, whose objects decorate without effect.
STAND_IN = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda self, *a, **k: None, "__call__": lambda self, decorated: decorated})
"""
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def python_files(folder: Path) -> Iterator[Path]:
    """Python files under a folder, links not followed."""
    for path, _, names in os.walk(folder):
        yield from (Path(path, name) for name in sorted(names) if name.endswith(".py"))


def our_modules() -> dict[str, Path]:
    """Every module of the package: its dotted name -> its file."""
    modules = {}
    for folder, prefix in (("compressed_spec", ""), ("kernels", "compressed_spec."), ("models", "compressed_spec.")):
        for path in python_files(ROOT / folder):
            name = prefix + ".".join(path.relative_to(ROOT).with_suffix("").parts)
            modules[name.removesuffix(".__init__")] = path
    return modules


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of ours that a file imports anywhere, inside functions and for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            base = node.module or ""
            for alias in node.names:
                member = f"{base}.{alias.name}"
                found.add(member if member in modules else base)
    return {name for name in found if name.split(".")[0] == "compressed_spec"}


def part(module: str) -> str:
    """`compressed_spec.a.b` -> `a`; the package itself -> `__init__`."""
    return [*module.split("."), "__init__"][1]


@pytest.mark.parametrize("name", LINKED)
def test_links_exist_and_resolve(name: str) -> None:
    link = ROOT / "compressed_spec" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name
    assert (ROOT / name).is_dir()


@pytest.mark.parametrize("name", LINKED)
def test_linked_modules_import_under_the_package(name: str) -> None:
    modules = [module for module in our_modules() if part(module) == name]
    assert modules
    for module in modules:
        assert importlib.import_module(module).__name__ == module


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_have_no_init(name: str) -> None:
    assert [path for path in python_files(ROOT / name) if path.name == "__init__.py"] == []


@pytest.mark.parametrize(
    ("line", "banned"),
    [
        ("import kernels", True),
        ("import models", True),
        ("from kernels.rms_norm import rms_norm", True),
        ("from models.deepseek_v4 import config", True),
        ("import compressed_spec.kernels", False),
        ("from compressed_spec.models.deepseek_v4 import config", False),
    ],
)
def test_ruff_bans_the_bare_names(line: str, banned: bool) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--stdin-filename", "tests/snippet.py", "-"]
    result = subprocess.run(command, cwd=ROOT, input=line + "\n", capture_output=True, text=True, check=False)
    assert ("TID251" in result.stdout) == banned, result.stdout + result.stderr
    assert result.returncode == int(banned)


def test_transformers_finds_hugging_face_kernels_from_our_root(tmp_path: Path) -> None:
    """Our `kernels/` comes first on sys.path here; a regular package of that name must win all the same."""
    stand_in = tmp_path / "kernels"
    (stand_in / "layer").mkdir(parents=True)
    for file in ("__init__.py", "layer/__init__.py", "layer/mode.py"):
        (stand_in / file).write_text(STAND_IN)
    metadata = tmp_path / "kernels-0.18.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    code = (
        "import sys; assert sys.path[0] == '', sys.path\n"
        "import importlib.metadata; print(importlib.metadata.version('kernels'))\n"
        "from transformers import PreTrainedModel\n"
        "import kernels; print(kernels.__file__)\n"
        "import compressed_spec.kernels as ours; print(*ours.__path__)\n"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    version, theirs, ours = result.stdout.splitlines()
    assert version == "0.18.2"
    assert Path(theirs) == stand_in / "__init__.py"
    assert Path(ours).resolve() == ROOT / "kernels"


def test_no_import_runs_upward() -> None:
    modules = our_modules()
    unplaced = sorted({part(module) for module in modules} - RANKS.keys())
    assert unplaced == [], "give each of these a place in LAYERS"
    upward = [
        f"{module} imports {target}"
        for module, path in modules.items()
        for target in sorted(imports_of(path, modules))
        if RANKS[part(target)] > RANKS[part(module)]
    ]
    assert upward == []


def test_no_import_cycle() -> None:
    modules = our_modules()
    waiting = {module: imports_of(path, modules) & modules.keys() - {module} for module, path in modules.items()}
    while ready := {module for module, targets in waiting.items() if not targets & waiting.keys()}:
        waiting = {module: targets for module, targets in waiting.items() if module not in ready}
    assert waiting == {}, "these import each other, or modules that do"


def test_files_stay_short() -> None:
    folders = ("compressed_spec", *LINKED, "tests", "scripts")
    lengths = {path: len(path.read_text().splitlines()) for folder in folders for path in python_files(ROOT / folder)}
    assert {str(path): lines for path, lines in lengths.items() if lines > 400} == {}
