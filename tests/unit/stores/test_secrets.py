"""What stores must not do: repeat secrets, or send anything from a forked child."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from blob import BlobError, BlobMisconfigured, open_blob
from blob.arrow_fs import ArrowFsBlob
from consensus import ConsensusError, ConsensusUsage, open_consensus
from persist.client.arguments import normalize_url
from persist.client.client import Connection
from persist.commit.location import check_there
from persist.core.errors import PersistError
from persist.regions.region_index import check_server
from rpc.cli.program import COMMANDS, main, parser_for
from rpc.settings import ServerSettings
from tests.support.examples import thinned

SECRET = "hunter2"
SCHEMES = ["persist", "file", "s3", "gs", "abfs", "hdfs", "sqlite", "postgresql", "postgres", "etcd", "http", "ftp"]
PASSWORDS = [one.format(char, SECRET) for char in "/@%#?:[ \\&=℀" for one in ("p{0}{1}", "1{0}{1}", "{1}{0}x")]
FORMS = {
    "before the host": "{scheme}://bob:{password}@127.0.0.1:1/x",
    "no host": "{scheme}://bob:{password}@/x",
    "a bad port": "{scheme}://bob:{password}@127.0.0.1:1x/x",
    "no @": "{scheme}://bob:{password}",
    "as an option": "{scheme}://127.0.0.1:1/x?password={password}",
    "as an option behind others": "{scheme}://127.0.0.1:1/x?cache_mb=1&user=bob&password={password}",
    "without slashes": "{scheme}:bob:{password}@host",
}


USES: dict[str, Callable[[str], object]] = {
    "blob": lambda url: open_blob(url, makes=False),
    "consensus": lambda url: open_consensus(url, reads_only=True),
    "server": normalize_url,
    "server of an index": check_server,
    "what is there": check_there,
    "connection": lambda url: repr(Connection(url)),
    "settings": lambda url: repr(ServerSettings(blob=url, consensus=url)),
}


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that a trace of it shows."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def told(use: Callable[[str], object], url: str) -> str:
    """All that is said of a location. One that is opened says where it is."""
    try:
        opened = use(url)
    except (BlobError, ConsensusError, PersistError) as error:
        return " ".join(f"{one!r} {one}" for one in causes(error))
    if isinstance(opened, str) or opened is None:
        return str(opened)
    opened.close()  # type: ignore[attr-defined]
    return f"{opened.url} {opened!r}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("form", FORMS)
def test_no_message_tells_a_password(use: str, form: str, caplog: pytest.LogCaptureFixture) -> None:
    """A22: an unescaped slash in the password of a database showed the rest of it."""
    caplog.set_level(logging.INFO)
    for scheme in SCHEMES:
        for password in PASSWORDS:
            if form == "no @" and ("@" in password or password.startswith(("1/", "1#", "1?"))):
                continue  # what stands there is a host, or a host, a port and a path
            url = FORMS[form].format(scheme=scheme, password=password)
            assert SECRET not in told(USES[use], url), url
    assert SECRET not in caplog.text


Taken = tuple[list[str], str, list[str]]
SHARED = ("--blob", "--consensus", "--url")
URLS = [
    "postgresql://bob:p/hunter2@127.0.0.1:1/x",
    "s3://AKIA:hunter2@bucket/x",
    "s3://bucket/x?secret_key=hunter2",
    "http://bob:hunter2@127.0.0.1:1",
]


def arguments_of(command: str) -> Iterator[Taken]:
    """Each argument of a command that takes URLs: the words before it, its name, and what the command needs beside."""
    (commands,) = (one for one in parser_for(command)._actions if isinstance(one, argparse._SubParsersAction))
    parsers: list[tuple[list[str], argparse.ArgumentParser]] = [([command], commands.choices[command])]
    for words, parser in parsers:
        needed: list[str] = []
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += [([*words, name], one) for name, one in action.choices.items()]
            elif action.required:
                needed += [f"{action.option_strings[0]}=a"] if action.option_strings else ["a"]
        for action in parser._actions:
            if action.metavar in ("URL", "URLS"):
                yield words, action.option_strings[0], [one for one in needed if one not in action.option_strings]


ARGUMENTS = [one for command in COMMANDS for one in arguments_of(command)]


def test_there_are_commands_that_take_urls() -> None:
    assert {"--home-blob", "--older-consensus", "--write", "--to", "--of", *SHARED} <= {
        name for _, name, _ in ARGUMENTS
    }


@pytest.mark.parametrize("taken", thinned(ARGUMENTS, 4), ids=lambda taken: " ".join(taken[0]) + taken[1])
def test_no_command_tells_a_password(
    taken: Taken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words, name, needed = taken
    for url in URLS[:1] if name in SHARED else URLS:
        both = {"--blob": url, "--consensus": url} if name in ("--blob", "--consensus") else {name: url}
        given = [*words, *(f"{one}={value}" for one, value in both.items()), *needed]
        with suppress(SystemExit):
            assert main(given) != 0
        assert SECRET not in "".join(capsys.readouterr()), given


@pytest.mark.parametrize("url", URLS)
def test_what_is_no_argument_is_told_without_its_password(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["shards", "--consenus", url],
        ["shards", f"--consenus={url}"],
        ["shards", url],
        [url],
        ["inspect", "state", url],
        ["inspect", "usage", url],
        ["check", "--quick", "--tokens", url],
    ):
        with suppress(SystemExit):
            assert main(words) != 0
        assert SECRET not in "".join(capsys.readouterr()), words


SIGNED = "abfs://c@acc.dfs.core.windows.net/p?sv=2022-11-02&sig=hunter2%2Bxyz%3D"


@pytest.mark.parametrize("error", [OSError, PermissionError, FileNotFoundError])
@pytest.mark.parametrize("shown", ["hunter2%2Bxyz%3D", "hunter2+xyz=", "hunter2+xyz%3D", "hunter2%2Bxyz="])
def test_what_a_library_says_of_its_own_url_during_a_call_told_a_signature(shown: str, error: type[OSError]) -> None:
    class Away:
        type_name = "abfs"

        def get_file_info(self, _: object) -> object:
            raise error(
                f"Check of 'https://acc.blob.core.windows.net/c?sig={shown}&sv=2022-11-02' failed. No such host"
            )

    blob = ArrowFsBlob(Away(), "c/p", "abfs://c@acc.dfs.core.windows.net/p", SIGNED)
    with pytest.raises(BlobError) as found:
        blob.stat("check/1")
    said = [str(one) for one in causes(found.value)]
    assert not any("hunter2" in one for one in said), said
    assert error is FileNotFoundError or "No such host" in said[0], "the cause is told all the same"


# --- stores that have connections say so when a forked child uses them; nothing is sent

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

NOBODY = "127.0.0.1:1"


def in_a_fork(check: Callable[[], None]) -> bool:
    """Whether `check` passes in a forked child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("url", ["sqlite:///{}/c.db", f"postgresql://u:p@{NOBODY}/d", f"etcd://{NOBODY}/p"])
def test_a_consensus_store_is_not_for_a_forked_child(url: str, tmp_path: Path) -> None:
    with closing(open_consensus(url.format(tmp_path))) as store:
        if url.startswith("sqlite"):
            assert store.compare_and_set("k", 1, b"x")

        def check() -> None:
            for call in (lambda: store.head("k"), lambda: store.compare_and_set("k", 2, b"x")):
                with pytest.raises(ConsensusUsage, match="fork"):
                    call()

        assert in_a_fork(check)


def test_a_bucket_is_not_for_a_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with closing(open_blob(f"s3://bucket?endpoint=http://{NOBODY}&region=r")) as store:

        def check() -> None:
            for call in (lambda: store.get("k"), lambda: store.put("k", b"x"), lambda: list(store.list(""))):
                with pytest.raises(BlobMisconfigured, match="fork"):
                    call()
            store.close()

        assert in_a_fork(check)


def test_files_are_for_everybody(tmp_path: Path) -> None:
    store = open_blob(f"file://{tmp_path}")
    store.put("a", b"parent")

    def check() -> None:
        assert store.get("a") == b"parent"
        store.put("b", b"child")

    assert in_a_fork(check)
    assert store.get("b") == b"child"
