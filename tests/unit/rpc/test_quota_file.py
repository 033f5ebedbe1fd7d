"""The file of quotas: what it may say, and that a bad one leaves the last good one in force."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from persist.core.errors import InvalidUsage
from rpc.quota_file import COUNTS, RATES, QuotaFile, read
from tests.support.pages import page

BAD: list[tuple[Any, str]] = [
    (b"", "is not JSON"),
    (b"[" * 100_000, "is not JSON"),
    ([], "is not of the form"),
    ({"token": {}}, "has 'token'; it may have ask, default, tokens, prefixes"),
    (b'{"default": {}, "default": {}}', "is not JSON"),
    ({"default": []}, "must be an object such as"),
    ({"default": {"request_per_s": 1}}, "has the quota 'request_per_s'; there it can be requests_per_s, rows_per_s"),
    ({"tokens": {"etl": {"shards": 1}}}, "has the quota 'shards'; there it can be requests_per_s, rows_per_s"),
    ({"prefixes": {"eu/": {"rows_per_s": 1}}}, "has the quota 'rows_per_s'; there it can be shards, bytes"),
    ({"default": {"requests_per_s": 0}}, "requests_per_s of default in .* is 0; it must be a whole number from 1 on"),
    ({"prefixes": {"eu/": {"shards": -1}}}, "it must be a whole number from 0 on, or null"),
    ({"prefixes": {"eu/": {"shards": True}}}, "is True; it must be a whole number"),
    ({"prefixes": {"eu/": {"shards": 1.5}}}, "is 1.5; it must be a whole number"),
    ({"default": {"rows_per_s": 2**60}}, "it must be a whole number"),
    ({"tokens": []}, "must be an object of quotas by name"),
    ({"tokens": {"a_b": {}}}, "'a_b' in .* is no id of a token"),
    ({"tokens": {"a": 7}}, "tokens 'a' in .* must be an object"),
    ({"prefixes": {"": {}}}, "is no prefix of the names of shards"),
    ({"prefixes": {"a b": {}}}, "is no prefix of the names of shards"),
    ({"ask": ""}, "ask in .* must be a text"),
    ({"ask": "a\nb"}, "ask in .* must be a text"),
    ({"tokens": {f"t{n}": {} for n in range(10_001)}}, "tokens in .* are 10001; at most 10000 are possible"),
]


def written(path: Path, content: Any) -> str:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


@pytest.mark.parametrize(("content", "said"), BAD)
def test_bad_files_are_refused_by_a_sentence_that_names_the_place(content: Any, said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "quotas.json", content)
    with pytest.raises(InvalidUsage, match=said) as refused:
        read(path)
    assert path in str(refused.value)


def test_what_is_no_regular_file_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "nowhere"):
        with pytest.raises(InvalidUsage, match="cannot be read"):
            read(str(tmp_path / name))


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(mode: int, tmp_path: Path) -> None:
    """They would give themselves what they like."""
    path = written(tmp_path / "quotas.json", {"default": {"rows_per_s": 1}})
    os.chmod(path, mode)
    with pytest.raises(InvalidUsage, match=f"the mode {mode:04o}, so others may write it: run chmod go-w {path}"):
        read(path)


def test_a_token_has_the_defaults_but_for_what_its_entry_says(tmp_path: Path) -> None:
    every = dict.fromkeys(RATES, 5)
    found = read(
        written(
            tmp_path / "quotas.json",
            {
                "default": every,
                "tokens": {"etl": {"requests_per_s": 9, "rows_per_s": None}},
                "prefixes": {"eu/": {"shards": None}},
            },
        )
    )
    assert found.of_token("anybody-else") == every
    assert found.of_token("etl") == {"requests_per_s": 9}
    assert found.of_prefix("eu/") == {}


def test_a_bad_file_keeps_the_last_good_one_and_says_so_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now = tmp_path / "quotas.json", [0.0]
    file = QuotaFile(written(path, {"default": {"rows_per_s": 1}}), lambda: now[0])
    written(path, {"default": {"rows_per_s": 20}})
    assert not file.look(), "it has just looked"
    now[0] += 1
    assert file.look()
    assert file.rules.of_token("a") == {"rows_per_s": 20}
    for content in (b'{"default": {"sha', b""):
        written(path, content)
        now[0] += 1
        with caplog.at_level(logging.ERROR):
            assert not file.look()
        assert file.rules.of_token("a") == {"rows_per_s": 20}
        assert "is not JSON" in file.unreadable
    assert [record.message for record in caplog.records] == ["the file of quotas is bad: the quotas before it hold"] * 2
    path.unlink()
    now[0] += 1
    assert not file.look()
    assert "cannot be read" in file.unreadable
    written(path, {})
    now[0] += 1
    assert file.look()
    assert (file.rules.of_token("a"), file.unreadable) == ({}, "")


def test_quotas_of_tokens_bind_nobody_where_there_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, now = tmp_path / "quotas.json", [0.0]
    for rules in ({"default": {"rows_per_s": 1}}, {"tokens": {"etl": {"rows_per_s": 1}}}):
        with pytest.raises(InvalidUsage, match="knows no token: give --tokens FILE"):
            QuotaFile(written(path, rules), lambda: now[0], has_tokens=False)
        QuotaFile(written(path, rules), lambda: now[0])
    prefixes = {"prefixes": {"eu/": {"shards": 1}}}
    file = QuotaFile(written(path, prefixes), lambda: now[0], has_tokens=False)
    written(path, {**prefixes, "default": {"rows_per_s": 20}})
    now[0] += 1
    assert file.look()
    assert [record.levelname for record in caplog.records if "bind nobody" in record.message] == ["WARNING"]


def test_the_page_names_every_quota_and_its_example_can_be_read(tmp_path: Path) -> None:
    text = page("docs/operations.md")
    section = text[text.index("## Quotas") : text.index("## Audit")]
    assert set(re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)) == {*RATES, *COUNTS}
    example = section[section.index("```json") + 7 : section.index("```", section.index("```json") + 7)]
    found = read(written(tmp_path / "quotas.json", example.encode()))
    assert found.ask == "ops@example.org"
    assert found.of_token("etl") == {"rows_per_s": 100_000}
