"""Every failure of this store in docs/troubleshooting.md, provoked on a real server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import boto3
import pytest

from blob import Blob, BlobExists, BlobMisconfigured, BlobNotFound, BlobUnavailable, open_blob
from blob.s3 import MULTIPART_BYTES, PART_BYTES, S3Blob, S3Settings
from tests.services.fault_proxy import FaultProxy
from tests.services.plugin import make_bucket
from tests.services.process import free_ports, wait_until
from tests.services.s3 import S3Server

pytestmark = pytest.mark.services

MiB = 2**20


@pytest.fixture
def bucket(s3_server: S3Server, aws_environment: None) -> str:
    name = f"errors-{free_ports(1)[0]}-{threading.get_native_id()}"
    session = boto3.session.Session()
    if name not in [each["Name"] for each in _buckets(session, s3_server.endpoint)]:
        make_bucket(session, s3_server.endpoint, name)
    return name


def _buckets(session: object, endpoint: str) -> list[dict[str, str]]:
    client = session.client("s3", endpoint_url=endpoint)  # type: ignore[attr-defined]
    try:
        return list(client.list_buckets()["Buckets"])
    finally:
        client.close()


@pytest.fixture
def direct(s3_server: S3Server, bucket: str) -> Iterator[Blob]:
    store = open_blob(f"s3://{bucket}/p?endpoint={s3_server.endpoint}")
    yield store
    store.close()


@pytest.fixture
def proxy(s3_server: S3Server, fault_proxy: Callable[[int], FaultProxy]) -> FaultProxy:
    return fault_proxy(s3_server.port)


@pytest.fixture
def behind(proxy: FaultProxy, bucket: str) -> Iterator[Blob]:
    """The same bucket through the proxy; each request is tried once."""
    store = open_blob(f"s3://{bucket}/p?endpoint=http://127.0.0.1:{proxy.port}&attempts=1")
    yield store
    proxy.mode("pass")
    store.close()


@pytest.fixture
def impatient(proxy: FaultProxy, bucket: str) -> Iterator[Blob]:
    """The same, for what is not answered."""
    options = "connect_timeout=2&read_timeout=2&attempts=1"
    store = open_blob(f"s3://{bucket}/p?endpoint=http://127.0.0.1:{proxy.port}&{options}")
    yield store
    proxy.mode("pass")
    store.close()


def refused_at_start(url: str, setting: str) -> None:
    store = open_blob(url)
    try:
        with pytest.raises(BlobMisconfigured, match=setting) as refused:
            store.check()
        assert "testsecret" not in str(refused.value)
    finally:
        store.close()


def test_connection_refused(bucket: str) -> None:
    store = open_blob(f"s3://{bucket}?endpoint=http://127.0.0.1:{free_ports(1)[0]}&attempts=1")
    for call in (store.check, lambda: store.get("k"), lambda: store.put("k", b""), lambda: list(store.list(""))):
        with pytest.raises(BlobUnavailable, match="did not answer"):
            call()
    store.close()


def test_wrong_bucket(s3_server: S3Server, bucket: str) -> None:
    refused_at_start(f"s3://{bucket}-missing?endpoint={s3_server.endpoint}", "bucket")


@pytest.mark.parametrize(("name", "wrong"), [("AWS_SECRET_ACCESS_KEY", "wrong"), ("AWS_ACCESS_KEY_ID", "nobody")])
def test_a_wrong_key(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, name: str, wrong: str) -> None:
    if s3_server.kind == "moto":
        pytest.skip("real server missing: moto does not check signatures")
    monkeypatch.setenv(name, wrong)
    refused_at_start(f"s3://{bucket}?endpoint={s3_server.endpoint}", name)


def test_no_credentials(s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    refused_at_start(f"s3://{bucket}?endpoint={s3_server.endpoint}", "credentials")


def test_a_profile_that_is_not_there(aws_environment: None) -> None:
    with pytest.raises(BlobMisconfigured, match="no-such-profile"):
        open_blob("s3://bucket?profile=no-such-profile")


@pytest.mark.parametrize(("url", "setting"), [
    ("s3://b", "bucket"),
    ("s3://UPPER/x", "bucket"),
    ("s3://bucket/a b", "prefix"),
    ("s3://bucket?colour=red", "colour"),
    ("s3://bucket?attempts=many", "attempts"),
    ("s3://bucket?attempts=0", "attempts"),
    ("s3://bucket?path_style=perhaps", "path_style"),
    ("s3://bucket?endpoint=127.0.0.1:9000", "endpoint"),
    ("s3://key:secret@bucket/x", "credentials"),
])  # fmt: skip
def test_a_url_that_cannot_be_meant(url: str, setting: str) -> None:
    with pytest.raises(BlobMisconfigured, match=setting) as refused:
        open_blob(url)
    assert "secret" not in str(refused.value)


def test_a_put_whose_reply_is_lost_is_confirmed_by_the_retry(
    behind: Blob, impatient: Blob, direct: Blob, proxy: FaultProxy
) -> None:
    proxy.mode("swallow")
    with pytest.raises(BlobUnavailable):
        impatient.put("k", b"landed")
    wait_until(lambda: direct.stat("k") is not None, "the put has landed")
    proxy.mode("pass")
    behind.put("k", b"landed")
    with pytest.raises(BlobExists):
        behind.put("k", b"other")


def test_a_server_that_hangs(impatient: Blob, proxy: FaultProxy) -> None:
    proxy.mode("hang")
    for call in (lambda: impatient.get("k"), lambda: impatient.put("k", b"x"), lambda: impatient.delete(["k"])):
        with pytest.raises(BlobUnavailable, match="did not answer"):
            call()


def test_a_connection_that_is_reset(behind: Blob, direct: Blob, proxy: FaultProxy) -> None:
    direct.put("k", b"x")
    proxy.mode("reset")
    with pytest.raises(BlobUnavailable):
        behind.get("k")
    proxy.mode("pass")
    assert behind.get("k") == b"x"


def test_a_download_that_breaks_off_is_begun_anew(behind: Blob, direct: Blob, proxy: FaultProxy) -> None:
    data = os.urandom(24 * MiB)
    direct.put("large", data)
    done: list[bytes] = []
    came: list[int] = []

    def count(piece: bytes) -> bytes:
        came.append(len(piece))
        return piece

    proxy.rewrite = count
    thread = threading.Thread(target=lambda: done.append(behind.get("large")))
    thread.start()
    # In the midst of the body: what breaks off before it is boto3's to repeat, which has one attempt here.
    wait_until(lambda: sum(came) > MiB or not thread.is_alive(), "a part of the body has come")
    proxy.cut()
    thread.join()
    proxy.rewrite = None
    assert done == [data]


def test_large_blobs_go_up_in_parts_and_are_written_once(s3_server: S3Server, bucket: str) -> None:
    settings = S3Settings(bucket, "parts", endpoint=s3_server.endpoint, path_style=True)
    store = S3Blob(settings)
    data = os.urandom(3 * PART_BYTES + 17)
    store.put("large", data)
    store.put("large", data)
    assert store.get("large") == data
    assert store.get_range("large", PART_BYTES - 3, 6) == data[PART_BYTES - 3 : PART_BYTES + 3]
    with pytest.raises(BlobExists):
        store.put("large", data[:-1])
    client = boto3.session.Session().client("s3", endpoint_url=s3_server.endpoint)
    head = client.head_object(Bucket=bucket, Key="parts/large")
    assert head["ETag"].strip('"').endswith("-4"), "four parts"
    client.close()
    store.close()


def test_a_failed_upload_leaves_no_parts(s3_server: S3Server, bucket: str, proxy: FaultProxy) -> None:
    settings = S3Settings(
        bucket,
        endpoint=f"http://127.0.0.1:{proxy.port}",
        path_style=True,
        attempts=1,
    )
    store = S3Blob(settings)
    proxy.upload_limit = 2 * MiB
    with pytest.raises(BlobUnavailable):
        store.put("large", os.urandom(MULTIPART_BYTES + MiB))
    client = boto3.session.Session().client("s3", endpoint_url=s3_server.endpoint)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    with pytest.raises(BlobNotFound):
        store.get("large")
    proxy.upload_limit = None
    store.put("large", b"in parts or not" * 3 * MiB)
    client.close()
    store.close()


def test_an_upload_that_was_never_ended_is_told_and_can_be_abandoned(direct: Blob, s3_server: S3Server) -> None:
    """As of a process that was killed: its parts lie in the bucket under no key, until a lifecycle rule comes."""
    assert isinstance(direct, S3Blob)
    client, bucket = direct._client, direct._bucket
    for name in ("s1/w1/a", "s1/w1/b", "s2/w1/a"):
        upload = client.create_multipart_upload(Bucket=bucket, Key=direct._name(name))["UploadId"]
        client.upload_part(Bucket=bucket, Key=direct._name(name), UploadId=upload, PartNumber=1, Body=b"half")
    assert list(direct.list("s")) == []
    real = client.list_multipart_uploads
    client.list_multipart_uploads = lambda **asked: {} if "Prefix" in asked else real(**asked)  # as MinIO does
    assert len(list(direct.unfinished("s1/"))) == 2
    client.list_multipart_uploads = real
    found = list(direct.unfinished("s1/"))
    assert sorted(one.where for one in found) == ["s1/w1/a (upload)", "s1/w1/b (upload)"]
    if s3_server.kind != "moto":  # which says the same instant of every upload
        assert all(abs(one.begun_ms - time.time() * 1000) < 3_600_000 for one in found)
    direct.abandon(found)
    direct.abandon(found)
    assert [one.where for one in direct.unfinished("s")] == ["s2/w1/a (upload)"]


def test_sixteen_threads_put_one_key_and_one_wins(direct: Blob) -> None:
    winners: list[int] = []

    def put(number: int) -> None:
        try:
            direct.put("contested", f"{number}".encode())
        except BlobExists:
            return
        winners.append(number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [f"{number}".encode() for number in winners] == [direct.get("contested")]


def test_its_url_opens_the_same_place(direct: Blob) -> None:
    direct.put("k", b"x")
    again = open_blob(direct.url)
    assert again.get("k") == b"x"
    assert urlsplit(again.url).query == urlsplit(direct.url).query
    again.close()


def test_the_gateway_is_killed_and_comes_back(direct: Blob, s3_server: S3Server) -> None:
    if s3_server.kind == "moto":
        pytest.skip("real server missing: moto forgets everything when it is killed")
    direct.put("before", b"kept")
    s3_server.gateway.kill()
    store = open_blob(f"{direct.url}&attempts=1")
    with pytest.raises(BlobUnavailable):
        store.put("meanwhile", b"x")
    s3_server.restart_gateway()
    store.put("meanwhile", b"x")
    assert direct.get("before") == b"kept"
    store.close()
