"""How many leases one token may take."""

from __future__ import annotations

import pytest

from persist.core import commands as c
from persist.core.errors import Indeterminate, NotReadable, Overloaded
from persist.core.frontier import Antichain
from persist.core.ids import ReaderId, SeqNo
from persist.core.record import replace
from persist.core.state import LeasedReader, State, blank_state
from rpc.concurrency_limits import RENEWED_S, TokenLeases

LEASE_MS = 60_000
NO_READERS = blank_state("orders")


def reader(number: int) -> ReaderId:
    return ReaderId(f"r{number:032x}")


class Counting:
    """Three leases on a shard and four in all, by a clock that stands."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.leases = TokenLeases(3, 4, now_s=lambda: self.now_s)

    def send(
        self, command: c.Command, shard: str = "orders", token: str = "evil", state: State | None = NO_READERS
    ) -> None:
        """`state`: what the shard is known to be after the command."""
        with self.leases.counted(token, shard, command, lambda: state):
            pass

    def take(self, number: int, shard: str = "orders", token: str = "evil") -> None:
        self.send(c.RegisterReader(reader(number), None, LEASE_MS), shard, token)


@pytest.fixture
def counting() -> Counting:
    return Counting()


def test_one_token_takes_so_many_on_a_shard_and_in_all_and_others_take_theirs(counting: Counting) -> None:
    for number in range(3):
        counting.take(number)
    with pytest.raises(Overloaded, match="'evil' holds 3 leases on shard 'orders' and 3 in total") as refused:
        counting.take(3)
    assert refused.value.details["retry_after_s"] > 0
    counting.take(4, "other")
    with pytest.raises(Overloaded, match="0 leases on shard 'third' and 4 in total"):
        counting.send(c.RegisterReader(reader(5), Antichain(0), LEASE_MS, point=True), "third")
    counting.take(6, token="good")
    assert (counting.leases.count("evil"), counting.leases.count("good")) == (4, 1)


def test_taking_one_again_renews_it(counting: Counting) -> None:
    for _ in range(9):
        counting.take(1)
    assert counting.leases.count("evil") == 1


def test_what_is_given_back_or_has_lapsed_makes_room(counting: Counting) -> None:
    for number in range(3):
        counting.take(number)
    counting.send(c.ExpireReader(reader(0)))
    counting.take(3)
    counting.now_s += LEASE_MS / 1000
    counting.send(c.DowngradeSince(reader(3), None, SeqNo(1)))
    counting.take(4)
    assert counting.leases.count("evil") == 2, "the one that was renewed, and the new one"


def test_what_was_refused_is_not_counted_and_what_may_have_happened_is(counting: Counting) -> None:
    for error, count in ((NotReadable("gone", as_of=None), 0), (Indeterminate("no answer"), 1)):
        with (
            pytest.raises(type(error)),
            counting.leases.counted("evil", "orders", c.RegisterReader(reader(1), None, 1), lambda: None),
        ):
            raise error
        assert counting.leases.count("evil") == count


def test_a_lease_that_another_server_gave_counts_once_it_is_renewed(counting: Counting) -> None:
    counting.send(c.DowngradeSince(reader(1), Antichain(3), SeqNo(1), moves_since=False))
    assert counting.leases.count("evil") == 1
    for number in (2, 3):
        counting.take(number)
    with pytest.raises(Overloaded):
        counting.take(4)
    counting.now_s += RENEWED_S
    counting.take(4)


def test_nothing_is_kept_of_a_token_without_leases(counting: Counting) -> None:
    counting.take(1)
    counting.send(c.ExpireReader(reader(1)))
    counting.send(c.ExpireReader(reader(2)), token="good")
    assert counting.leases._leases == {}


def test_a_lease_that_the_shard_still_has_is_not_given_back(counting: Counting) -> None:
    """A command for another life of the shard was answered, and ended nothing: one token held 10,000 leases."""
    counting.take(1)
    held = replace(NO_READERS, leased_readers={reader(1): LeasedReader(Antichain(0), SeqNo(1), 0, LEASE_MS, "")})
    for state in (held, None):
        counting.send(c.ExpireReader(reader(1)), state=state)
        assert counting.leases.count("evil") == 1


def test_taking_one_again_for_less_does_not_shorten_it(counting: Counting) -> None:
    """The shard keeps the lease that it gave first: with 1 ms the count lapsed while the lease lived."""
    for number in range(3):
        counting.take(number)
        counting.send(c.RegisterReader(reader(number), None, 1))
    counting.now_s += LEASE_MS / 2000
    with pytest.raises(Overloaded):
        counting.take(3)
