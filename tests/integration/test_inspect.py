"""`persist inspect`: what each command prints of a frozen location, as text and as JSON, and what it takes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pytest

import persist
from persist.inspect import readonly_location
from persist.inspect.queries import ANSWERS
from rpc.cli.program import main
from tests.support import json_schemas
from tests.support.inspected import COMMANDS, FixedClock, copied

GOLDEN = Path(__file__).parent / "inspected"
SCHEMA = pa.schema([("id", pa.int64())])
VALIDATOR = jsonschema.Draft202012Validator(json.loads(json_schemas.INSPECT.read_text(encoding="utf-8")))
Ran = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("inspect") / "location")


@pytest.fixture
def ran(directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Runs a command on the frozen location: its exit code, and what it printed."""
    monkeypatch.setattr(readonly_location, "SystemClock", FixedClock)

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["inspect", *arguments, "--dir", str(directory)])
        told = capsys.readouterr()
        assert told.err == ""
        return code, told.out

    return run


def check(document: Any) -> None:
    VALIDATOR.validate(document)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_of_a_frozen_location_what_it_did(name: str, ran: Ran, pytestconfig: pytest.Config) -> None:
    """`pytest --rewrite` renews the files: read the difference."""
    (code, text), (again, as_json) = ran(*COMMANDS[name]), ran(*COMMANDS[name], "--json")
    assert (code, again) == (0, 0)
    for kind, said in (("txt", text), ("json", as_json)):
        file = GOLDEN / f"{name}.{kind}"
        if pytestconfig.getoption("--rewrite"):
            file.write_text(said, encoding="utf-8")
        assert said == file.read_text(encoding="utf-8")
    for line in as_json.splitlines():
        check(json.loads(line))


def test_every_command_has_a_golden_output() -> None:
    assert {words[0] for words in COMMANDS.values()} == set(ANSWERS)
    assert {path.stem for path in GOLDEN.iterdir()} == set(COMMANDS)


def test_the_published_schema_is_that_of_the_records() -> None:
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)
    assert json_schemas.INSPECT.read_text(encoding="utf-8") == json_schemas.inspect_schema()


def test_the_schema_refuses_what_is_no_answer(ran: Ran) -> None:
    document = json.loads(ran("parts", "tagged", "--json")[1])
    for wrong in ({"version": 2}, {"rows": [{}]}, {"command": "state"}, {"findings": [{"what": "x"}]}):
        with pytest.raises(jsonschema.ValidationError):
            check({**document, **wrong})


# --- a State, and the log


def test_a_state_at_each_version_is_the_one_that_the_log_leads_to(ran: Ran) -> None:
    head = json.loads(ran("state", "orders", "--json")[1])["seqno"]
    entries = [json.loads(line) for line in ran("log", "orders", "--json")[1].splitlines()]
    assert [entry["seqno"] for entry in entries] == list(range(1, head + 1))
    for entry in entries:
        found = json.loads(ran("state", "orders", "--at", str(entry["seqno"]), "--json")[1])
        assert (found["seqno"], found["about"]["commit_id"]) == (entry["seqno"], entry["commit_id"])


def test_following_a_log_shows_what_comes_and_ends_at_the_last_version_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "location"
    with persist.connect(f"persist://{place}", collect=False) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        writing = threading.Timer(0.3, lambda: [shard.insert([{"id": number}]) for number in range(3)])
        writing.start()
        code = main(["inspect", "log", "orders", "--follow", "--to", "4", "--dir", str(place), "--json"])
        writing.join()
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert [entry["seqno"] for entry in entries] == [1, 2, 3, 4]


# --- a part


# --- contents
