"""What a terminal sees: tables, colours, progress; how a command that follows ends; completion in bash."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import threading
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist.cli.long_running import ended_by_sigterm
from persist.cli.row_files import opened
from rpc.cli.program import COMMANDS, GROUPS, candidates, main, parser_for
from tests.support.examples import thinned
from tests.support.forked import Forked, ran, read_from
from tests.support.shells import environment
from tests.support.typed import KINDS, place_of
from tests.support.waiting import WAIT_S, wait_until

COMMAND = (sys.executable, "-m", "rpc.cli")
SCHEMA = pa.schema([("id", pa.int64()), ("state", pa.string()), ("amount", pa.float64())])


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A location in `data`, which is where commands look in the working directory."""
    monkeypatch.chdir(tmp_path)
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        orders = client.create_shard("orders", SCHEMA, ["id"])
        orders.insert([{"id": 1, "state": "new", "amount": 1.5}, {"id": 20, "state": "東京\x1b[2J", "amount": None}])
        orders.upsert([{"id": 1, "state": "a state with many words", "amount": 2.0}])
    return tmp_path


def in_terminal(*words: str, columns: int = 80, **more: str) -> tuple[str, str]:
    """What a command says to a terminal of that width, on standard output and on standard error."""
    said = []
    out, its_out = pty.openpty()
    err, its_err = pty.openpty()
    for end in (its_out, its_err):
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))
    env = {name: value for name, value in environment().items() if name not in ("NO_COLOR", "COLUMNS", "TERM")}
    with Connection(its_out, readable=False) as to_out, Connection(its_err, readable=False) as to_err:
        command = Forked(words, {**env, "TERM": "xterm", **more}, ends=(to_out, to_err))
    with command.stdout, command.stderr:
        for end in (out, err):
            text = b""
            while True:
                try:
                    piece = os.read(end, 65536)
                except OSError:  # the other side was closed
                    break
                if not piece:
                    break
                text += piece
            os.close(end)
            said.append(text.decode().replace("\r\n", "\n"))
        command.wait(WAIT_S)
    return said[0], said[1]


def test_a_terminal_gets_a_table_cut_to_its_width(directory: Path) -> None:
    out, err = in_terminal("cat", "orders", "--dir", "data", "--no-colour", columns=30)
    assert err == ""
    assert out.splitlines() == [
        "id  state               amount",
        " 1  a state with many…       2",
        r"20  東京\x1b[2J           null",
        "(2 rows, as of 1)",
    ]


def test_columns_for_which_a_terminal_has_no_room_are_named(directory: Path) -> None:
    out, _ = in_terminal("cat", "orders", "--dir", "data", "--no-colour", columns=12)
    assert out.splitlines() == [
        "id  state",
        " 1  a state…",
        r"20  東京\x1…",
        "(not shown: amount)",
        "(2 rows, as of 1)",
    ]


def test_colours_are_for_terminals_that_want_them(directory: Path) -> None:
    rows, error = ("cat", "orders", "--dir", "data"), ("cat", "missing", "--dir", "data")
    coloured, wrong = in_terminal(*rows), in_terminal(*error)
    assert "\033[" in "".join(coloured)
    assert "\033[" in "".join(wrong)
    plain = tuple(re.sub("\033\\[\\d+m", "", text) for text in coloured)
    assert plain == in_terminal(*rows, NO_COLOR="1")
    assert plain == in_terminal(*rows, "--no-colour")
    assert plain == in_terminal(*rows, TERM="dumb")
    assert in_terminal(*error, NO_COLOR="1") == tuple(re.sub("\033\\[\\d+m", "", text) for text in wrong)


def test_changes_have_signs_in_a_terminal(directory: Path) -> None:
    with persist.connect(f"persist://{directory / 'data'}") as client:
        client.shard("orders").insert([{"id": 3, "state": None, "amount": None, "__diff": 2}])
    out, _ = in_terminal("tail", "orders", "--dir", "data", "--as-of", "0", "--columns", "id,state", NO_COLOR="1")
    assert out.splitlines() == [
        '     1 + {"id":1,"state":"a state with many words"}',
        '     1 - {"id":1,"state":"new"}',
        '     2 + {"id":3,"state":null}  (2 times)',
    ]
    out, _ = in_terminal("diff", "orders", "0", "1", "--dir", "data")
    red, green = '- {"id":1,"state":"new","amount":1.5}', '+ {"id":1,"state":"a state with many words","amount":2.0}'
    assert out.splitlines() == [f"\033[32m{green}\033[0m", f"\033[31m{red}\033[0m"]


def test_an_import_shows_its_progress_and_what_came_of_it(directory: Path) -> None:
    (directory / "rows.csv").write_text("id,state,amount\n" + "".join(f"{n},{'a' * 10**6},1\n" for n in range(20)))
    out, err = in_terminal("import", "orders", "rows.csv", "--dir", "data")
    assert out == "rows.csv: 20 rows at time 2\n"
    assert re.search(r"\rrows\.csv \[#+\.+\] [\d.]+ of [\d.]+ MiB", err)
    assert err.endswith("\r" + " " * 100 + "\r")
    out, _ = in_terminal("import", "orders", "rows.csv", "--dir", "data")
    assert out == "rows.csv: already imported, at time 2\n"
    out, _ = in_terminal("create", "orders", "--schema", "id int64", "--key", "id", "--dir", "other")
    assert out == "shard orders created, ordered by id\n"
    out, _ = in_terminal("export", "orders", "few.csv", "--where", "id = 20", "--as-of", "1", "--dir", "data")
    assert out == "few.csv: 1 row, as of 1\n"


def test_bytes_are_not_written_to_a_terminal(directory: Path) -> None:
    out, err = in_terminal("cat", "orders", "--dir", "data", "--format", "parquet", NO_COLOR="1")
    assert (out, "redirect it" in err) == ("", True)


@pytest.mark.parametrize(("kind", "number"), [("directory", signal.SIGINT), ("server", signal.SIGTERM)])
def test_tail_follows_until_it_is_told_to_end(kind: str, number: signal.Signals, tmp_path: Path) -> None:
    with place_of(kind, tmp_path) as place, place.client() as client:
        shard = client.create_shard("orders", pa.schema([("id", pa.int64())]), ["id"])
        shard.insert([{"id": 1}])
        tail = Forked(["tail", "orders", "-f", *place.where], environment())
        for time in range(3):
            assert tail.stdout.readline() == f'{{"id":{time + 1},"__time":{time},"__diff":1}}\n'.encode()
            shard.insert([{"id": time + 2}])
        tail.send_signal(number)
        _, err = tail.communicate()
        assert (tail.poll(), err) == (0, "")


def test_tail_ends_by_itself_once_the_shard_is_closed(directory: Path) -> None:
    with persist.connect(f"persist://{directory / 'data'}") as client:
        client.shard("orders").advance_upper(None)
    tail = ran("tail", "orders", "-f", "--dir", "data")
    assert (tail.returncode, tail.stderr, len(tail.stdout.splitlines())) == (0, "", 4)


def test_a_reader_that_has_seen_enough_ends_a_command_quietly(directory: Path) -> None:
    reader, its_out = Pipe(duplex=False)
    err, its_err = Pipe(duplex=False)
    reader.close()
    with its_out, its_err:
        cat = Forked(["cat", "orders", "--dir", "data"], environment(), ends=(its_out, its_err))
    with err, os.fdopen(os.dup(err.fileno())) as said:
        assert said.read() == ""
    cat.communicate()
    assert cat.poll() == 1


@pytest.mark.parametrize(
    ("form", "shown"), [("csv", r'2,"\x1b[2J\x9b31m"'), ("ndjson", r'{"id":2,"state":"\u001b[2J\u009b31m"}')]
)
def test_rows_in_csv_or_ndjson_could_take_a_terminal_over(directory: Path, form: str, shown: str) -> None:
    with persist.connect(f"persist://{directory / 'data'}") as client:
        client.create_shard("texts", SCHEMA.remove(2), ["id"]).insert([{"id": 2, "state": "\x1b[2J\x9b31m"}])
    out, _ = in_terminal("cat", "texts", "--format", form, "--dir", "data")
    assert shown in out.splitlines()
    assert not set(out) & {"\x1b", "\x9b"}


def test_names_of_cursors_cannot_take_a_terminal_over(directory: Path) -> None:
    with persist.connect(f"persist://{directory / 'data'}") as client:
        client.shard("orders").critical_reader("mine\x1b[2J")
    out, _ = in_terminal("shards", "orders", "--dir", "data")
    assert r"mine\x1b[2J" in out
    assert "\x1b" not in out


# --- the list of commands


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """What a command that argparse ends prints into a pipe, after its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    return (int(ended.value.code or 0), *capsys.readouterr())


def test_help_has_a_line_for_each_command_in_five_groups(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, shown, _ = printed(capsys, "--help")
    assert re.findall(r"^    (\S+)", shown, re.MULTILINE) == list(COMMANDS)
    assert re.findall(r"^(\S.*):$", shown, re.MULTILINE) == ["options", *GROUPS]
    assert max(map(len, shown.splitlines())) < 80
    assert code == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_an_example_that_can_be_typed(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, example = printed(capsys, command, "--help")[1].split("\nexample: persist ")
    assert parser_for(command).parse_args(shlex.split(example)).command == command


def test_a_mistyped_command_is_answered_by_the_list_of_commands_and_no_guess(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, shown, said = printed(capsys, "drpo")
    assert (code, shown) == (2, "")
    assert "invalid choice: 'drpo' (choose from " in said
    assert "did you mean" not in said.lower()


# --- completion


@pytest.mark.parametrize("kind", thinned(KINDS, 2))
def test_commands_options_values_and_names_of_shards_are_completed(kind: str, tmp_path: Path) -> None:
    with place_of(kind, tmp_path) as place, place.client() as client:
        for name in ("orders", "orders-old", "eu/people"):
            client.create_shard(name, SCHEMA, ["id"])
        where = " ".join(place.where)
        for line, wanted in {
            "persist c": ["create", "cat", "clone", "check", "completion"],
            f"persist cat {where} ord": ["orders", "orders-old"],
            f"persist cat {where} eu/": ["eu/people"],
            "persist cat orders --form": ["--format"],
            "persist cat orders --format ": ["table", "ndjson", "csv", "parquet", "arrow"],
            f"persist diff orders 1 2 {where} --other e": ["eu/people"],
            "persist cat orders --limit ": [],
            "persist backup ver": ["verify"],
            "persist backup verify --de": ["--deep"],
            "persist nothing ": [],
            "": list(COMMANDS),
        }.items():
            assert candidates(line) == wanted, line


def script_of(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_bash_offers_what_the_command_says(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = "COMP_LINE='persist cat --dir data ord and more'; COMP_POINT=26; _persist; echo ${COMPREPLY[*]}\n"
    shell = subprocess.run(
        ["bash", "-c", f"persist() {{ {' '.join(COMMAND)} \"$@\"; }}\n{script_of('bash', capsys)}\n{asked}"],
        capture_output=True, text=True, timeout=WAIT_S, env=environment(),
    )  # fmt: skip
    assert (shell.stdout, shell.stderr) == ("orders\n", "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_ask_the_same_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"persist completion {shell} --line " in script_of(shell, capsys)


def test_an_import_that_is_ended_leaves_no_file_and_no_row(directory: Path) -> None:
    kept = directory / "temporary"
    kept.mkdir()
    os.mkfifo("rows")
    words = ["import", "orders", "-", "--format", "csv", "--dir", "data"]
    ended = Forked(words, environment(TMPDIR=str(kept)), before=partial(read_from, "rows"))
    with open("rows", "wb", buffering=0) as rows:
        rows.write(b"id,state,amount\n9,new,1\n")
        wait_until(lambda: any(kept.iterdir()), "a temporary file")
        ended.send_signal(signal.SIGTERM)
        printed, _ = ended.communicate()
    assert (ended.poll(), printed) == (130, "")
    assert list(kept.iterdir()) == []
    with persist.connect(f"persist://{directory / 'data'}") as client:
        assert client.shard("orders").count("id = 9") == 0


def test_an_import_notices_a_signal_that_arrives_just_before_it_reads(tmp_path: Path) -> None:
    """As from another thread: Python knows of the signal, and no call of the main thread is interrupted."""
    rows = tmp_path / "rows"
    os.mkfifo(rows)
    writer = os.fdopen(os.open(rows, os.O_RDWR), "wb")
    end = threading.Timer(WAIT_S, writer.close)
    try:
        threading.Timer(0.1, signal.raise_signal, (signal.SIGTERM,)).start()
        end.start()
        with ended_by_sigterm(), pytest.raises(KeyboardInterrupt), opened([str(rows)], "csv"):
            pytest.fail("a pipe that nobody writes to was read to its end")
    finally:
        end.cancel()
        writer.close()


@pytest.mark.parametrize(
    "words",
    [
        ["create", "t", "--schema", "a int64, b int64", "--key", "a", "--key", "b"],
        ["erase", "start", "t", "--where", "a = 1", "--where", "b = 1"],
        ["cat", "t", "--columns=a", "--columns", "b"],
        ["cat", "t", "--lim", "1"],
    ],
    ids=" ".join,
)
def test_an_option_with_one_value_is_given_once_and_in_full(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one counted: an erasure left rows, and a table had another key."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "given twice" in (said := capsys.readouterr().err) or "unrecognized arguments: --lim" in said
