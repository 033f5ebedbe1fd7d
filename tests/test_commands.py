"""What `make test` and `make proof` run between them: every test, no proof in both. CI runs a smoke of proofs too."""

from __future__ import annotations

import itertools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.examples import SEED_VARIABLE, SEEDS_A_DAY, seed_base

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("test", "gate", "proof")
LAW = "hypothesis"  # its own plugin marks the tests that it runs


def selected() -> dict[str, str]:
    """The marker expression of each command, as the Makefile says."""
    makefile = (ROOT / "Makefile").read_text()
    runs = {command: rf'^{command}:.*\n.*call run_tests,.*-m "([^"]+)"' for command in COMMANDS}
    return {command: re.findall(run, makefile, re.M)[0] for command, run in runs.items()}


def marked() -> Iterator[frozenset[str]]:
    """Every set of markers that a test may have."""
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    names = [marker.partition(":")[0] for marker in ours] + [LAW]
    for count in range(len(names) + 1):
        yield from map(frozenset, itertools.combinations(names, count))


def runners(markers: frozenset[str], expressions: dict[str, str]) -> list[str]:
    """The commands that run a test with these markers."""

    class Names(dict[str, bool]):
        def __missing__(self, name: str) -> bool:
            return name in markers

    return [command for command, expression in expressions.items() if eval(expression, {}, Names())]


def test_a_proof_is_run_by_one_command_alone_and_every_other_test_by_make_test() -> None:
    expressions = selected()
    for markers in marked():
        is_proof = "proof" in markers
        expected = {
            "test": not is_proof,
            "gate": not is_proof or "smoke" in markers,
            "proof": is_proof or LAW in markers,
        }
        assert runners(markers, expressions) == [command for command in COMMANDS if expected[command]], markers


def test_ci_checks_and_then_runs_the_tests_with_a_smoke_of_each_proof() -> None:
    run = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in run if line.startswith("make ")] == ["make venv", "make -j2 check", "make gate"]


def test_a_run_that_fails_fails_the_command_whichever_it_is() -> None:
    """As make runs it, with the words for pytest replaced by an exit code."""
    (lines,) = re.findall(r"^define run\n((?:\t.*\n)+)endef", (ROOT / "Makefile").read_text(), re.M)
    lines = lines.replace("\\\n", "\n").replace("$$", "$").lstrip("\t@")
    assert len(re.findall(r"\$\(PY\) -m pytest [^>|]*\$\(1\)", lines)) == 2
    for spark, others in itertools.product((0, 1), (0, 2)):
        codes = iter((spark, others))
        script = re.sub(r"\$\(PY\) -m pytest [^>|]*", lambda _: f"sh -c 'exit {next(codes)}' ", lines)  # noqa: B023
        script = re.sub(r"\$\(\w+_TOLD\)", "/dev/null", script.replace("$(dir $(SPARK_TOLD))", "."))
        script = script.replace("$(TOLD_AGAIN)", "1")
        assert subprocess.run(["bash", "-c", script], check=False).returncode == spark + others


def test_proofs_and_laws_are_whole_in_one_command_alone() -> None:
    commands = dict(re.findall(r"^(\w+):.*\n\t\$\(call run_tests,(.*)\)", (ROOT / "Makefile").read_text(), re.M))
    assert [command for command, selection in commands.items() if "--proof" in selection] == ["proof"]


def test_seeds_of_proofs_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, "4000")
    assert seed_base() == 4000
    monkeypatch.delenv(SEED_VARIABLE)
    assert seed_base() % SEEDS_A_DAY == 0
