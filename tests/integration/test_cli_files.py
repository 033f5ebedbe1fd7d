"""What an attack on commands, their arguments and their files found. Each test is named by what was wrong."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import persist
from persist.cli import row_files
from persist.core.errors import InvalidUsage
from rpc.auth import Tokens
from rpc.cli.program import main
from tests.support.forked import Forked, close_stream, print_ascii, ran
from tests.support.shells import environment
from tests.support.waiting import WAIT_S

FILE = ("--file", "tokens.json")


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Path:
    columns = pa.schema([pa.field("id", pa.int64(), nullable=False), ("state", pa.string())])
    directory = tmp_path_factory.mktemp("location") / "persist-data"
    with persist.connect(f"persist://{directory}") as client:
        client.create_shard("orders", columns, ["id"]).insert([{"id": 1, "state": "new"}])
    return directory


@pytest.fixture(autouse=True)
def here(location: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory: it has a location where commands look for one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(location, "persist-data")


def connected() -> persist.Client:
    return persist.connect(f"persist://{Path.cwd() / 'persist-data'}")


# --- tokens


def test_a_bad_token_can_be_revoked(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tokens.json").write_text(json.dumps({"tokens": [{"id": "bad", "prefixes": [""]}]}))
    assert main(["token", "revoke", "bad", *FILE]) == 0
    Tokens("tokens.json", now_s=lambda: 0.0)


def test_tokens_that_were_minted_at_once_were_lost() -> None:
    minting = [Forked(["token", "create", f"t{n}", *FILE], environment()) for n in range(4)]
    minted = [one.communicate()[0].strip() for one in minting]
    known = Tokens("tokens.json", now_s=lambda: 0.0)
    assert [known.principal(f"Bearer {one}").name for one in minted] == ["t0", "t1", "t2", "t3"]


def test_a_link_to_a_tokens_file_was_replaced_and_locked_apart(capsys: pytest.CaptureFixture[str]) -> None:
    Path("kept").mkdir()
    Path("tokens.json").symlink_to("kept/real.json")
    for name in ("one", "two"):
        assert main(["token", "create", name, *FILE]) == 0
    assert Path("tokens.json").is_symlink()
    assert sorted(os.listdir("kept")) == [".real.json.lock", "real.json"]
    assert Path("kept/real.json").stat().st_mode & 0o777 == 0o600


# --- files of an export


def export(name: str, *more: str) -> int:
    return main(["export", "orders", name, "--format", "csv", *more])


ROWS = b'"id","state"\n1,"new"\n'


def test_an_export_replaced_a_symbolic_link() -> None:
    Path("target.csv").write_text("before")
    Path("link.csv").symlink_to("target.csv")
    Path("dangling.csv").symlink_to("made.csv")
    for link, target in (("link.csv", "target.csv"), ("dangling.csv", "made.csv")):
        assert export(link) == 0
        assert Path(link).is_symlink()
        assert Path(target).read_bytes() == ROWS


def test_an_export_replaced_a_pipe() -> None:
    os.mkfifo("pipe.csv")
    with subprocess.Popen(["cat", "pipe.csv"], stdout=subprocess.PIPE) as reader:
        assert export("pipe.csv") == 0
        assert reader.communicate(timeout=WAIT_S)[0] == ROWS
    assert Path("pipe.csv").is_fifo()


@pytest.mark.parametrize("device", ["/dev/null", "/dev/full"])
def test_an_export_replaced_a_device(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("device.csv").symlink_to(device)
    assert export("device.csv") == (0 if device == "/dev/null" else 1)
    assert Path(device).is_char_device()
    if device == "/dev/full":
        assert capsys.readouterr().err == "persist export: 'device.csv' cannot be written: No space left on device\n"


def printed_to(path: str, *words: str) -> tuple[int | None, str]:
    """The exit code of a command whose standard output is appended to a file, and what it says of errors."""
    err, its_err = Pipe(duplex=False)
    with Connection(os.open(path, os.O_WRONLY | os.O_APPEND), readable=False) as to_file, its_err:
        process = Forked(words, environment(), ends=(to_file, its_err))
    with err, os.fdopen(os.dup(err.fileno())) as said:
        found = said.read()
    process.communicate()
    return process.poll(), found


def test_an_export_to_a_standard_output_that_is_a_file_replaced_it() -> None:
    Path("out.csv").symlink_to("/dev/stdout")
    Path("all.csv").write_text("before\n")
    code, said = printed_to("all.csv", "export", "orders", "out.csv")
    assert code == 0, said
    assert Path("all.csv").read_bytes() == b"before\n" + ROWS
    assert json.loads(said)["rows"] == 1


def test_an_export_to_a_standard_output_that_is_a_pipe_replaced_it() -> None:
    Path("out.csv").symlink_to("/dev/stdout")
    found = ran("export", "orders", "out.csv")
    assert (found.returncode, found.stdout.encode()) == (0, ROWS), found.stderr
    assert json.loads(found.stderr)["rows"] == 1


@pytest.mark.parametrize(("words", "wanted"), [
    (["export", "orders", "-"], b'{"id":1,"state":"new"}\n'),
    (["export", "orders", "-", "--format", "csv"], ROWS),
    (["diff", "orders", "-1", "--parquet", "-"], b"PAR1"),
    (["backup", "export-state", "orders", "--out", "-"], b"{"),
])  # fmt: skip
def test_a_dash_is_standard_output(words: list[str], wanted: bytes) -> None:
    """It was a file of that name, and an export without a format spoke of standard input."""
    out, its_out = Pipe(duplex=False)
    with its_out, Connection(os.open(os.devnull, os.O_WRONLY), readable=False) as nowhere:
        process = Forked(words, environment(), ends=(its_out, nowhere))
    with out, os.fdopen(os.dup(out.fileno()), "rb") as written:
        assert written.read().startswith(wanted)
    process.communicate()
    assert (process.poll(), Path("-").exists()) == (0, False)


def test_a_terminal_gets_no_file() -> None:
    terminal, its_end = os.openpty()
    with Connection(terminal), Connection(its_end) as end, Connection(os.open("err", os.O_WRONLY | os.O_CREAT)) as err:
        process = Forked(["export", "orders", "-"], environment(), ends=(end, err))
        process.communicate()
    assert process.poll() == 1
    assert "standard output, which is a terminal" in Path("err").read_text()


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_an_export_changed_the_mode_of_a_file(mode: int) -> None:
    Path("rows.csv").write_text("before")
    Path("rows.csv").chmod(mode)
    assert export("rows.csv") == 0
    assert Path("rows.csv").stat().st_mode & 0o777 == mode


def test_an_export_gave_a_new_file_another_mode_than_the_shell() -> None:
    Path("other").touch()
    assert export("rows.csv") == 0
    assert Path("rows.csv").stat().st_mode == Path("other").stat().st_mode


def test_what_a_killed_export_left_stopped_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(f".rows.csv.{os.getpid()}.part").touch()
    Path(".rows.csv.00.part").touch()
    drawn = iter(["00", "00", "01"])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(drawn))
    assert export("rows.csv") == 0
    assert Path("rows.csv").read_bytes() == ROWS
    assert not Path(".rows.csv.01.part").exists()


@pytest.mark.parametrize("name", ["n" * 251 + ".csv", "ä" * 125 + ".csv"])
def test_an_export_to_a_long_name_was_refused(name: str) -> None:
    assert export(name) == 0
    assert Path(name).read_bytes() == ROWS


# --- files that are imported

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (f'{{"id":1,"state":"["}}\n\n{{"id":2,"state":{DEEP}}}\n', 3),
        ('{"id":1,"state":' + '{"a":' * 100_000 + "1" + "}" * 100_001 + "\n", 1),
        ('{"id":1,"state":' + "[\n" * 100_000 + "]" * 100_000 + "}\n", 100),
        (f"{DEEP}\n", 1),
    ],
)
def test_deep_json_ended_the_process_by_a_signal(content: str, line: int) -> None:
    Path("deep.ndjson").write_text(content)
    found = ran("import", "new", "deep.ndjson", "--create", "--key", "id")
    assert (found.returncode, found.stdout) == (1, "")
    said = f"deep.ndjson, line {line}: it is nested more than 100 levels deep; flatten it; nothing of it was written"
    assert found.stderr == f"persist import: {said}\n"
    with pytest.raises(InvalidUsage, match=f"line {line}"), row_files.opened(["deep.ndjson"], None) as sources:
        sources[0].inferred()  # as `persist create --like` does


@pytest.mark.parametrize("column", ["state", "other"])
@pytest.mark.parametrize("kind", ["ndjson", "csv"])
def test_deep_json_for_a_shard_that_is_there_is_told_in_a_line(
    column: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = f'{{"id":2,"{column}":{DEEP}}}\n' if kind == "ndjson" else f"id,{column}\n2,{DEEP}\n"
    Path(f"deep.{kind}").write_text(content)
    assert main(["create", "lists", "--schema", "id int64, state list<int64>", "--key", "id"]) == 0
    for shard in ("orders", "lists"):
        capsys.readouterr()
        is_text = (shard, kind, column) == ("orders", "csv", "state")
        assert main(["import", shard, f"deep.{kind}"]) == (0 if is_text else 1)
        assert len(capsys.readouterr().err.splitlines()) == (0 if is_text else 1)


def test_brackets_in_texts_are_no_nesting() -> None:
    Path("texts.ndjson").write_text(json.dumps({"id": 1, "state": '\\"' + "[" * 200}) + "\n")
    assert main(["import", "new", "texts.ndjson", "--create", "--key", "id"]) == 0


@pytest.mark.parametrize("one_commit", [[], ["--one-commit"]])
def test_rows_that_were_added_to_a_file_before_its_turn_came_twice(
    one_commit: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, number in (("a", 10), ("b", 20)):
        Path(f"{name}.csv").write_text(f"id,state\n{number},new\n")
    real = row_files.opened

    @contextmanager
    def growing(names: list[str], form: str | None, *more: Any) -> Iterator[list[row_files.RowSource]]:
        with real(names, form, *more) as found:
            with open("b.csv", "a") as file:
                file.write("21,late\n")
            yield found

    monkeypatch.setattr(row_files, "opened", growing)
    assert main(["import", "orders", "a.csv", "b.csv", *one_commit]) == 1
    assert capsys.readouterr().err == (
        "persist import: b.csv, it was changed while it was being read; nothing of it was written\n"
    )
    monkeypatch.setattr(row_files, "opened", real)
    for _ in range(2):
        assert main(["import", "orders", "a.csv", "b.csv", *one_commit]) == 0
    capsys.readouterr()
    assert main(["cat", "orders", "--columns", "id"]) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [1, 10, 20, 21]


# --- standard output, and arguments


def in_shell(line: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: what Python itself does with a stream at its start and end is tried as well."""
    return subprocess.run(
        f'"{sys.executable}" -m rpc.cli {line}', shell=True, capture_output=True, text=True, timeout=WAIT_S,
        env=environment(), check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--help > /dev/full", "persist: standard output cannot be written: No space left on device\n"),
        ("cat orders >&-", "persist cat: standard output cannot be written: Bad file descriptor\n"),
    ],
)
def test_output_that_could_not_be_written_ended_in_a_trace(line: str, said: str) -> None:
    found = in_shell(line)
    assert (found.returncode, found.stderr) == (1, said)


def test_arrow_for_which_there_was_no_room_ended_in_a_trace() -> None:
    told = "persist cat: standard output cannot be written: No space left on device\n"
    assert printed_to("/dev/full", "cat", "orders", "--format", "arrow") == (1, told)


def test_a_token_that_could_not_be_shown_was_stored(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["token", "create", "ops", *FILE, "--scope", "admin"]
    assert printed_to("/dev/full", *words)[0] == 1
    assert main(["token", "list", *FILE]) == 0
    assert capsys.readouterr().out == ""
    assert main(words) == 0


@pytest.mark.parametrize(("words", "number"), [("cat missing", 2), ("import orders - --format csv", 0)])
def test_streams_that_were_closed_ended_in_a_trace(words: str, number: int) -> None:
    process = Forked(words.split(), environment(), before=partial(close_stream, number))
    printed, said = process.communicate()
    assert (process.poll(), printed, len(said.splitlines())) == (1, "", 0 if number == 2 else 1)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["create", "new", "--schema", "id int64, \udcff string", "--key", "id"], 1),
        (["cat", "orders", "--dir", "nu\udcff"], 1),
        (["check", "--quick", "--dir", "nu\udcff"], 2),
    ],
)
def test_an_argument_that_is_no_text_ended_in_a_trace(
    words: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    said = capsys.readouterr().err
    assert said.startswith(f"persist {words[0]}: an argument is ")
    assert said.endswith("which is not valid Unicode text: write it as UTF-8\n")


def test_a_variable_or_a_directory_that_is_no_text_ended_in_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERSIST_DIRECTORY", "\udcff")
    assert main(["shards"]) == 1
    monkeypatch.delenv("PERSIST_DIRECTORY")
    Path("n\udcff").mkdir()
    monkeypatch.chdir("n\udcff")
    assert main(["create", "new", "--schema", "id int64", "--key", "id"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_character_that_the_terminal_has_not_ended_in_a_trace() -> None:
    assert main(["create", "texts", "--schema", "id int64, state string", "--key", "id"]) == 0
    Path("texts.ndjson").write_text('{"id":1,"state":"caf\u00e9"}\n')
    assert main(["import", "texts", "texts.ndjson"]) == 0
    shown, said = Forked(["cat", "texts", "--format", "table"], environment(), before=print_ascii).communicate()
    assert ("caf\\xe9" in shown, said) == (True, "")


# --- round trips through files

LISTS: dict[str, tuple[pa.DataType, list[object]]] = {
    "large": (pa.large_list(pa.string()), [[], None, ["a", None]]),
    "fixed": (pa.list_(pa.int64(), 2), [[1, None], None]),
    "plain": (pa.list_(pa.int64()), [[1, None], None]),
    "map": (pa.map_(pa.int64(), pa.list_(pa.binary())), [None, [(1, [b"\xff", None])]]),
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_shard_that_was_made_of_parquet_had_items_of_another_name(kind: str) -> None:
    its, values = LISTS[kind]
    rows = pa.table({"id": range(len(values)), "v": pa.array(values, its)})
    with connected() as client:
        made = client.create_shard("made", rows.schema, ["id"])
        made.insert(rows)
        assert main(["export", "made", "rows.parquet"]) == 0
        assert main(["import", "again", "rows.parquet", "--create", "--key", "id"]) == 0
        again = client.shard("again")
        assert str(again.schema.arrow.field("v").type) == str(made.schema.arrow.field("v").type)
        assert again.snapshot().to_arrow().equals(made.snapshot().to_arrow(), check_metadata=True)


# --- import


@pytest.mark.parametrize("verb", [(), ("--upsert",), ("--overwrite",)], ids=["insert", "upsert", "overwrite"])
@pytest.mark.parametrize("form", ["ndjson", "csv", "parquet"])
def test_rows_of_a_file_that_lacks_a_column_had_null_for_its_default(form: str, verb: tuple[str, ...]) -> None:
    with connected() as client:
        shard = client.shard("orders")
        shard.add_column("currency", pa.string(), default="EUR")
        shard.add_column("pieces", pa.int64(), default=7, nullable=False)
    name = f"more.{form}"
    if form == "parquet":
        pq.write_table(pa.table({"id": [2], "state": ["paid"]}), name)
    else:
        Path(name).write_text('{"id": 2, "state": "paid"}\n' if form == "ndjson" else "id,state\n2,paid\n")
    assert main(["import", "orders", name, *verb]) == 0
    with connected() as client:
        assert client.shard("orders").get(2) == [{"id": 2, "state": "paid", "currency": "EUR", "pieces": 7}]


def test_a_null_that_a_line_says_stays_null() -> None:
    with connected() as client:
        client.shard("orders").add_column("currency", pa.string(), default="EUR")
    Path("more.ndjson").write_text('{"id": 2, "currency": null}\n{"id": 3}\n')
    assert main(["import", "orders", "more.ndjson"]) == 0
    with connected() as client:
        shard = client.shard("orders")
        assert [shard.get(key)[0]["currency"] for key in (2, 3)] == [None, "EUR"]


def write_rows(name: str, rows: list[dict[str, object]]) -> str:
    """Write the rows to a file, in the format that its extension names. All rows of the other formats have one set."""
    form = name.rpartition(".")[2]
    table = pa.Table.from_pylist(rows)
    if form == "ndjson":
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        Path(name).write_text("\n".join(lines) + "\n")
    elif form == "parquet":
        pq.write_table(table, name)
    else:
        with pa.ipc.new_file(name, table.schema) as file:
            file.write_table(table)
    return name


FORMS = ["ndjson", "csv", "parquet", "arrow"]
VERBS = pytest.mark.parametrize("verb", [(), ("--upsert",), ("--overwrite",)], ids=["insert", "upsert", "overwrite"])


@VERBS
@pytest.mark.parametrize("form", FORMS)
def test_columns_choose_from_the_fields_of_a_file(form: str, verb: tuple[str, ...]) -> None:
    """NDJSON was refused for a field that the shard does not have, although it was not chosen."""
    file = write_rows(f"more.{form}", [{"id": 2, "__time": 7, "other": "x", "state": "paid"}])
    assert main(["import", "orders", file, "--columns", "id,state", *verb]) == 0
    assert main(["import", "new", file, "--columns", "id,state", "--create", "--key", "id", *verb]) == 0
    with connected() as client:
        assert client.shard("orders").get(2) == [{"id": 2, "state": "paid"}]
        assert client.shard("new").get(2) == [{"id": 2, "other": None, "state": "paid"}]


def test_a_chosen_field_that_a_line_has_twice_is_refused_and_others_may_differ() -> None:
    Path("more.ndjson").write_text('{"id": 2, "other": [1]}\n{"other": {"id": 3}, "id": 3}\n')
    assert main(["import", "orders", "more.ndjson", "--columns", "id"]) == 0
    Path("more.ndjson").write_text('{"id": 4, "other": 1}\n{"id": 5, "id": 6}\n')
    found = ran("import", "orders", "more.ndjson", "--columns", "id")
    assert (found.returncode, "line 2" in found.stderr) == (1, True)


REFUSED: dict[str, tuple[list[list[dict[str, object]]], tuple[str, ...]]] = {
    "a multiplicity in an overwrite": ([[{"id": 1, "__diff": 1}]], ("--overwrite",)),
    "a multiplicity that is text": ([[{"id": 1, "__diff": "two"}]], ()),
    "a multiplicity that is too large": ([[{"id": 1, "__diff": 2**33}]], ()),
    "multiplicities whose sum is too large": ([[{"id": 1, "__diff": 2**62}] * 2], ()),
    "a key twice in an upsert": ([[{"id": 1, "v": 1}, {"id": 1, "v": 2}]], ("--upsert",)),
    "a key twice in an upsert of two files": ([[{"id": 1}], [{"id": 1}]], ("--upsert", "--one-commit")),
    "columns without the key": ([[{"id": 1, "v": 1}]], ("--columns", "v")),
    "a second file with another column": ([[{"id": 1}], [{"id": 2, "v": 1}]], ()),
    "a second file with another type": ([[{"id": 1}], [{"id": "two"}]], ()),
    "a second file with fewer columns in one upsert": (
        [[{"id": 1, "v": 1}], [{"id": 2}]],
        ("--upsert", "--one-commit"),
    ),
    "a long token": ([[{"id": 1}]], ("--token", "t" * 10_000)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("files", "options"), REFUSED.values(), ids=REFUSED)
def test_a_refused_import_creates_no_shard(
    files: list[list[dict[str, object]]], options: tuple[str, ...], form: str
) -> None:
    names = [write_rows(f"file{number}.{form}", rows) for number, rows in enumerate(files)]
    assert main(["import", "new", *names, "--create", "--key", "id", *options]) == 1
    with connected() as client:
        assert client.shards() == ["orders"]
