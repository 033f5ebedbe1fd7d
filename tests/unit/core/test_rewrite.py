"""What the parts of a rewrite come to, and which of them belong together; the digests that tokens stand for."""

from __future__ import annotations

import hashlib
import json
from itertools import combinations
from typing import Any

import pytest

from persist.client.idempotency import digest_of
from persist.core import commands as c
from persist.core.attribute import AttributeKey, AttributeUpdate
from persist.core.errors import InvalidUsage
from persist.core.frontier import EMPTY, Antichain
from persist.core.ids import Token, WriterId
from persist.core.record import asdict
from persist.core.state import SchemaRecord
from tests.support.shard import Shard, make_part, make_run

WRITER, TOKEN = WriterId("w" + "1" * 32), Token("i" + "1" * 32)
UPPER = Antichain(9)
UPDATE = AttributeUpdate.replace(AttributeKey("7" * 32), 7)
PARTS: dict[str, dict[str, Any]] = {
    "runs": {"runs": (make_run(make_part(1)),)},
    "attributes": {"attributes": (UPDATE,)},
    "schema": {"schema": c.SchemaChange(1, SchemaRecord(b"", ()))},
    "cut": {"cut": 0},
    "settings_version": {"settings_version": 1},
    "undoes": {"undoes": 3},
    "truncates": {"truncates": 3},
    "drop": {"tombstone": Antichain(3)},
    "clear": {"tombstone": EMPTY},
    "erasure": {"erasure": c.NewErasure("e" + "1" * 32)},
    "passes": {"passes": c.PassedCut(7)},
}
EVERY = (c.RESTORE, c.TRUNCATE, c.DROP_BEFORE, c.ERASE, *c.EDITS)


def rewrite(operation: str, *names: str, upper: Antichain = UPPER, **more: Any) -> c.Rewrite:
    parts = {field: value for name in names for field, value in PARTS[name].items()}
    return c.Rewrite(WRITER, TOKEN, upper, 8, operation, **{**parts, **more})


VERBS = {verb for verb in c.EDITS if verb != c.INSERT}
BELONG: list[tuple[set[str], set[str], set[str]]] = [
    (VERBS, set(), {"runs", "attributes", "schema", "clear"}),
    ({c.INSERT}, {"cut"}, {"runs", "attributes"}),
    ({c.RESTORE}, {"undoes"}, {"runs", "attributes"}),
    ({c.TRUNCATE}, {"truncates"}, {"runs", "passes"}),
    ({c.TRUNCATE}, {"settings_version"}, {"runs"}),
    ({c.DROP_BEFORE}, {"drop"}, {"passes"}),
    ({c.ERASE}, {"erasure"}, {"runs"}),
]


@pytest.mark.parametrize("operation", EVERY)
def test_an_operation_has_its_parts_and_no_others(operation: str) -> None:
    """Else an edit could hide as maintenance, or go round what refuses it."""
    for size in range(len(PARTS) + 1):
        for names in map(set, combinations(PARTS, size)):
            if {"drop", "clear"} <= names:
                continue
            belongs = any(operation in own and must <= names <= must | may for own, must, may in BELONG)
            assert c.effects(rewrite(operation, *names)).is_consistent == belongs, names


def test_what_does_not_belong_together_is_refused_and_changes_nothing() -> None:
    shard = Shard()
    shard.one(c.AdvanceUpper(Antichain(9)))
    before = shard.state
    [told] = shard.commit(rewrite(c.TRUNCATE, "undoes"))
    assert isinstance(told, InvalidUsage)
    assert shard.state is before


@pytest.mark.parametrize("scope", [c.MAINTAIN, c.WRITE])
def test_every_part_needs_its_scope_whatever_comes_with_it(scope: str) -> None:
    """Maintenance adds no attributes and no columns, and who writes erases nothing."""
    refused = {c.MAINTAIN: {"attributes", "schema", "cut", "undoes", "clear", "erasure"}}.get(
        scope, {"schema", "settings_version", "erasure", "passes"}
    )
    for names in map(set, combinations(PARTS, 2)):
        needed = c.scopes_of(rewrite(c.TRUNCATE, *names))
        opened = all(not c.INCLUDED[scope].isdisjoint(scopes) for scopes in needed)
        if names != {"drop", "clear"}:
            assert opened == names.isdisjoint(refused), names


def digest(*said: object) -> bytes:
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).digest()


ATTRIBUTES = [(UPDATE.key, UPDATE.verb, UPDATE.value, UPDATE.expected)]
DIGESTS = [
    (rewrite("upsert", question=b"q"), ("Edit", "upsert", b"q".hex())),
    (rewrite(c.INSERT, "cut", question=b"q"), ("Edit", "insert", b"q".hex())),
    (rewrite("overwrite", "schema"), ("Reshape", "overwrite", "")),
    (rewrite(c.RESTORE, "undoes"), ("Restore", 3)),
    (rewrite(c.RESTORE, "undoes", "attributes"), ("Restore", 3, ATTRIBUTES)),
    (rewrite(c.TRUNCATE, "truncates"), ("Truncate", 2)),
    (rewrite(c.DROP_BEFORE, "drop"), ("DropBefore", 2)),
    (rewrite(c.TRUNCATE, "settings_version"), ("RetractAged", 8)),
    (rewrite(c.ERASE, "erasure", question=b"q"), ("Erase", b"q".hex(), False)),
]


@pytest.mark.parametrize(("command", "said"), DIGESTS)
def test_a_token_stands_for_the_question_by_the_bytes_of_before(command: c.Rewrite, said: tuple[object, ...]) -> None:
    assert digest_of(command) == digest(*said)
    fields = {**asdict(command), "expected_upper": Antichain(4), "runs": (make_run(make_part(2)),)}
    assert command.settings_version is not None or digest_of(c.Rewrite(**{**fields, "as_of": 3})) == digest(*said)


@pytest.mark.parametrize(("names", "told"), [
    ((c.RESTORE, "undoes"), {"refused_fed": True, "waits": False, "takes_time": False, "is_remembered": True}),
    ((c.TRUNCATE, "truncates"), {"refused_fed": True, "takes_time": False, "is_remembered": True, "removes": True}),
    ((c.TRUNCATE, "settings_version"), {"refused_fed": True, "takes_time": True, "removes": True, "point": None}),
    ((c.DROP_BEFORE, "drop"), {"refused_fed": False, "waits": False, "takes_time": False, "is_remembered": True}),
    ((c.ERASE, "erasure"), {"refused_fed": False, "waits": True, "takes_time": True, "removes": True}),
    ((c.INSERT, "cut"), {"refused_fed": False, "waits": False, "is_remembered": False, "removes": False}),
    (("delete",), {"refused_fed": True, "takes_time": False, "is_remembered": False, "removes": False}),
    (("upsert", "attributes"), {"is_remembered": True, "takes_time": False}),
])  # fmt: skip
def test_what_differs_by_operation(names: tuple[str, ...], told: dict[str, object]) -> None:
    found = asdict(c.effects(rewrite(*names)))
    assert {name: found[name] for name in told} == told


def test_a_drop_waits_unless_it_expects_an_upper_and_an_erasure_unless_it_is_forced() -> None:
    assert c.effects(rewrite(c.DROP_BEFORE, "drop", upper=EMPTY)).waits
    assert not c.effects(rewrite(c.ERASE, erasure=c.NewErasure("e" + "1" * 32, force=True))).waits
