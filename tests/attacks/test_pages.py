"""What a hostile web page sends from somebody's browser to a server without tokens: whatever browsers let it send."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from persist.core import commands as c
from persist.formats.records import encoded
from tests.attacks import harness
from tests.attacks.harness import GOOD_SHARD, Evil, House, answered

DROP = encoded(c.Drop(True))
ROW = b"id,text\n1,evil\n"


@pytest.fixture(scope="module", params=[["--insecure"], []], ids=["insecure", "loopback"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One on a published port, as that of docker-compose, and one that listens on loopback."""
    with harness.house(tmp_path_factory.mktemp("open"), arguments=request.param, wants_tokens=False) as found:
        yield found


def sent(house: House, evil: Evil, path: str, body: bytes, host: str, *lines: str) -> tuple[int, str]:
    opened = evil.connect()
    head = (f"POST {path} HTTP/1.1", f"host: {host.format(house.port)}", f"content-length: {len(body)}")
    text = "\r\n".join((*head, *(line.format(house.port) for line in lines), "connection: close", "", ""))
    opened.sendall(text.encode() + body)
    status, told = answered(opened)
    return status, told.get("kind", "")


CROSS = "sec-fetch-site: cross-site"
LOCAL = "127.0.0.1:{}"
PAGES = {
    "a form": (LOCAL, "content-type: text/plain"),
    "a form of another type": (LOCAL, "content-type: multipart/form-data; boundary=x"),
    "a script without a type": (LOCAL,),
    "an origin": (LOCAL, "origin: https://evil.example", "content-type: text/csv"),
    "an origin that begins as loopback": (LOCAL, "origin: http://127.evil.example", "content-type: text/csv"),
    "an origin that holds an address": (LOCAL, "origin: http://127.0.0.1.nip.io:{}", "content-type: text/csv"),
    "an origin that is none": (LOCAL, "origin: null", "content-type: text/csv"),
    "another origin of this machine": (LOCAL, "origin: http://localhost:3000", "content-type: text/csv"),
    "another site": (LOCAL, CROSS, "content-type: text/csv"),
    "two origins": (LOCAL, "origin: http://evil.example", "origin: http://127.0.0.1:{}", "content-type: text/csv"),
    "two hosts": (LOCAL, "host: evil.example", "content-type: text/csv"),
}
REBOUND = ["127.evil.example", "127.0.0.1.evil.example:{}", "localhost.evil.example", "evil.example"]


def test_a_page_writes_nothing(house: House) -> None:
    """A form of text/plain dropped a shard; `127.evil.example` was taken for this machine."""

    def attack(house: House, evil: Evil) -> None:
        for page, (host, *lines) in PAGES.items():
            for path, body in (("commands", DROP), ("insert?format=csv", ROW)):
                told = sent(house, evil, f"/v1/shards/{GOOD_SHARD}/{path}", body, host, *lines)
                assert told in {(403, "forbidden"), (415, "form_refused")}, (page, path)

    house.withstands(attack)


def test_a_name_that_leads_here_is_not_answered_on_loopback(house: House, request: pytest.FixtureRequest) -> None:
    if "insecure" in request.node.name:
        return  # any name may be its own there, which the documents say

    def attack(house: House, evil: Evil) -> None:
        for host in REBOUND:
            path = f"/v1/shards/{GOOD_SHARD}/commands"
            told = sent(house, evil, path, DROP, host, f"origin: http://{host}", "content-type: application/json")
            assert told == (403, "forbidden"), host

    house.withstands(attack)
