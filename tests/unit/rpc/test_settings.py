"""Where settings come from, and which make no sense together."""

from __future__ import annotations

import socket
from dataclasses import fields
from typing import Any

import pytest

from persist.core.errors import InvalidUsage
from rpc.cli.serve import _maintenance
from rpc.config_file import load
from rpc.settings import Limits, ServerSettings


def test_variables_are_named_after_the_settings() -> None:
    variables = {"PERSIST_PORT": "9", "PERSIST_INSECURE": "1", "PERSIST_HOST": "::1", "OTHER": "x"}
    assert load({}, variables).settings == ServerSettings(port=9, insecure=True, host="::1")


@pytest.mark.parametrize(
    "variables", [{"PERSIST_PORT": "many"}, {"PERSIST_PORT": "70000"}, {"PERSIST_INSECURE": "perhaps"}]
)
def test_a_variable_that_cannot_be_read_is_named(variables: dict[str, str]) -> None:
    with pytest.raises(InvalidUsage, match=next(iter(variables))):
        load({}, variables)


def test_each_limit_has_a_variable() -> None:
    settings = load({}, {"PERSIST_LIMIT_SNAPSHOTS_MAX": "16", "PERSIST_LIMIT_HEADERS_S": "1.5"}).settings
    assert settings == ServerSettings(limits=Limits(snapshots_max=16, headers_s=1.5))


def test_no_more_limits_are_settings_than_an_operator_has_a_reason_to_change() -> None:
    assert len(fields(Limits)) <= 15


@pytest.mark.parametrize(
    ("name", "text"), [("SNAPSHOT_MAX", "1"), ("SNAPSHOTS_MAX", "1.5"), ("HEADERS_S", "soon"), ("ROWS_MAX", "-1")]
)
def test_a_variable_of_a_limit_that_cannot_be_read_is_named(name: str, text: str) -> None:
    with pytest.raises(InvalidUsage, match=f"PERSIST_LIMIT_{name}"):
        load({}, {f"PERSIST_LIMIT_{name}": text})


STORES = {"PERSIST_BLOB": "mem:a", "PERSIST_CONSENSUS": "mem:b"}


@pytest.mark.parametrize(
    ("options", "variables", "location"),
    [
        ({"directory": "d"}, STORES, ("d", None, None)),
        ({"blob": "mem:c"}, STORES, (None, "mem:c", "mem:b")),
        ({"consensus": "mem:c"}, {**STORES, "PERSIST_DIRECTORY": "d"}, (None, "mem:a", "mem:c")),
        ({"blob": "mem:c", "consensus": "mem:c"}, {"PERSIST_DIRECTORY": "d"}, (None, "mem:c", "mem:c")),
        ({}, {"PERSIST_DIRECTORY": "d"}, ("d", None, None)),
    ],
)
def test_an_option_takes_the_place_of_the_location_of_the_environment(
    options: dict[str, Any], variables: dict[str, str], location: tuple[str | None, ...]
) -> None:
    settings = load(options, variables).settings
    assert (settings.directory, settings.blob, settings.consensus) == location


@pytest.mark.parametrize("limits", [Limits(snapshots_max=0), Limits(headers_s=0.0), Limits(decoded_bytes_max=1 << 50)])
def test_a_limit_that_makes_no_sense_is_named(limits: Limits) -> None:
    with pytest.raises(InvalidUsage, match=r"limits\.(s|h|decoded).* must be in"):
        ServerSettings(limits=limits).check()


@pytest.mark.parametrize(
    "settings",
    [
        ServerSettings(blob="mem:"),
        ServerSettings(directory="d", blob="mem:", consensus="mem:"),
        ServerSettings(port=70_000),
        ServerSettings(tls_certificate="missing.pem", tls_key="missing.pem"),
        ServerSettings(tls_certificate=__file__, tls_key=__file__),
        ServerSettings(tls_key="key.pem"),
        ServerSettings(host="0.0.0.0"),
        ServerSettings(host="example.org"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: ServerSettings) -> None:
    with pytest.raises(InvalidUsage):
        settings.check()


@pytest.mark.parametrize(
    ("settings", "is_in_memory"),
    [
        (ServerSettings(blob="mem:x", consensus="mem:x"), True),
        (ServerSettings(blob="MEM:", consensus="sqlite:///d.db"), True),
        (ServerSettings(blob="file:///mem:", consensus="sqlite:///d.db"), False),
        (ServerSettings(directory="mem:"), False),
    ],
)
def test_maintenance_of_its_own_is_not_started_for_stores_in_memory(
    settings: ServerSettings, is_in_memory: bool
) -> None:
    """Another process finds other stores there: it ended at once, and was started again for ever."""
    assert settings.in_memory == is_in_memory
    if is_in_memory:
        with socket.socket() as listener:
            assert _maintenance(settings, listener) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_no_tokens(host: str) -> None:
    ServerSettings(host=host).check()


BAD = [
    *(
        ({name: ""}, f"{name} is empty: name a file")
        for name in ("tls_certificate", "tls_key", "tls_client_ca", "tokens_file", "quotas")
    ),
    ({"presigned_s": 0}, r"presigned_s is 0 and must be in \[1, 600\]"),
    ({"presigned_s": 604_800}, "presigned_s is 604800"),
]


@pytest.mark.parametrize(("given", "said"), BAD)
def test_settings_that_would_make_a_server_less_safe_than_was_meant_are_refused(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidUsage, match=said):
        ServerSettings(**{"tokens_file": "t.json", **given}).check()
