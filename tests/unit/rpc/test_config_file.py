"""Settings of a server: the file, the environment and options, and what makes no sense together."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from persist.core.errors import InvalidUsage
from persist.core.ids import WriterId
from persist.core.state import Policy
from rpc.cli import serve
from rpc.cli.serve import _maintenance
from rpc.concurrency_limits import Work
from rpc.config_file import ENVIRONMENT, FILE, OPTION, LoadedConfig, effective_settings, load, misspelt, read_file
from rpc.settings import SETTINGS, Limits, ServerSettings, Setting, server_settings
from tests.support import settings_page
from tests.support.location import client_of, memory_location
from tests.support.shard import first_write, numbered

GOOD = """
# of a server behind a balancer
host = "0.0.0.0"
port = 9000
insecure = true
history = "30d"

[limits]
snapshots_max = 16
headers_s = 1.5

[levers]
linger_ms = 2
inline_batches = 128
"""

BAD = {
    "prot = 9000": r"line 1: prot is not a setting of the part before the first table; did you mean port\?",
    "nonsense = 1": r"line 1: nonsense is not a setting of the part before the first table$",
    "linger_ms = 1": r"line 1: linger_ms is not a setting .*; it belongs to \[levers\]",
    "[levers]\n\nport = 1": r"line 3: levers.port is not a setting of \[levers\]; it belongs to the part before",
    "[limit]\nrows_max = 1": r"line 1: limit is not a known table; did you mean limits\?",
    "limits = 3": r"line 1: limits is 3 and must be a table",
    'port = "9000"': r"line 1: port is '9000' and must be an integer in \[0, 65535\]",
    "port = 9000.0": r"line 1: port is 9000.0 and must be an integer",
    "port = " + 5_000 * "9": r"has an unreadable value: ",
    "port = true": r"line 1: port is true and must be an integer",
    "port = 65536": r"line 1: port is 65536 and must be in \[0, 65535\]",
    "insecure = 1": r"line 1: insecure is 1 and must be true or false",
    "host = 1": r"line 1: host is 1 and must be a string",
    'host = ""': r"line 1: host is empty: give a value, or leave it out",
    'host = ["a"]': r"line 1: host is \['a'\] and must be a string",
    "host = 1979-05-27": r"line 1: host is .* and must be a string",
    "[host]\na = 1": r"line 1: host is .* and must be a string",
    'home_token = "x"': r"line 1: home_token is a secret: set the variable PERSIST_HOME_TOKEN",
    "[limits]\nrows_max = 0": r"line 2: limits.rows_max is 0 and must be in \[1, ",
    "[limits]\nshare_percent = 1": r"line 2: limits.share_percent is not a setting of \[limits\]",
    '[limits]\nheaders_s = "soon"': r"line 2: limits.headers_s is 'soon' and must be a number in",
    "[limits]\nheaders_s = nan": r"line 2: limits.headers_s is nan and must be in",
    "[limits]\nsnapshot_max = 1": r"line 2: limits.snapshot_max is not a setting of .*; did you mean snapshots_max\?",
    "limits.rows_max = -1": r"line 1: limits.rows_max is -1 and must be in",
    "levers = { linger_ms = -1 }": r"line 1: levers.linger_ms is -1 and must be in \[0, 1000\]",
    "port = 1\nport = 2\n": r"is not TOML: .*\(at line 2",
    "port 1": r"is not TOML: .*\(at line 1",
}
NUMBERS = [one for one in SETTINGS if one.kind is int]


def named(name: str) -> Setting:
    [setting] = [one for one in SETTINGS if one.name == name]
    return setting


def written(directory: Path, text: str) -> str:
    path = directory / "persist.toml"
    path.write_text(text)
    return str(path)


def test_what_a_file_says_is_what_variables_say(tmp_path: Path) -> None:
    settings = load({}, {}, written(tmp_path, GOOD)).settings
    assert settings == ServerSettings(
        host="0.0.0.0",
        port=9000,
        insecure=True,
        history="30d",
        limits=Limits(snapshots_max=16, headers_s=1.5),
        linger_ms=2,
        policy=Policy(inline_batches=128),
    )
    settings.check()


@pytest.mark.parametrize("text", BAD)
def test_what_is_not_allowed_is_refused_with_file_line_and_key(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidUsage) as refused:
        read_file(path)
    assert str(refused.value).startswith(path)
    assert re.search(BAD[text], str(refused.value)), str(refused.value)


@pytest.mark.parametrize(
    ("data", "said"), [(b"\xff", "is not UTF-8"), (b"#" * (2**20 + 1), "has more than"), (None, "cannot be read")]
)
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes | None, said: str) -> None:
    path = tmp_path / "persist.toml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidUsage, match=said):
        read_file(str(path))


def test_every_setting_but_secrets_can_stand_in_a_file_and_is_read_back(tmp_path: Path) -> None:
    shown = "\n".join(effective_settings(LoadedConfig(ServerSettings(), {})))
    known = {one for one in SETTINGS if not one.is_secret and f"# {one.name} is not set" not in shown}
    assert read_file(written(tmp_path, shown)).keys() == known


def test_a_file_comes_before_the_environment_and_its_location_takes_the_place_of_another(tmp_path: Path) -> None:
    environment = {"PERSIST_PORT": "1", "PERSIST_DIRECTORY": "d", "PERSIST_INSECURE": "1", "OTHER": "x"}
    settings = load({}, environment, written(tmp_path, "port = 2")).settings
    assert settings == ServerSettings(port=2, directory="d", insecure=True)
    settings = load({}, environment, written(tmp_path, 'blob = "mem:"\nconsensus = "mem:"')).settings
    assert settings == ServerSettings(port=1, blob="mem:", consensus="mem:", insecure=True)


def test_each_line_of_what_is_in_force_says_where_it_comes_from() -> None:
    settings = ServerSettings(port=1, host="h", history="1d", blob="s3://key:secret@bucket/x", home_token="t" * 40)
    sources = {named("port"): OPTION, named("host"): FILE, named("history"): ENVIRONMENT}
    lines = list(effective_settings(LoadedConfig(settings, sources)))
    assert 'host = "h"  # the file' in lines
    assert {"port = 1  # an option", 'history = "1d"  # the environment', "shutdown_s = 30  # default"} <= set(lines)
    assert "# home_token: set" in lines
    assert "secret" not in "\n".join(lines)


def test_a_misspelt_variable_is_told_with_the_nearest_name() -> None:
    names = ["PERSIST_PROT", "PERSIST_LIMIT_SNAPSHOT_MAX", "PERSIST_LEVERS_LINGER_MS", "PERSIST_PORT", "PERSIST_TOKEN"]
    names += ["PERSIST_SERVICE_HOST", "PERSIST_PORT_8787_TCP_ADDR", "OTHER"]  # as Kubernetes sets them for a service
    assert misspelt(names) == [
        ("PERSIST_LEVERS_LINGER_MS", "PERSIST_LEVER_LINGER_MS"),
        ("PERSIST_LIMIT_SNAPSHOT_MAX", "PERSIST_LIMIT_SNAPSHOTS_MAX"),
        ("PERSIST_PROT", "PERSIST_PORT"),
    ]


@pytest.mark.parametrize(("variables", "said"), [
    ({"PERSIST_LEVER_LINGER": "1"}, r"PERSIST_LEVER_LINGER; did you mean PERSIST_LEVER_LINGER_MS\?; docs/"),
    ({"PERSIST_LEVER_NONE": "1"}, "nothing reads the variable PERSIST_LEVER_NONE.*; docs/settings.md"),
    ({"PERSIST_LEVER_LINGER_MS": "-1"}, r"PERSIST_LEVER_LINGER_MS is '-1' and must be .* in \[0, 1000\]"),
    ({"PERSIST_LIMIT_SNAPSHOT_MAX": "1"}, r"did you mean PERSIST_LIMIT_SNAPSHOTS_MAX\?; docs/settings.md"),
    *[({name: value}, name) for name, value in
      [("PERSIST_PORT", "many"), ("PERSIST_PORT", "70000"), ("PERSIST_INSECURE", "perhaps")]],
])  # fmt: skip
def test_a_variable_that_cannot_be_read_is_named(variables: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidUsage, match=said):
        load({}, variables)


def test_check_shows_what_is_in_force_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    monkeypatch.setattr(os, "environ", {"PERSIST_PORT": "1", "PERSIST_SHUTDOWN_S": "3"})
    path = written(tmp_path, 'port = 2\nhistory = "2d"\n[levers]\nlinger_ms = 4\n')
    assert serve.run(parser.parse_args(["--config", path, "--check", "--history", "3d", "--dir", str(tmp_path)])) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {"port = 2  # the file", 'history = "3d"  # an option', "linger_ms = 4  # the file"} <= set(shown)
    assert {"shutdown_s = 3  # the environment", f'directory = "{tmp_path}"  # an option'} <= set(shown)
    with pytest.raises(InvalidUsage, match="without tokens"):
        serve.run(parser.parse_args(["--config", written(tmp_path, 'host = "0.0.0.0"'), "--check"]))


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("name", ["tokens_file", "quotas"])
def test_check_refuses_a_file_with_which_no_server_could_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(os, "environ", {})
    config = written(tmp_path, f'{name} = "{tmp_path / "none.json"}"')
    with pytest.raises(InvalidUsage, match=r"file .*none\.json cannot be read"):
        serve.run(parsed("--config", config, "--check"))
    assert capsys.readouterr().out == ""


def test_check_shows_the_default_directory_and_tells_of_a_misspelt_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", {"PERSIST_PROT": "1"})
    assert serve.run(parsed("--check")) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == 'directory = "persist-data"  # default'
    assert shown[-1] == "# nothing reads the variable PERSIST_PROT: did you mean PERSIST_PORT?"


def test_settings_of_a_program_have_the_ranges_of_a_file() -> None:
    for setting in NUMBERS:
        with pytest.raises(InvalidUsage, match=setting.name):
            server_settings({setting: int(setting.most) + 1}).check()


def test_a_server_that_lingers_commits_together_what_comes_meanwhile() -> None:
    with closing(memory_location()) as location, closing(Work(Limits(), linger_s=0.05)) as work:
        client_of(location).create_shard("orders", pa.schema([("id", pa.int64())]), key=["id"])
        machine = location.machine("orders")

        async def both() -> None:
            async def later(number: int) -> object:
                await asyncio.sleep(0.005 * number)
                return await work.apply(machine, first_write(WriterId(numbered("w", number))))

            await asyncio.gather(*(later(number) for number in range(1, 4)))

        before = machine.state().seqno
        asyncio.run(both())
        assert machine.state().seqno == before + 1


def test_the_page_of_settings_is_that_of_the_code() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page(), "run `make docs`"


# --- where settings come from, and which make no sense together


def test_no_more_limits_are_settings_than_an_operator_has_a_reason_to_change() -> None:
    assert len(fields(Limits)) <= 15


STORES = {"PERSIST_BLOB": "mem:a", "PERSIST_CONSENSUS": "mem:b"}


@pytest.mark.parametrize(("options", "variables", "location"), [
    ({"directory": "d"}, STORES, ("d", None, None)),
    ({"blob": "mem:c"}, STORES, (None, "mem:c", "mem:b")),
    ({"consensus": "mem:c"}, {**STORES, "PERSIST_DIRECTORY": "d"}, (None, "mem:a", "mem:c")),
    ({"blob": "mem:c", "consensus": "mem:c"}, {"PERSIST_DIRECTORY": "d"}, (None, "mem:c", "mem:c")),
    ({}, {"PERSIST_DIRECTORY": "d"}, ("d", None, None)),
])  # fmt: skip
def test_an_option_takes_the_place_of_the_location_of_the_environment(
    options: dict[str, Any], variables: dict[str, str], location: tuple[str | None, ...]
) -> None:
    settings = load(options, variables).settings
    assert (settings.directory, settings.blob, settings.consensus) == location


@pytest.mark.parametrize(("given", "said"), [
    ({"blob": "mem:"}, None),
    ({"directory": "d", "blob": "mem:", "consensus": "mem:"}, None),
    ({"port": 70_000}, "port"),
    ({"tls_certificate": "missing.pem", "tls_key": "missing.pem"}, "the TLS files"),
    ({"tls_certificate": __file__, "tls_key": __file__}, "the TLS files"),
    ({"tls_key": "key.pem"}, None),
    ({"host": "0.0.0.0"}, "without tokens"),
    ({"host": "example.org"}, "without tokens"),
    ({"policy": Policy(rollup_every=8)}, r"rollup_every is 8 and must be in \[32, "),
    ({"policy": Policy(inline_shard_bytes_max=1_000)}, "inline_part_bytes_max is 65536; it must be at most inline_sh"),
    ({"limits": Limits(snapshots_max=0)}, r"limits\.snapshots_max.* must be in"),
    ({"limits": Limits(headers_s=0.0)}, r"limits\.headers_s.* must be in"),
    ({"limits": Limits(decoded_bytes_max=1 << 50)}, r"limits\.decoded.* must be in"),
    *[({"tokens_file": "t.json", name: ""}, f"{name} is empty: set it to a file")
      for name in ("tls_certificate", "tls_key", "tls_client_ca", "tokens_file", "quotas")],
    ({"tokens_file": "t.json", "presigned_s": 0}, r"presigned_s is 0 and must be in \[1, 600\]"),
    ({"tokens_file": "t.json", "presigned_s": 604_800}, "presigned_s is 604800"),
])  # fmt: skip
def test_settings_that_make_no_sense_or_are_less_safe_than_was_meant_are_refused(
    given: dict[str, Any], said: str | None
) -> None:
    with pytest.raises(InvalidUsage, match=said):
        ServerSettings(**given).check()


@pytest.mark.parametrize(("settings", "is_in_memory"), [
    (ServerSettings(blob="mem:x", consensus="mem:x"), True),
    (ServerSettings(blob="MEM:", consensus="sqlite:///d.db"), True),
    (ServerSettings(blob="file:///mem:", consensus="sqlite:///d.db"), False),
    (ServerSettings(directory="mem:"), False),
])  # fmt: skip
def test_maintenance_of_its_own_is_not_started_for_stores_in_memory(
    settings: ServerSettings, is_in_memory: bool
) -> None:
    """Another process finds other stores there: it ended at once, and was started again for ever."""
    assert settings.in_memory == is_in_memory
    if is_in_memory:
        with socket.socket() as listener:
            assert _maintenance(settings, listener) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_no_tokens(host: str) -> None:
    ServerSettings(host=host).check()
