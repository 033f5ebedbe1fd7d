"""Files of entries: what a process wrote a short while ago it does not read again."""

from __future__ import annotations

import pytest

from blob.memory_blobs import MemoryBlob
from persist.attributes.node_store import NodeCache
from persist.commit import spill_files
from persist.commit.spill_files import EntryFiles
from persist.core import commands as c
from persist.core.audit_log import CommandEntry, Committed, EntryFile
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo
from persist.core.record import replace
from persist.core.state import State
from persist.formats.state_frames import BLOCK_ENTRIES, read_index
from tests.support.location import memory_location
from tests.support.shard import Shard

EACH = 40  # entries of a file


class CountingBlob(MemoryBlob):
    reads = 0

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads += 1
        return super().get_range(key, start, length)


class Files:
    """A State whose entries go to files, as often as they are asked to."""

    def __init__(self, each: int = EACH) -> None:
        self.blob = CountingBlob("mem:")
        self.location = memory_location(blob=self.blob)
        self.files = self.of_process()
        self.state: State = replace(Shard().state, entries={})
        self._each = each

    def of_process(self) -> EntryFiles:
        return EntryFiles(self.location.versions, self.location.ids, NodeCache())

    def flush(self) -> c.FlushEntries:
        first = self.state.seqno + 1
        entries = {
            SeqNo(number): Committed(number, (CommandEntry("insert", Antichain(number), Antichain(number + 1)),))
            for number in range(first, first + self._each)
        }
        self.state = replace(self.state, seqno=SeqNo(first + self._each - 1), entries=entries)
        command = self.files.flush(self.state)
        assert command is not None
        kept = self.state.entry_files[: len(self.state.entry_files) - len(command.merged)]
        self.state = replace(self.state, entries={}, entry_files=(*kept, command.file))
        return command

    def told(self) -> list[int]:
        page = self.files.page(self.state, None, 1_000, maintenance=True)
        return [int(told.place.seqno) for told in page.told]


def test_files_that_this_process_wrote_are_merged_without_a_read() -> None:
    files = Files()
    merged = [len(files.flush().merged) for _ in range(8)]
    assert sum(merged) > 4
    assert files.blob.reads == 0
    assert files.told() == list(range(8 * EACH + 1, 1, -1))
    assert files.blob.reads > 0, "whoever asks for the history is told what is in the store"


def test_files_of_another_process_are_read() -> None:
    files = Files()
    files.flush()
    files.files = files.of_process()
    assert len(files.flush().merged) == 1
    assert files.blob.reads == 1
    assert files.told() == list(range(2 * EACH + 1, 1, -1))


def test_a_large_file_is_not_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_files, "CACHED_BYTES_MAX", 10)
    files = Files()
    files.flush()
    files.flush()
    assert files.blob.reads == 1


def test_what_fills_a_block_is_copied_as_it_is() -> None:
    files = Files(BLOCK_ENTRIES)
    blocks = []
    for _ in range(3):
        file: EntryFile = files.flush().file
        data = files.blob.get(file.key)
        blocks.append([data[at.offset : at.offset + at.length] for at in read_index(data[file.index_at :]).blocks])
    assert blocks[2][:2] == blocks[1]
    assert blocks[1][:1] == blocks[0]
