"""What a newcomer met who looked into shards from the shell."""

from __future__ import annotations

from pathlib import Path

import pytest

import persist
from persist.core.errors import InvalidUsage
from persist.core.shard_settings import DEFAULT_HISTORY, history_ms
from persist.inspect.readonly_location import prefix_of
from rpc.cli.program import main


@pytest.fixture
def where(tmp_path: Path) -> list[str]:
    return ["--dir", str(tmp_path / "data")]


def test_a_shard_that_a_command_makes_keeps_history_as_one_of_python_does(tmp_path: Path, where: list[str]) -> None:
    """It had no setting: its history went as soon as a reader let go of it."""
    (tmp_path / "rows.csv").write_text("id\n1\n")
    assert main(["create", "made", "--schema", "id int64", "--key", "id", *where]) == 0
    assert main(["import", "imported", str(tmp_path / "rows.csv"), "--create", "--key", "id", *where]) == 0
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        for name in ("made", "imported"):
            assert client.shard(name).settings.history_ms == history_ms(DEFAULT_HISTORY, "history")
        shard = client.shard("imported")
        for number in range(3):
            shard.insert([{"id": number}])
        shard.critical_reader("job").downgrade_since(3)
        assert shard.snapshot(0).to_arrow().num_rows == 1


@pytest.mark.parametrize("pattern", ["h!", "h!*", "!", "[a!"])
def test_a_pattern_with_an_exclamation_mark_outside_of_brackets_is_none(pattern: str) -> None:
    """No name has one, and nothing was found for it."""
    with pytest.raises(InvalidUsage, match="no pattern"):
        prefix_of(pattern)
    assert prefix_of("h[!ab]*") == "h"
