"""The locks: a version and hashes for each library, no place to get it from, and all that pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {"build": (), "dev": ("dev",), "bench": ("bench",), "server": ("s3", "postgres", "etcd")}
PIN = re.compile(
    r"(?P<name>[a-z0-9-]+)==(?P<version>[0-9A-Za-z.!+-]+)(?P<marker> ; .+?)?(?: --hash=sha256:[0-9a-f]{64})+"
)


def pinned(text: str) -> list[tuple[str, str]]:
    """The name and version of each requirement. Raises AssertionError where one has no version, no hash, or a place."""
    assert "://" not in text
    lines = [line for line in re.sub(r" \\\n +", " ", text).splitlines() if line]
    found = [PIN.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return [(match["name"], match["version"]) for match in found if match]


def asked(extras: tuple[str, ...]) -> Iterator[Requirement]:
    """What pyproject.toml asks for with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    for one in map(Requirement, wanted):
        if canonicalize_name(one.name) == project["name"]:
            yield from asked(tuple(sorted(one.extras)))
        else:
            yield one


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_versions_and_hashes_of_all_that_is_asked_for(lock: str) -> None:
    found = pinned((ROOT / "requirements" / f"{lock}.lock").read_text())
    wanted = list(asked(LOCKS[lock])) if lock != "build" else []
    assert found
    for one in wanted:
        versions = [version for name, version in found if name == canonicalize_name(one.name)]
        assert versions, f"{one.name} is not locked: run `make lock`"
        assert all(one.specifier.contains(version, prereleases=True) for version in versions), one


def test_all_that_is_locked_is_locked_alike() -> None:
    dev = set(pinned((ROOT / "requirements/dev.lock").read_text()))
    names = {name for name, _ in dev}
    for lock in ("bench", "server", "build"):
        found = pinned((ROOT / "requirements" / f"{lock}.lock").read_text())
        assert {one for one in found if one[0] in names} <= dev


@pytest.mark.parametrize(
    "text",
    [
        "six>=1 --hash=sha256:" + "0" * 64,
        "six==1.0",
        "six==1.0 --hash=md5:" + "0" * 32,
        "--index-url https://mirror/simple",
        "six @ https://mirror/six.whl --hash=sha256:" + "0" * 64,
    ],
)
def test_a_lock_that_leaves_something_open_is_found_out(text: str) -> None:
    with pytest.raises(AssertionError):
        pinned(text)


def test_the_locks_are_what_is_installed() -> None:
    steps = re.findall(r'^        \[("--.*)\],$', (ROOT / "Makefile").read_text(), re.M)
    assert len(steps) == 3
    assert all('"--require-hashes"' in step or '"--no-deps"' in step for step in steps)
    assert all('"--no-build-isolation"' in step for step in steps[1:])


def test_libraries_have_bounds_from_above() -> None:
    """A version that may break us is not installed unless somebody has tried it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("", "s3", "postgres", "etcd", "spark", "otel"):
        for one in map(Requirement, project["optional-dependencies"][extra] if extra else project["dependencies"]):
            assert any(bound.operator in ("<", "==") for bound in one.specifier), one.name
