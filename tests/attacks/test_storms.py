"""Who asks without a pause. A quota of requests and rows keeps it to its part; what it may hold has a bound, too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from rpc.quotas import RATES
from tests.attacks import harness
from tests.attacks.harness import Evil, House
from tests.support.waiting import wait_until

RECORD = {"content-type": "application/vnd.persist.record"}


class Limited(NamedTuple):
    """A server, and the file with the quotas of who attacks it."""

    house: House
    quotas: Path

    def says(self, **most: int) -> None:
        """Have these rates hold for the token, or these counts for its prefix, once the server has read them."""
        kind, of = ("tokens", "evil") if most.keys() <= set(RATES) else ("prefixes", "evil/")
        self.quotas.write_text(json.dumps({kind: {of: most}}))
        told = [f'of="{of}",quota="{quota}"}} {float(number)}' for quota, number in most.items()]

        def is_read() -> bool:
            self.house.ask("evil", "GET", "/v1/location")
            return all(line in self.figures() for line in told)

        wait_until(is_read, "the server has read its file of quotas")

    def figures(self) -> str:
        return str(self.house.ask("admin", "GET", "/metrics")[1].decode())

    def refusals(self) -> float:
        """How often the server has refused by a quota."""
        found = re.search(r"^persist_quota_refusals_total (\S+)$", self.figures(), re.MULTILINE)
        assert found is not None
        return float(found[1])


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    directory: Path = tmp_path_factory.mktemp("storms")
    quotas = directory / "quotas.json"
    quotas.write_text("{}")
    with harness.house(directory, arguments=("--quotas", str(quotas))) as found:
        yield Limited(found, quotas)


@pytest.mark.smoke
@pytest.mark.proof
def test_small_requests_one_behind_the_other(limited: Limited) -> None:
    limited.says(requests_per_s=10)

    def attack(_: House, evil: Evil) -> None:
        before = limited.refusals()
        asks = evil.head("GET", f"/v1/shards/{evil.shard}") * 20
        for _ in range(40):
            evil.connect().sendall(asks)
        wait_until(lambda: limited.refusals() > before + 50, "it is refused")

    limited.house.withstands(attack)


def test_a_storm_of_inserts(limited: Limited) -> None:
    limited.says(rows_per_s=1)

    def attack(_: House, evil: Evil) -> None:
        path = f"/v1/shards/{evil.shard}/insert?format=ndjson"
        body = b"".join(json.dumps({"id": n, "text": "x" * 100}).encode() + b"\n" for n in range(1000))
        found = [evil.ask("POST", path, body)[0] for _ in range(50)]
        assert found == [200] + [429] * 49, "1,000 rows are paid off in 1,000 seconds"

    limited.house.withstands(attack)


@pytest.mark.smoke
@pytest.mark.proof
def test_many_shards(limited: Limited) -> None:
    """800 were made in eight seconds."""
    limited.says(shards=20)

    def attack(_: House, evil: Evil) -> None:
        body = json.dumps(harness.FIELDS).encode()
        made = [evil.ask("PUT", f"/v1/shards/evil/many-{n}", body) for n in range(40)]
        assert {status for status, _ in made} == {200, 429}
        assert sum(status == 200 for status, _ in made) <= 20
        assert made[-1][1]["details"]["quota"] == "shards"

    limited.house.withstands(attack)
