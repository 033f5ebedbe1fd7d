"""Where settings come from, and which make no sense together."""

from __future__ import annotations

import argparse
import socket
from typing import Any

import pytest

from persist.core.errors import InvalidUsage
from rpc.cli.serve import _maintenance
from rpc.settings import Limits, ServerSettings, from_environment


def test_variables_are_named_after_the_settings() -> None:
    found = from_environment({"PERSIST_PORT": "9", "PERSIST_INSECURE": "1", "PERSIST_HOST": "::1", "OTHER": "x"})
    assert found == {"port": 9, "insecure": True, "host": "::1"}


@pytest.mark.parametrize("variables", [{"PERSIST_PORT": "many"}, {"PERSIST_INSECURE": "perhaps"}])
def test_a_variable_that_cannot_be_read_is_named(variables: dict[str, str]) -> None:
    with pytest.raises(InvalidUsage, match=next(iter(variables))):
        from_environment(variables)


def test_each_limit_has_a_variable() -> None:
    found = from_environment({"PERSIST_LIMIT_SNAPSHOTS_MAX": "16", "PERSIST_LIMIT_HEADERS_S": "1.5"})
    assert found == {"limits": Limits(snapshots_max=16, headers_s=1.5)}


@pytest.mark.parametrize(
    ("name", "text"), [("SNAPSHOT_MAX", "1"), ("SNAPSHOTS_MAX", "1.5"), ("HEADERS_S", "soon"), ("ROWS_MAX", "-1")]
)
def test_a_variable_of_a_limit_that_cannot_be_read_is_named(name: str, text: str) -> None:
    with pytest.raises(InvalidUsage, match=f"PERSIST_LIMIT_{name}"):
        from_environment({f"PERSIST_LIMIT_{name}": text})


@pytest.mark.parametrize(
    "limits", [Limits(snapshots_max=0), Limits(share_percent=101), Limits(decoded_bytes_max=1 << 40)]
)
def test_a_limit_that_makes_no_sense_is_named(limits: Limits) -> None:
    with pytest.raises(InvalidUsage, match=r"the limit (s|decoded)"):
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
            assert _maintenance(argparse.Namespace(), settings, listener) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_no_tokens(host: str) -> None:
    ServerSettings(host=host).check()


BAD = [
    *(
        ({name: ""}, f"{name} is empty: name a file")
        for name in ("tls_certificate", "tls_key", "tls_client_ca", "tokens_file", "quotas")
    ),
    ({"presigned_s": 0}, r"presigned_s is 0; it must be in \[1, 600\] seconds"),
    ({"presigned_s": 604_800}, "presigned_s is 604800"),
]


@pytest.mark.parametrize(("given", "said"), BAD)
def test_settings_that_would_make_a_server_less_safe_than_was_meant_are_refused(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidUsage, match=said):
        ServerSettings(**{"tokens_file": "t.json", **given}).check()
