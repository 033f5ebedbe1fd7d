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
from tests.support.inspected import COMMANDS, PART, FixedClock, copied

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


def test_the_whole_state_is_told_and_keys_of_rows_are_not(ran: Ran) -> None:
    document = json.loads(ran("state", "orders", "--json")[1])
    state = document["state"]
    parts = [part for batch in state["trace"]["batches"] for run in batch["runs"] for part in run["parts"]]
    assert {part["key_lower"][0] for part in parts} == {"#"}
    assert [part["data"] for part in parts] == [None, {"bytes": 432}, {"bytes": 432}]
    assert state["seqno"] == document["seqno"] == 32
    [cursor] = state["critical_readers"].values()
    assert cursor["opaque"].startswith("#"), "who knows it moves the hold"
    shown = json.loads(ran("state", "orders", "--json", "--keys")[1])["state"]
    assert "#" not in shown["trace"]["batches"][0]["runs"][0]["parts"][0]["key_lower"]


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


def test_a_diff_names_what_changed(ran: Ran) -> None:
    rows = json.loads(ran("state", "orders", "--from", "v2", "--at", "v31", "--json")[1])["rows"]
    assert {"field": "upper", "words": "upper moved from 0 to 11"} in rows
    assert {"field": "critical_readers", "words": "1 cursor added: job at 8"} in rows
    assert json.loads(ran("state", "orders", "--from", "5", "--at", "5", "--json")[1])["rows"] == []


# --- a part


def test_a_part_tells_its_footer_and_that_its_checksums_hold(ran: Ran) -> None:
    document = json.loads(ran("part", PART, "--json")[1])
    about, [group] = document["about"], document["rows"]
    assert (about["named"], about["whole"], about["footer"], group["sound"]) == (True, True, True, True)
    values = {one["column"]: one["least"] for one in group["statistics"]}
    assert values["k"].startswith("#")
    assert values["__time"] == "0", "times are no data"


# --- contents


def test_a_digest_is_that_of_a_clone_and_of_the_same_rows_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def digest(place: Path, name: str, *more: str) -> tuple[str, int]:
        assert main(["inspect", "digest", name, *more, "--dir", str(place), "--json"]) == 0
        about = json.loads(capsys.readouterr().out)["about"]
        return about["digest"], about["rows"]

    one, other = tmp_path / "one", tmp_path / "other"
    with persist.connect(f"persist://{one}", collect=False) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.insert([{"id": 1}, {"id": 2}])
        before = digest(one, "orders")
        shard.insert([{"id": 3}, {"id": 3}])
        shard.optimize()
        client.clone("orders", "copy")
    with persist.connect(f"persist://{other}", collect=False) as client:
        client.create_shard("elsewhere", SCHEMA, ["id"]).insert([{"id": 3}, {"id": 2}, {"id": 1}, {"id": 3}])
    assert digest(one, "orders") == digest(one, "copy") == digest(other, "elsewhere")
    assert digest(one, "orders")[1] == 4
    assert digest(one, "orders", "--as-of", "0") == before != digest(one, "orders")
