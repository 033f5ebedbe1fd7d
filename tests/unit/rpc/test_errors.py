"""Every error has a status, and comes out of HTTP as it went in."""

from __future__ import annotations

import json

import pytest

from persist.codecs.decode_limits import BodyTooLarge
from persist.core import errors as e
from persist.formats.http_messages import error_from_json
from rpc.errors import STATUS, problem, status_of


@pytest.mark.parametrize("cls", list(e.kinds().values()), ids=lambda cls: cls.__name__)
def test_every_error_of_the_tree_has_a_status_of_its_own_or_its_parents(cls: type[e.PersistError]) -> None:
    assert status_of(cls("said")) in set(STATUS.values())


@pytest.mark.parametrize("cls", list(e.kinds().values()), ids=lambda cls: cls.__name__)
def test_errors_come_back_as_the_same_class_with_the_same_sentence(cls: type[e.PersistError]) -> None:
    response = problem(cls("one clear sentence", actual=[7]))
    assert response.media_type == "application/problem+json"
    back = error_from_json(json.loads(bytes(response.body)))
    assert (type(back), back.message, back.details) == (cls, "one clear sentence", {"actual": [7]})


@pytest.mark.parametrize(("error", "status"), [
    (e.InvalidUsage("x"), 400), (e.Unauthorized("x"), 401), (e.Forbidden("x"), 403), (e.UnknownShard("x"), 404),
    (e.UpperMismatch("x"), 409), (e.Expired("x"), 410), (e.NotReadable("x"), 410), (BodyTooLarge("x"), 413),
    (e.Overloaded("x"), 429), (e.Corruption("x"), 500), (e.UpgradeNeeded("x"), 501), (e.Unavailable("x"), 503),
    (e.Indeterminate("x"), 504),
], ids=lambda value: type(value).__name__ if isinstance(value, e.PersistError) else "")  # fmt: skip
def test_the_statuses_that_clients_rely_on(error: e.PersistError, status: int) -> None:
    assert problem(error).status_code == status


def test_who_should_retry_is_told_when() -> None:
    assert problem(e.Overloaded("busy", retry_after_s=2.5)).headers["retry-after"] == "3"
    assert problem(e.Unavailable("away")).headers["retry-after"] == "1"
    assert "retry-after" not in problem(e.Indeterminate("perhaps")).headers


def test_a_sentence_is_written_as_it_is() -> None:
    """It was escaped, so that a person read `pt_\\u2026`."""
    assert "pt_\u2026".encode() in bytes(problem(e.Unauthorized("send pt_\u2026")).body)
    half = problem(e.InvalidUsage("half a pair: \ud800"))
    assert json.loads(bytes(half.body))["detail"] == "half a pair: \ud800"
