"""Who reaches for more than its token is good for: history, frontiers, and what there is of others."""

from __future__ import annotations

import pytest

from persist.core import commands as c
from persist.core.frontier import EMPTY, Antichain
from persist.core.ids import CriticalReaderId, ReaderId, SeqNo
from persist.formats.records import encoded
from tests.attacks.harness import GOOD_SHARD, Evil, House

READER = ReaderId("r" + "1" * 32)
CURSOR = CriticalReaderId("c" + "1" * 32)
FAR = SeqNo(1_000_000)
EVERYTHING = [
    c.RegisterReader(READER, None, 60_000),
    c.DowngradeSince(READER, Antichain(1), FAR),
    c.DowngradeSince(READER, EMPTY, FAR),
    c.ExpireReader(READER),
    c.RegisterCriticalReader(CURSOR, "", "mine", EMPTY, True),
    c.CompareAndDowngradeSince(CURSOR, "", "", EMPTY, True),
    c.ForgetHistory(Antichain(1)),
    c.AdvanceUpper(EMPTY),
    c.SetSettings(0, 0),
    c.Drop(True),
]


@pytest.mark.parametrize("token", ["evil-reader", "evil"])
def test_no_token_for_reading_or_writing_moves_a_since(house: House, token: str) -> None:
    """A token for reading closed a shard for everybody for ever, where nobody else held its history."""

    def send(name: str, command: c.Command) -> int:
        path = f"/v1/shards/{name}/commands"
        return house.ask(token, "POST", path, encoded(command))[0]

    def attack(house: House, evil: Evil) -> None:
        rows = b"\n".join(b'{"id": %d, "text": "x"}' % number for number in range(3))
        for _ in range(3):
            assert evil.ask("POST", f"/v1/shards/{evil.shard}/insert?format=ndjson", rows)[0] == 200
        for name in (evil.shard, GOOD_SHARD):
            allowed = [command for command in EVERYTHING if send(name, command) == 200]
            assert allowed == (EVERYTHING[:4] if name == evil.shard else []), "its own holds, on its own shards"
        since = house.ask("admin", "GET", f"/v1/shards/{evil.shard}")[1]["since"]
        assert since == [0]
        assert house.ask("admin", "GET", f"/v1/shards/{evil.shard}/snapshot?as_of=0")[0] == 200

    house.withstands(attack)


def test_nothing_of_others_is_told(house: House) -> None:
    """`/metrics` had the name, rows and times of every shard; `/readyz` told strangers where the stores are."""

    def attack(house: House, evil: Evil) -> None:
        for token in ("evil", "evil-reader"):
            told = house.ask(token, "GET", "/metrics")[1].decode()
            assert GOOD_SHARD not in told
            assert 'token="good"' not in told
            for path in (f"/v1/shards/{GOOD_SHARD}", "/v1/shards", "/v1/shards?prefix=good/", "/v1/shards?prefix=e"):
                assert house.ask(token, "GET", path)[0] == 403, path
            assert house.ask(token, "GET", "/readyz")[1] == {"status": "ok"}
        assert house.ask("admin", "GET", "/readyz")[1]["blob"].startswith("file:")

    house.withstands(attack)
