"""The package as a whole: lazy imports, public names, the order of the rooms, sizes, versions."""

import ast
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import miles_norm

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "miles_norm"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path for folder in ("miles_norm", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)

# From left to right: a room imports from itself and from those before it.
ROOMS = (
    "errors",
    "extras",
    "config",
    "samples",
    "train_data",
    "storage",
    "dumps",
    "columns",
    "runs",
    "grouping",
    "statistics",
    "rewards",
    "components",
    "counting",
    "advantages",
    "broadcast",
    "explain",
    "metrics",
    "result",
    "estimation",
    "normalize",
    "filters",
    "loss",
    "conversion",
    "sharding",
    "streaming",
    "distributed",
    "pages",
    "session",
    "integrations",
    "audit",
    "cluster",
    "cli",
)
CORE = ROOMS[: ROOMS.index("distributed") + 1]
CORE_DEPENDENCIES = {"miles_norm", "torch", "numpy", "pydantic"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
HEAVY = ("torch", "ray", "sglang", "fastapi", "matplotlib", "typer", "rich", "yaml")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def nodes_inside(nodes: Iterable[ast.AST]) -> set[int]:
    return {id(inner) for node in nodes for inner in ast.walk(node)}


def imports(path: Path, *, top_level: bool = False) -> Iterator[str]:
    """Dotted names of all modules that a file imports when it runs, those inside functions too unless ``top_level``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = nodes_inside(node for node in ast.walk(tree) if top_level and isinstance(node, FUNCTIONS))
    # What only a type checker imports is not needed to run, so it may stand to the right.
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            skipped |= nodes_inside(node.body)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parents = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(part for part in (parents, node.module) if part)
            # "from miles_norm import rewards" imports a room, as "import miles_norm.rewards" does.
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == "miles_norm" else (module,)


def test_import_is_lazy() -> None:
    # One process for both imports: what the second one loads is a superset of the first.
    code = f"""
import json, sys
import miles_norm
loaded = [[name for name in {HEAVY} if name in sys.modules]]
import miles_norm.config
loaded.append([name for name in {HEAVY} if name in sys.modules])
print(json.dumps(loaded))
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert json.loads(run.stdout) == [[], []]


def test_public_names_are_sorted_and_resolve() -> None:
    assert list(miles_norm.__all__) == sorted(set(miles_norm.__all__))
    assert set(miles_norm.__all__) <= set(dir(miles_norm))
    for name in miles_norm.__all__:
        public = getattr(miles_norm, name)
        assert not callable(public) or public.__doc__, f"{name} has no docstring"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = miles_norm.no_such_name


def test_every_module_has_a_room() -> None:
    assert {room_of(path) for path in MODULES} - {"__init__", "__main__"} <= set(ROOMS)


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.parent != PACKAGE or path.stem[:2] != "__"], ids=relative
)
def test_a_file_imports_only_from_the_left(path: Path) -> None:
    own = ROOMS.index(room_of(path))
    for name in imports(path):
        if name.startswith("miles_norm."):
            room = name.split(".")[1]
            assert room in ROOMS, f"{relative(path)} imports {name}; import from the module that defines it"
            assert ROOMS.index(room) <= own, f"{relative(path)} imports {name}, which is to its right"


@pytest.mark.parametrize("path", [path for path in MODULES if room_of(path) in CORE], ids=relative)
def test_the_core_needs_torch_numpy_and_pydantic_only(path: Path) -> None:
    allowed = CORE_DEPENDENCIES | sys.stdlib_module_names
    assert {name.split(".")[0] for name in imports(path, top_level=True)} <= allowed


def test_files_stay_small() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_every_config_is_documented() -> None:
    configs = sorted((ROOT / "configs").glob("*.yaml"))
    assert configs
    text = "".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert [path.name for path in configs if path.name not in text] == []


def test_version_has_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert ROOT / project["tool"]["hatch"]["version"]["path"] == PACKAGE / "__init__.py"
    installed = importlib.metadata.version("miles-norm")
    assert installed == miles_norm.__version__, "an older install: touch pyproject.toml, then make install"


def test_imports_for_a_type_checker_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import a\nelse:\n    import b\n"
        "def f():\n    import c\n"
    )
    assert list(imports(path)) == ["typing", "b", "c"]
    assert list(imports(path, top_level=True)) == ["typing", "b"]
