"""Files are their owner's alone, whatever the umask; what is there already stays as it is."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest

import persist
from blob import open_blob
from blob.file import FileBlob
from blob.private_files import is_open, make_directories, make_file
from consensus import open_consensus
from persist.cli.output_files import replacing
from persist.regions.region_index import RegionIndex, write_index


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_mode & 0o777 for path in [root, *root.rglob("*")]}


def test_a_location_is_its_owners_alone(tmp_path: Path) -> None:
    """A22: any local user read all rows, whatever the tokens said."""
    place = tmp_path / "new" / "place"
    with persist.connect(f"persist://{place}") as client:
        shard = client.create_shard("orders", pa.schema([("id", pa.int64()), ("note", pa.string())]), ["id"])
        shard.insert(pa.table({"id": range(20_000), "note": [f"note {n}" for n in range(20_000)]}))
        found = modes(tmp_path / "new")
    assert {name for name in found if name.startswith("place/consensus.db")} == {
        "place/consensus.db", "place/consensus.db-wal", "place/consensus.db-shm", "place/consensus.db-turns"
    }  # fmt: skip
    assert any(name.startswith("place/blob/") for name in found)
    for name, mode in found.items():
        assert mode == (0o700 if (tmp_path / "new" / name).is_dir() else 0o600), name


def test_parts_are_as_open_as_their_store(tmp_path: Path) -> None:
    """So a store is shared with a group, and one that an older persist made is read on by whom it was read."""
    root = tmp_path / "blob"
    root.mkdir()
    root.chmod(0o750)
    with closing(FileBlob(root)) as blob:
        blob.put("a/b", b"x")
    assert modes(root) == {".": 0o750, "~tmp": 0o750, "a": 0o750, "a/b": 0o640}


def test_a_database_that_is_there_keeps_its_rights_and_its_side_files_have_them(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sqlite3.connect(path).close()
    path.touch(0o640)
    path.chmod(0o640)
    with closing(open_consensus(f"sqlite:///{path}")) as consensus:
        assert consensus.compare_and_set("k", 1, b"x")
        assert set(modes(tmp_path).values()) == {tmp_path.stat().st_mode & 0o777, 0o640}


def test_a_link_to_a_database_that_is_not_there_yet_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(tmp_path / "real.db")
    with closing(open_consensus(f"sqlite:///{link}")) as consensus:
        assert consensus.compare_and_set("k", 1, b"x")
    assert link.is_symlink()
    assert (tmp_path / "real.db").stat().st_mode & 0o777 == 0o600


def test_a_file_is_made_once_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    make_file(str(path))
    path.write_bytes(b"kept")
    make_file(str(path))
    make_file(str(tmp_path / "no" / "file"))
    assert path.read_bytes() == b"kept"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_directories_that_are_there_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(0o755)
    make_directories(tmp_path / "there" / "a" / "b")
    make_directories(tmp_path / "there")
    assert modes(tmp_path / "there") == {".": 0o755, "a": 0o700, "a/b": 0o700}
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_directories(tmp_path / "file")
    with pytest.raises(FileExistsError):
        make_directories(tmp_path / "file" / "below")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files and directories that were synced, in order."""
    paths: list[str] = []
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    return paths


def test_a_new_location_has_a_durable_name(tmp_path: Path, synced: list[str]) -> None:
    """A power cut could take the whole location, with rows that were acknowledged."""
    with persist.connect(f"persist://{tmp_path}/new/loc"):
        pass
    assert {str(tmp_path), str(tmp_path / "new"), str(tmp_path / "new" / "loc")} <= set(synced)


def test_a_new_backup_has_a_durable_name(tmp_path: Path, synced: list[str]) -> None:
    (tmp_path / "there").mkdir()
    open_blob(f"file://{tmp_path}/there/backups/eu").close()
    assert {str(tmp_path / "there"), str(tmp_path / "there" / "backups")} <= set(synced)


def test_a_file_that_takes_the_place_of_another_one_has_a_durable_name(tmp_path: Path, synced: list[str]) -> None:
    """Such as the tokens file, from which a token was taken, or the index, which fences an old home."""
    write_index(tmp_path / "regions.json", RegionIndex({}))
    assert synced[-1] == str(tmp_path)
    with replacing(tmp_path / "rows.csv") as out:
        out.write(b"id")
    assert [os.path.dirname(synced[-2]), synced[-1]] == [str(tmp_path)] * 2


def test_a_directory_that_may_not_be_listed_takes_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, "not to be listed")

    monkeypatch.setattr("blob.private_files.os.open", refused)
    make_directories(tmp_path / "a")
    assert (tmp_path / "a").is_dir()


def test_what_every_user_may_read_is_told() -> None:
    with TemporaryDirectory(dir="/tmp") as away:
        place = Path(away, "place")
        place.mkdir()
        assert not is_open(place)  # what is above it is closed
        Path(away).chmod(0o711)
        assert is_open(place)
        place.chmod(0o754)
        assert not is_open(place)
        file = place / "file"
        file.touch()
        assert not is_open(file)
        place.chmod(0o751)
        assert is_open(file)
        file.chmod(0o640)
        assert not is_open(file)
        assert not is_open(place / "missing")
