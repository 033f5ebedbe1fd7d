"""What is told by a request's headers and path before its body: which pages may send it, and what it means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core.errors import Forbidden, InvalidUsage
from rpc import csrf
from rpc.csrf import FormRefused
from rpc.routes.table import VERBS, resolve, split

HOST = "persist.example:8787"
CROSS = {"sec-fetch-site": "cross-site"}


def of(headers: dict[str, str]) -> dict[bytes, bytes]:
    return {name.encode(): value.encode("latin-1") for name, value in headers.items()}


@pytest.mark.parametrize(("host", "origin"), [
    (HOST, f"http://{HOST}"),
    (HOST, "http://PERSIST.example:8787"),
    ("persist.example.", "https://persist.example"),
    ("persist.example", "https://persist.example:443"),
    ("persist.example:80", "http://persist.example"),
    ("[::1]:8787", "http://[::1]:8787"),
])  # fmt: skip
def test_a_page_of_our_own_may_write(host: str, origin: str) -> None:
    csrf.check_site("POST", of({"host": host, "origin": origin, **CROSS}))


@pytest.mark.parametrize("origin", [
    "http://evil.example", "http://persist.example:8788", "https://persist.example",
    "http://persist.example:8787.evil.example", "http://persist.example:8787@evil.example",
    "http://persist.example:8787/", "http://persist.example:99999", "ftp://persist.example:8787", "null", "",
])  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS"])
def test_a_page_of_another_site_may_do_nothing(method: str, origin: str) -> None:
    with pytest.raises(Forbidden, match="a web page of"):
        csrf.check_site(method, of({"host": HOST, "origin": origin}))


@pytest.mark.parametrize("site", ["cross-site", "same-site", "CROSS-SITE "])
def test_what_another_site_embeds_is_refused_and_a_link_is_followed(site: str) -> None:
    headers = {"host": HOST, "sec-fetch-site": site, "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    with pytest.raises(Forbidden, match="another site"):
        csrf.check_site("GET", of(headers))
    link = headers | {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    csrf.check_site("GET", of(link))
    with pytest.raises(Forbidden, match="another site"):
        csrf.check_site("POST", of(link))
    with pytest.raises(Forbidden, match="another site"):
        csrf.check_site("GET", of(link | {"sec-fetch-dest": "iframe"}))


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_what_the_page_itself_or_its_reader_asks_for_passes(site: str) -> None:
    csrf.check_site("GET", of({"host": HOST, "sec-fetch-site": site}))


FORMS = [
    "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain",
    "TEXT/Plain; charset=utf-8", " text/plain ;x", "nonsense",
]  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("has_token", [False, True])
def test_a_type_that_forms_have_is_refused(kind: str, has_token: bool) -> None:
    with pytest.raises(FormRefused, match="any web page may send"):
        csrf.check_type("POST", of({"content-type": kind, "content-length": "0"}), has_token=has_token)


@pytest.mark.parametrize("kind", ["application/json", "text/csv", "application/json; charset=utf-8", "x/y"])
def test_a_type_that_no_form_has_passes(kind: str) -> None:
    csrf.check_type("POST", of({"content-type": kind, "content-length": "9"}), has_token=False)


@pytest.mark.parametrize("length", [{"content-length": "9"}, {"transfer-encoding": "chunked"}])
def test_a_body_without_a_type_needs_a_token(length: dict[str, str]) -> None:
    with pytest.raises(FormRefused, match="is none"):
        csrf.check_type("POST", of(length), has_token=False)
    csrf.check_type("POST", of(length), has_token=True)
    csrf.check_type("PUT", of(length), has_token=False)  # for which a browser asks first
    csrf.check_type("POST", of({"content-length": "0"}), has_token=False)


def test_a_request_of_http_1_1_names_its_host() -> None:
    csrf.check_host("1.1", of({"host": HOST}))
    csrf.check_host("1.0", {})
    with pytest.raises(InvalidUsage):
        csrf.check_host("1.1", of({"accept": "*/*"}))


@pytest.mark.parametrize("headers", [
    {"content-encoding": "gzip"},
    {"content-encoding": "deflate", "content-type": "application/json"},
    {"content-type": "text/csv; charset=iso-8859-1"},
    {"content-type": 'application/x-ndjson; header=present; Charset="UTF-16"'},
])  # fmt: skip
def test_a_body_that_is_compressed_or_no_utf_8_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(FormRefused) as error:
        csrf.check_encoding(of(headers))
    assert error.value.kind == "form_refused"


@pytest.mark.parametrize(
    "headers",
    [{}, {"content-encoding": "identity"}, {"content-type": "text/csv; charset=UTF-8"}, {"content-type": "text/csv"}],
)
def test_a_body_as_it_is_and_in_utf_8_passes(headers: dict[str, str]) -> None:
    csrf.check_encoding(of(headers))


@pytest.mark.parametrize("name", [b"host", b"origin", b"content-type", b"sec-fetch-site", b"authorization"])
def test_a_header_that_tells_pages_apart_comes_once(name: bytes) -> None:
    with pytest.raises(Forbidden, match="more than once"):
        csrf.check_once([(name, b"a"), (b"accept", b"b"), (name, b"a")])
    csrf.check_once([(b"accept", b"a"), (b"accept", b"b"), (name, b"a")])


# --- which shard and which verb a path means

SEGMENT = st.text("abcXYZ019._-", min_size=1, max_size=12)


@pytest.mark.parametrize(("path", "meant"), [
    ("/v1/shards/orders", ("orders", "")),
    ("/v1/shards/orders/insert", ("orders", "insert")),
    ("/v1/shards/eu/orders", ("eu/orders", "")),
    ("/v1/shards/eu/orders/insert", ("eu/orders", "insert")),
    ("/v1/shards/eu%2Forders/insert", ("eu/orders", "insert")),
    ("/v1/shards/eu/listen", ("eu", "listen")),
    ("/v1/shards/eu%2flisten", ("eu/listen", "")),
    ("/v1/shards/eu/listen/listen", ("eu/listen", "listen")),
    ("/v1/shards/listen", ("listen", "")),
    ("/v1/shards", None),
    ("/v1/shards/", None),
    ("/v1/location", None),
])  # fmt: skip
def test_a_path_means_one_shard_and_one_verb(path: str, meant: tuple[str, str] | None) -> None:
    assert split(path) == meant


@given(region=st.none() | SEGMENT, name=SEGMENT, verb=st.sampled_from(["", *sorted(VERBS)]))
def test_an_encoded_slash_always_belongs_to_the_name(region: str | None, name: str, verb: str) -> None:
    full = name if region is None else f"{region}/{name}"
    path = f"/v1/shards/{full.replace('/', '%2F')}" + (f"/{verb}" if verb else "")
    assert split(path) == (full, verb)


def test_the_router_finds_one_segment_whatever_the_name() -> None:
    scope = {"path": "/v1/shards/eu/orders/insert", "raw_path": b"/v1/shards/eu%2Forders/insert?x=1"}
    assert resolve(scope) == ("eu/orders", "insert")
    assert scope["path"].count("/") == 4
    assert scope["persist.shard"] == "eu/orders"
