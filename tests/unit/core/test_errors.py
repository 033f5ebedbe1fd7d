"""Errors survive pickle and the wire, and each has a kind of its own."""

from __future__ import annotations

import pickle

import pytest

from persist.core.errors import Conflict, InvalidUsage, PersistError, UpperMismatch, from_kind, kinds

# Other packages derive errors of their own from the tree.
ALL = sorted((kind, cls) for kind, cls in kinds().items() if cls.__module__ == "persist.core.errors")


def subclasses(cls: type[PersistError]) -> set[type[PersistError]]:
    return {cls}.union(*(subclasses(sub) for sub in cls.__subclasses__()))


def test_every_error_has_a_kind_of_its_own() -> None:
    tree = {cls for cls in subclasses(PersistError) if cls.__module__ == "persist.core.errors"}
    assert len(ALL) == len(tree)
    assert {cls for _, cls in ALL} == tree


def test_a_subclass_without_a_kind_of_its_own_does_not_stand_for_its_parent() -> None:
    class Elsewhere(InvalidUsage):
        """As the service has some."""

    assert Elsewhere.kind == InvalidUsage.kind
    assert type(from_kind("invalid_usage", "no", {})) is InvalidUsage


@pytest.mark.parametrize(("kind", "cls"), ALL)
def test_an_error_survives_pickle(kind: str, cls: type[PersistError]) -> None:
    error = cls("the upper is [7]; read it", actual=[7], nested={"a": None})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (copy.kind, copy.message, copy.details, str(copy)) == (kind, error.message, error.details, str(error))


def test_an_unknown_kind_is_still_an_error_of_ours() -> None:
    copy = from_kind("from_the_future", "something", {})
    assert type(copy) is PersistError
    assert copy.message == "something"


def test_a_handler_of_a_branch_takes_its_leaves() -> None:
    with pytest.raises(Conflict) as caught:
        raise UpperMismatch("late", expected=[3], actual=[7])
    assert caught.value.details == {"expected": [3], "actual": [7]}
    assert not isinstance(caught.value, InvalidUsage)
