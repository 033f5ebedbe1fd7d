"""What `make test` and `make proof` run between them: every test, no proof in both. `make full` runs all of it."""

from __future__ import annotations

import itertools
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("test", "proof")
LAW = "hypothesis"  # its own plugin marks the tests that it runs


def selected() -> dict[str, str]:
    """The marker expression of each command, as the Makefile says."""
    makefile = (ROOT / "Makefile").read_text()
    return {
        command: re.findall(rf'^{command}:.*\n.*-m pytest .*-m "([^"]+)"', makefile, re.M)[0] for command in COMMANDS
    }


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


@pytest.mark.parametrize("markers", list(marked()), ids=lambda markers: "+".join(sorted(markers)) or "none")
def test_a_proof_is_run_by_one_command_alone_and_every_other_test_by_make_test(markers: frozenset[str]) -> None:
    expected = ["proof"] if "proof" in markers else ["test", "proof"] if LAW in markers else ["test"]
    assert runners(markers, selected()) == expected


def test_a_test_that_nobody_runs_would_be_noticed() -> None:
    slow = frozenset({"slow"})
    assert runners(slow, {"test": "not proof and not slow", "proof": "proof"}) == []
    assert runners(frozenset({"proof"}), {"test": "not slow", "proof": "proof"}) == ["test", "proof"]


def test_ci_runs_all_of_it() -> None:
    run = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in run if line.startswith("make ")] == ["make venv", "make -j2 check", "make full"]


def recipe(command: str) -> str:
    """The lines that make runs for it."""
    return re.findall(rf"^{command}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[0]


def test_the_full_run_leaves_out_samples_alone_and_is_a_proof() -> None:
    ran = re.findall(r"-m pytest (.*?) (?:>|\|)", recipe("full"))
    assert [" ".join(words.split()) for words in ran] == [
        '--proof -m "not sample" $(SPARK)',
        '$(PARALLEL) $(SLOWEST) --proof -m "not sample" $(BUT_SPARK)',
    ]


def test_a_run_that_fails_fails_the_full_run_whichever_it_is() -> None:
    """As make runs it, with the words for pytest replaced by an exit code."""
    lines = recipe("full").replace("\\\n", "\n").replace("$$", "$").lstrip("\t@")
    for spark, others in itertools.product((0, 1), (0, 2)):
        codes = iter((spark, others))
        script = re.sub(r"\$\(PY\) -m pytest [^>|]*", lambda _: f"sh -c 'exit {next(codes)}' ", lines)  # noqa: B023
        script = re.sub(r"\$\(\w+_TOLD\)", "/dev/null", script.replace("$(dir $(SPARK_TOLD))", "."))
        script = script.replace("$(TOLD_AGAIN)", "1")
        assert subprocess.run(["bash", "-c", script], check=False).returncode == spark + others


def test_a_law_has_more_examples_in_a_proof() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "--proof" in re.findall(r"^proof:.*\n(.*)", makefile, re.M)[0]
    assert "--proof" not in re.findall(r"^test:.*\n(.*)", makefile, re.M)[0]
