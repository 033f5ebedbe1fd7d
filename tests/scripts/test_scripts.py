"""Every script prints what it says; and a script that does not is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from persist.core.commands import Command
from persist.core.errors import UpperMismatch
from tests.scripts import harness
from tests.scripts.commit_verbs import CommitInterpreter
from tests.scripts.harness import Arguments, ScriptError
from tests.scripts.verbs import StepInterpreter

HERE = Path(__file__).parent
STEP_SCRIPTS = sorted((HERE / "step").glob("*.txt"))
COMMIT_SCRIPTS = sorted((HERE / "commit").glob("*.txt"))


@pytest.mark.parametrize("path", STEP_SCRIPTS, ids=lambda p: p.stem)
def test_step_script(path: Path, pytestconfig: pytest.Config) -> None:
    harness.run(path, StepInterpreter(), rewrite=pytestconfig.getoption("--rewrite"))


@pytest.mark.parametrize("path", COMMIT_SCRIPTS, ids=lambda p: p.stem)
def test_commit_script(path: Path, pytestconfig: pytest.Config) -> None:
    harness.run(path, CommitInterpreter(), rewrite=pytestconfig.getoption("--rewrite"))


def test_every_command_has_a_script() -> None:
    told: set[type] = set()
    for path in STEP_SCRIPTS:
        interpreter = StepInterpreter()
        harness.run(path, interpreter)
        told |= interpreter.told
    assert set(get_args(Command)) - told == set()


# --- the harness itself


def echo(group: list[Arguments]) -> list[str]:
    """Prints its words; `fail` is refused."""
    if group[0].verb == "fail":
        return [harness.print_error(UpperMismatch("the upper is [7]", expected=[3], actual=[7]))]
    return [" ".join([args.verb, *args.rest()]) for args in group]


SCRIPT = """\
# What echo does.

say 'a b' c
say d
----
say a b c
say d

# A refusal has its kind and its sentence.
fail
----
error upper_mismatch: the upper is [7]
"""


def test_a_true_script_passes_and_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "true.txt"
    path.write_text(SCRIPT)
    harness.run(path, echo)
    harness.run(path, echo, rewrite=True)
    assert path.read_text() == SCRIPT


def test_a_false_script_is_noticed_and_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "false.txt"
    path.write_text(SCRIPT.replace("say d\n\n", "say e\n\n"))
    with pytest.raises(AssertionError, match="-say e"):
        harness.run(path, echo)
    harness.run(path, echo, rewrite=True)
    assert path.read_text() == SCRIPT


@pytest.mark.parametrize("text", ["say a\n", "say a\n\n----\nsay a\n"])
def test_a_block_without_separator_is_refused(text: str) -> None:
    with pytest.raises(ScriptError, match="line 1: the commands are not followed by ----"):
        harness.parse(text)
