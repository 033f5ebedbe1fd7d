"""The house rules that no other tool checks."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTION = "persist-shards"
PACKAGES = ("persist", "blob", "consensus", "rpc", "compactor", "pyspark_persist")
MODULE_LINES = 800
TEST_MODULE_LINES = 1000
FUNCTION_LINES = 70

CORE_FORBIDDEN = frozenset(
    {"time", "random", "uuid", "os", "logging", "asyncio", "threading", "datetime", "socket", "secrets", "io"}
)

RECORDS = "persist/core/record.py"  # the only module of the core that imports msgspec, and nothing else

_OPEN_WORK = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")) + r")\b")
_MACHINE_PATH = re.compile(r"(?<![\w.~$}-])/(work|farm|root|home/\w+|Users/\w+)/")
_TEXT = frozenset({".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".sh", ".cfg", ".html", ".js", ".css", ".json", ""})
_TOP_FILES = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "SECURITY.md",
}  # what a reader finds beside the folders
_TOOL_FILES = {"Makefile", "docker-compose.yml", "pyproject.toml", "derby.log"}
_MAPPED = re.compile(r"`([A-Za-z0-9_]+(?:\.py|/))`")


# --- what is checked


def python_files(*tops: str) -> Iterator[Path]:
    for top in tops:
        yield from sorted(p for p in (ROOT / top).rglob("*.py") if "__pycache__" not in p.parts)


def text_files() -> Iterator[Path]:
    """Every text file of the project: what lies in a directory that tools made is not ours."""
    for entry in sorted(ROOT.iterdir()):
        made = entry.name in {"dist", "build", "soak-out", "spark-warehouse", "metastore_db", "derby.log"}
        if made or (entry.name.startswith(".") and entry.name not in {".ci", ".gitignore"}):
            continue
        for path in sorted(entry.rglob("*")) if entry.is_dir() else [entry]:
            if path.is_file() and path.suffix in _TEXT and "__pycache__" not in path.parts and not is_stored(path):
                yield path


def is_stored(path: Path) -> bool:
    """Whether it is a blob of a frozen location: those are bytes, whatever they are called."""
    parts = path.relative_to(ROOT).parts
    return parts[:2] == ("tests", "compat") and "blob" in parts


def strays(names: Iterable[str]) -> list[str]:
    """Files at the top that belong to no reader and no tool: notes that somebody left lying about."""
    return sorted(name for name in set(names) - _TOP_FILES - _TOOL_FILES if not name.startswith("."))


def package_dirs() -> Iterator[Path]:
    for top in PACKAGES:
        yield from sorted(p.parent for p in (ROOT / top).rglob("__init__.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def complaints(paths: Iterator[Path], rule: Callable[[str], list[str]]) -> list[str]:
    return [f"{name_of(p)}: {c}" for p in paths for c in rule(p.read_text(encoding="utf-8"))]


# --- the rules: each takes source text (or names) and returns complaints


def too_long(source: str, most: int) -> list[str]:
    lines = source.count("\n")
    return [f"{lines} lines; split it below {most}"] if lines >= most else []


def long_functions(source: str) -> list[str]:
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines >= FUNCTION_LINES:
                found.append(f"{node.name} has {lines} lines; split it below {FUNCTION_LINES}")
    return found


def open_work(source: str) -> list[str]:
    return [f"line {n}: {line.strip()}" for n, line in enumerate(source.split("\n"), 1) if _OPEN_WORK.search(line)]


def machine_paths(text: str) -> list[str]:
    return [f"line {n}: {line.strip()}" for n, line in enumerate(text.split("\n"), 1) if _MACHINE_PATH.search(line)]


def environment_reads(source: str) -> list[str]:
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Attribute):
            reads = node.attr in names and isinstance(node.value, ast.Name) and node.value.id == "os"
        elif isinstance(node, ast.ImportFrom):
            reads = node.module == "os" and not names.isdisjoint(alias.name for alias in node.names)
        else:
            continue
        if reads:
            found.append(f"line {node.lineno} reads the environment; take a constructor argument")
    return found


def may_read_environment(name: str) -> bool:
    return name.endswith(("/settings.py", "/__main__.py")) or name.startswith(
        ("persist/cli/", "rpc/cli/", "compactor/cli/")
    )


def impure_imports(source: str) -> list[str]:
    """Imports of a core module that are neither core nor an innocent part of the standard library."""
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        else:
            continue
        found += [f"line {node.lineno} imports {module}" for module in modules if not _is_pure(module)]
    return found


def _is_pure(module: str) -> bool:
    top, *below = module.split(".")
    if top == "persist":
        return below[:1] == ["core"]
    return top in sys.stdlib_module_names and top not in CORE_FORBIDDEN


def is_core(name: str) -> bool:
    return name.startswith("persist/core/")


def missing_docstring(source: str) -> list[str]:
    tree = parsed(source)
    if tree.body and ast.get_docstring(tree) is None:
        return ["begin the module with a docstring: what it owns"]
    return []


def map_errors(readme: str, present: frozenset[str]) -> list[str]:
    """A map names every module and subpackage beside it, and nothing that is not there."""
    named = set(_MAPPED.findall(readme))
    missing = [f"the map leaves out {name}" for name in sorted(present - named)]
    return missing + [f"the map names {name}, which is not there" for name in sorted(named - present)]


def beside(package: Path) -> frozenset[str]:
    files = {p.name for p in package.glob("*.py") if p.name != "__init__.py"}
    return frozenset(files | {f"{p.parent.name}/" for p in package.glob("*/__init__.py")})


def untyped(root: Path, packages: tuple[str, ...]) -> list[str]:
    """Packages whose types are hidden from those who use them."""
    return [f"{package} lacks py.typed" for package in packages if not (root / package / "py.typed").is_file()]


def foreign_providers(providers: Mapping[str, list[str]]) -> list[str]:
    return [
        f"{package} is also provided by {other}; uninstall it or use a venv of its own"
        for package in PACKAGES
        for other in sorted(set(providers.get(package, [])) - {DISTRIBUTION})
    ]


# --- the project keeps them


def test_modules_are_short() -> None:
    ours = complaints(python_files(*PACKAGES, "bench", "examples"), lambda s: too_long(s, MODULE_LINES))
    tests = complaints(python_files("tests"), lambda s: too_long(s, TEST_MODULE_LINES))
    assert ours + tests == []


def test_functions_are_short() -> None:
    assert complaints(python_files(*PACKAGES, "bench", "examples"), long_functions) == []


def test_commands_print_json_or_lines_whose_control_characters_are_escaped() -> None:
    """`persist shards NAME` printed the name of a cursor, which could take the terminal over."""
    commands = [path for package in ("persist", "rpc", "compactor") for path in (ROOT / package / "cli").glob("*.py")]
    assert commands
    raw = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in commands
        if path.name != "terminal.py"
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "print" and call.args
        if not ast.unparse(call.args[0]).startswith("json.dumps(")
    ]
    assert raw == [], "use `print_line`"


def test_nothing_is_left_open() -> None:
    assert complaints(python_files(*PACKAGES, "bench", "examples", "tests"), open_work) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    assert complaints(text_files(), machine_paths) == []


def test_no_notes_lie_about_at_the_top() -> None:
    assert strays(path.name for path in ROOT.iterdir() if path.is_file()) == []


def test_only_settings_read_the_environment() -> None:
    others = (p for p in python_files(*PACKAGES) if not may_read_environment(name_of(p)))
    assert complaints(others, environment_reads) == []


def test_the_core_is_pure() -> None:
    core = (p for p in python_files("persist") if is_core(name_of(p)) and name_of(p) != RECORDS)
    assert complaints(core, impure_imports) == []
    assert {found.split()[-1] for found in impure_imports((ROOT / RECORDS).read_text())} == {
        "msgspec",
        "msgspec.structs",
    }


def test_modules_say_what_they_own() -> None:
    public = (p for p in python_files(*PACKAGES) if not p.stem.startswith("_") or p.name == "__init__.py")
    assert complaints(public, missing_docstring) == []


@pytest.mark.parametrize("package", list(package_dirs()), ids=name_of)
def test_every_package_has_a_true_map(package: Path) -> None:
    readme = package / "README.md"
    assert readme.is_file(), f"write {name_of(readme)}: a map from file to what it owns"
    assert map_errors(readme.read_text(encoding="utf-8"), beside(package)) == []


def test_every_package_shows_its_types() -> None:
    assert untyped(ROOT, PACKAGES) == []


def test_only_we_provide_our_import_names() -> None:
    assert foreign_providers(packages_distributions()) == []


def test_the_search_finds_the_files() -> None:
    assert ROOT / "persist" / "core" / "ids.py" in set(python_files(*PACKAGES))
    assert {ROOT / ".ci" / "run", ROOT / "Makefile", Path(__file__)} <= set(text_files())
    assert {"persist", "blob", "rpc"} <= {name_of(p) for p in package_dirs()}
