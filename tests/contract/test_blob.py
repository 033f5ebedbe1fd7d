"""What every blob store promises, on every provider."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from blob import Blob, BlobExists, BlobMisconfigured, BlobNotFound
from tests.support.waiting import WAIT_S

SIZES = {"empty": b"", "one": b"\0", "small": b"some bytes", "large": bytes(range(256)) * 4096}


def test_bytes_come_back(blob: Blob) -> None:
    for name, data in SIZES.items():
        key = f"a/{name}.parquet"
        blob.put(key, data)
        assert blob.get(key) == data
        found = blob.stat(key)
        assert found is not None
        assert (found.key, found.size) == (key, len(data))


def test_a_memoryview_is_as_good_as_bytes(blob: Blob) -> None:
    blob.put("k", memoryview(b"0123456789")[2:6])
    assert blob.get("k") == b"2345"


def test_what_is_not_there_is_not_found(blob: Blob) -> None:
    for call in (lambda: blob.get("no/such"), lambda: blob.get_range("no/such", 0, 1)):
        with pytest.raises(BlobNotFound):
            call()
    assert blob.stat("no/such") is None
    assert list(blob.list("")) == []
    blob.put("no", b"x")
    assert blob.stat("no/such") is None
    with pytest.raises(BlobNotFound):
        blob.get("no/such")


def test_a_key_is_written_once(blob: Blob) -> None:
    blob.put("k", b"first")
    with pytest.raises(BlobExists, match="k"):
        blob.put("k", b"other")
    with pytest.raises(BlobExists):
        blob.put("k", b"first and more")
    assert blob.get("k") == b"first"


def test_a_retried_put_is_fine(blob: Blob) -> None:
    for _ in range(3):
        blob.put("k", b"same")
    assert blob.get("k") == b"same"


def test_a_range_is_exact(blob: Blob) -> None:
    blob.put("k", b"0123456789")
    for start, length in [(0, 10), (0, 1), (3, 4), (9, 1), (0, 0), (10, 0)]:
        assert blob.get_range("k", start, length) == b"0123456789"[start : start + length]


def test_a_range_past_the_end_is_never_cut_short(blob: Blob) -> None:
    for number, (start, length) in enumerate([(0, 11), (9, 2), (10, 1), (50, 5), (11, 0)]):
        blob.put(f"k{number}", b"0123456789")
        with pytest.raises(BlobNotFound):
            blob.get_range(f"k{number}", start, length)
        blob.get(f"k{number}")
        with pytest.raises(BlobNotFound):
            blob.get_range(f"k{number}", start, length)


def test_a_senseless_range_is_refused(blob: Blob) -> None:
    blob.put("k", b"0123456789")
    for start, length in [(-1, 1), (0, -1)]:
        with pytest.raises(BlobMisconfigured):
            blob.get_range("k", start, length)


def test_delete_takes_any_number_and_misses_nothing(blob: Blob) -> None:
    keys = [f"shard/p{number}" for number in range(25)]
    for key in keys:
        blob.put(key, key.encode())
    blob.delete([])
    blob.delete([*keys[:20], "shard/missing", "other/missing"])
    blob.delete(keys[:20])
    assert [found.key for found in blob.list("")] == sorted(keys[20:])
    assert blob.stat(keys[0]) is None
    with pytest.raises(BlobNotFound):
        blob.get(keys[0])


def test_a_deleted_key_may_be_written_again(blob: Blob) -> None:
    blob.put("a/b", b"one")
    assert blob.get("a/b") == b"one"
    assert blob.get_range("a/b", 0, 1) == b"o"
    blob.delete(["a/b"])
    blob.put("a/b", b"two")
    assert blob.get("a/b") == b"two"
    assert blob.get_range("a/b", 0, 1) == b"t"


def test_more_deletes_and_keys_than_one_request_takes(blob: Blob) -> None:
    # S3 deletes and lists 1,000 at a time: absent keys exercise the first, present ones the second.
    blob.delete([f"absent/{number}" for number in range(1200)])
    keys = [f"many/{number:04d}" for number in range(1030)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: blob.put(key, b""), keys))
    assert [found.key for found in blob.list("many/")] == keys
    blob.delete(keys)
    assert list(blob.list("")) == []


def test_a_listing_is_by_prefix_in_key_order(blob: Blob) -> None:
    keys = ["a-b", "a.b/c", "a/b", "a/b-c", "a/c/d/e", "a0", "b", "b_", "Z"]
    for number, key in enumerate(keys):
        blob.put(key, b"x" * number)
    listed = list(blob.list(""))
    assert [found.key for found in listed] == sorted(keys)
    assert {found.key: found.size for found in listed} == {key: number for number, key in enumerate(keys)}
    assert [found.key for found in blob.list("a/")] == ["a/b", "a/b-c", "a/c/d/e"]
    assert [found.key for found in blob.list("a/b")] == ["a/b", "a/b-c"]
    assert [found.key for found in blob.list("a")] == ["a-b", "a.b/c", "a/b", "a/b-c", "a/c/d/e", "a0"]
    assert [found.key for found in blob.list("a/c/d/e")] == ["a/c/d/e"]
    assert list(blob.list("nope/")) == []
    assert list(blob.list("a/c/d/e/f")) == []


def test_times_are_those_of_the_writing(blob: Blob) -> None:
    before_ms = time.time_ns() // 1_000_000
    blob.put("k", b"x")
    found = blob.stat("k")
    assert found is not None
    # Servers round to seconds and have clocks of their own; days would be a wrong unit.
    assert abs(found.modified_ms - before_ms) < 86_400_000
    assert abs(next(iter(blob.list("k"))).modified_ms - found.modified_ms) < 1_000


BAD_KEYS = ["", "/a", "a/", "a//b", ".", "a/../b", "./a", "a b", "a\n", "ümlaut", "a~b", "x" * 201, "a/" * 300 + "a"]


def test_a_bad_key_is_refused(blob: Blob) -> None:
    for key in BAD_KEYS:
        for call in (
            lambda key=key: blob.put(key, b""),
            lambda key=key: blob.get(key),
            lambda key=key: blob.get_range(key, 0, 1),
            lambda key=key: blob.stat(key),
            lambda key=key: blob.delete(["fine", key]),
        ):
            with pytest.raises(BlobMisconfigured):
                call()


def test_a_bad_prefix_is_refused(blob: Blob) -> None:
    for prefix in ("/", "a//", "../", "a/../", "ümlaut", "a b"):
        with pytest.raises(BlobMisconfigured):
            list(blob.list(prefix))


def test_the_longest_key_works(blob: Blob) -> None:
    key = "/".join(["s" * 100] * 5)
    blob.put(key, b"x")
    assert [found.key for found in blob.list("s")] == [key]


def test_it_passes_its_own_check_and_leaves_nothing(blob: Blob) -> None:
    blob.check()
    blob.check()
    assert list(blob.list("")) == []


def test_a_put_that_ended_is_not_unfinished(blob: Blob) -> None:
    blob.put("s1/w1/a", b"a" * 100)
    with suppress(BlobExists):
        blob.put("s1/w1/a", b"other")
    assert list(blob.unfinished("s1")) == list(blob.unfinished("s1/w1/")) == []
    blob.abandon([])
    with pytest.raises(BlobMisconfigured):
        list(blob.unfinished("../"))


def test_sixteen_threads_putting_different_keys(blob: Blob) -> None:
    def work(number: int) -> None:
        for index in range(5):
            blob.put(f"t{number}/same/{index}", f"{number}-{index}".encode())
            assert blob.get(f"t{number}/same/{index}") == f"{number}-{index}".encode()

    _in_threads(16, work)
    assert len(list(blob.list(""))) == 80


def test_sixteen_threads_retrying_one_put(blob: Blob) -> None:
    _in_threads(16, lambda _: blob.put("one/key", b"the same"))
    assert blob.get("one/key") == b"the same"


def test_puts_and_deletes_in_one_directory_do_not_disturb_each_other(blob: Blob) -> None:
    def work(number: int) -> None:
        for index in range(20):
            key = f"shared/dir/{number}-{index}"
            blob.put(key, b"x")
            blob.delete([key])

    _in_threads(8, work)
    assert list(blob.list("")) == []


def _put_by_url(url: str, data: bytes, headers: Mapping[str, str]) -> int:
    request = urllib.request.Request(url, data=data, method="PUT", headers={"Content-Type": "", **headers})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as refused:
        refused.close()
        return refused.code


def _needs_signatures(blob: Blob) -> None:
    forged = blob.presign_put("signed/forged", 60)
    assert forged is not None
    if _put_by_url(forged.url.replace("signed/forged", "signed/other"), b"x", forged.headers) == 200:
        pytest.skip("real server missing: moto does not check signatures")


def test_presigned_urls_carry_the_bytes(blob: Blob) -> None:
    put, get_url = blob.presign_put("signed/k", 60), blob.presign_get("signed/k", 60)
    if put is None or get_url is None:
        assert put is None
        assert get_url is None
        return
    assert _put_by_url(put.url, b"by hand", put.headers) == 200
    assert blob.get("signed/k") == b"by hand"
    with urllib.request.urlopen(get_url, timeout=WAIT_S) as reply:
        assert reply.read() == b"by hand"
    assert [found.key for found in blob.list("")] == ["signed/k"]  # no probe is left
    _needs_signatures(blob)
    with (
        pytest.raises(urllib.error.HTTPError) as refused,
        urllib.request.urlopen(get_url[:-4] + "0000", timeout=WAIT_S),
    ):
        pass
    refused.value.close()


def test_a_presigned_url_writes_a_key_once(blob: Blob) -> None:
    """A14: whoever gets hold of the URL of a part that is committed overwrote it."""
    put = blob.presign_put("signed/k", 60)
    if put is None:
        return
    blob.put("signed/k", b"committed")
    assert _put_by_url(put.url, b"other", put.headers) == 412
    assert blob.get("signed/k") == b"committed"
    _needs_signatures(blob)
    assert _put_by_url(put.url, b"other", {}) == 403  # the signature covers the headers
    assert _put_by_url(put.url, b"other", dict.fromkeys(put.headers, "x")) in (400, 403, 501)
    assert blob.get("signed/k") == b"committed"


def test_a_local_path_is_the_file(blob: Blob) -> None:
    blob.put("a/k", b"bytes")
    path = blob.local_path("a/k")
    if path is not None:
        with open(path, "rb") as file:
            assert file.read() == b"bytes"


def _in_threads(count: int, work: object) -> None:
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
