"""What users see first: the names of the package, docstrings, reprs, the forms in which rows come, and errors."""

from __future__ import annotations

import datetime as dt
import inspect
import math
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pandas
import pyarrow as pa
import pytest

import persist
from persist.client.read_api import ReadMethods
from persist.client.write import WriteMethods
from persist.core import errors
from rpc.cli.program import main

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])

PUBLIC = """
    connect Client Connection Shard ShardSchema Snapshot SnapshotSplit Listen ShardTag ListenEvent ReadLease WriteHandle
    PipelinedWriter CriticalReaderHandle Attributes AttributeKey attribute_key named_key AttributeUpdate BYTE_COUNT
    EVENT_COUNT Antichain Appended Token Changes ChangesSplit Restored Truncated Cut CutTruncated
    ShardTruncated RowRetention RetentionRun ShardSummary ShardDropped ShardsDropped ErasureStatus ColumnRun
    Subscription Scan Edited Merge source target Optimized Vacuumed
    HandleSettings LocationSettings PipelineSettings ReadSettings WriteSettings
    PersistError InvalidUsage UnknownShard ShardExists NegativeMultiplicity Unauthorized Forbidden
    ReadOnly Conflict UpperMismatch OpaqueMismatch AttributeMismatch SchemaMismatch Expired NotReadable Overloaded
    Unavailable Indeterminate UpgradeNeeded Corruption TokenReused OutcomeForgotten HistoryLost ConstraintViolated
    NotComplete __version__
"""
NAMES = PUBLIC.split()


def python(program: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(arguments or ("-c", program))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def client() -> Iterator[persist.Client]:
    with persist.connect(blob="mem:", consensus="mem:") as opened:
        yield opened


@pytest.fixture
def shard(client: persist.Client) -> persist.Shard:
    return client.create_shard("orders", SCHEMA, ["id"])


# --- names


def test_the_package_offers_these_names_and_completes_them() -> None:
    assert persist.__all__ == NAMES
    assert set(NAMES) <= set(dir(persist))
    for name in NAMES:
        assert getattr(persist, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        persist.nonsense  # type: ignore[attr-defined]  # noqa: B018


def test_every_error_that_can_reach_a_user_is_offered() -> None:
    ours = {cls.__name__ for kind, cls in errors.kinds().items() if cls.__module__ == errors.__name__}
    assert ours == {name for name in NAMES if isinstance(getattr(persist, name), type)} & ours


def test_importing_the_package_and_its_errors_loads_neither_arrow_nor_a_store(tmp_path: Path) -> None:
    ran = python(
        "import sys, persist; persist.UpperMismatch, persist.AttributeUpdate, persist.Antichain, persist.__version__;"
        "print({'pyarrow', 'sqlalchemy', 'fastapi'} & set(sys.modules))",
        tmp_path,
    )
    assert (ran.stdout, ran.stderr) == ("set()\n", "")


def test_the_command_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"persist {persist.__version__}\n"
    assert re.match(r"\d+\.\d+", persist.__version__)


@pytest.mark.smoke
@pytest.mark.proof
def test_a_typed_program_passes_strict_mypy_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        """
import persist
import persist.aio
from persist.client.read_api import ReadMethods

def main(url: str) -> int | None:
    with persist.connect(url) as client:
        shard: persist.Shard = client.shard("orders")
        try:
            done = shard.insert([{"id": 1}])
        except persist.UpperMismatch as error:
            raise SystemExit(error.kind) from error
        return done.lower.element

def wrong(client: persist.Client) -> str:
    persist.nonsense()
    return client.shards()

async def awaited(url: str) -> None:
    async with persist.aio.connect(url) as client:
        shard = await client.shard("orders")
        rows: int = (await shard.snapshot().to_arrow()).num_rows
        async for event in shard.with_timeout(1.0).listen(0):
            upper: persist.Antichain = event.upper
        async with shard.open_writer() as writer:
            time: persist.Antichain = (await writer.insert([{"id": rows}])).lower

async def wrong_as_well(shard: persist.aio.AsyncShard) -> str:
    await shard.inserts([])
    await shard.insert([], tokens=None)
    await shard.count(where=1)
    await shard.snapshot().insert([])
    return await shard.count()
"""
    )
    ran = python("", tmp_path, "-m", "mypy", "--strict", "program.py")
    found = [line.partition("error: ")[2] for line in ran.stdout.splitlines() if "error: " in line]
    wrong = ["attr-defined", "return-value", "attr-defined", "call-arg", "arg-type", "attr-defined", "return-value"]
    assert [error.rpartition("[")[2].rstrip("]") for error in found] == wrong, ran.stdout


@pytest.mark.parametrize("name", ["blob.py", "consensus/__init__.py"])
def test_a_file_that_hides_one_of_our_packages_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine = 1\n")
    for arguments in (("-c", "import persist"), ("-m", "rpc.cli", "shards")):
        ran = python("", tmp_path, *arguments)
        sentence = f"ImportError: {tmp_path / name} hides the package {re.split('[./]', name)[0]!r} of persist"
        assert ran.returncode == 1
        assert ran.stderr.splitlines()[-1].startswith(sentence)


def test_a_directory_that_only_has_the_name_of_a_package_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "rpc").mkdir()
    assert python("import persist; persist.Antichain", tmp_path).stderr == ""


# --- what they tell

CLASSES = [
    *(persist.Client, persist.Shard, persist.WriteHandle, persist.PipelinedWriter, persist.Snapshot),
    *(ReadMethods, WriteMethods),
    *(persist.SnapshotSplit, persist.Listen, persist.Subscription, persist.ReadLease, persist.CriticalReaderHandle),
    persist.Attributes,
]
METHODS = [
    (f"{cls.__name__}.{name}", getattr(cls, name))
    for cls in CLASSES
    for name in vars(cls)
    if not name.startswith("_") and inspect.isroutine(getattr(cls, name))
]


@pytest.mark.parametrize(("name", "method"), [*METHODS, ("connect", persist.connect)])
def test_a_docstring_names_every_parameter_and_what_is_raised(name: str, method: Callable[..., Any]) -> None:
    text = inspect.getdoc(method) or ""
    assert "Raises" in text
    parameters = [p for p in inspect.signature(method).parameters if p != "self"]
    assert [p for p in parameters if not re.search(rf"\b{p}\b", text)] == []


def test_a_repr_tells_what_it_is_and_never_shows_rows_or_passwords_or_asks_a_store(
    client: persist.Client, shard: persist.Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.insert([{"id": n, "name": "a secret row"} for n in range(1000)])
    snapshot, listen = shard.snapshot(num_splits=2), shard.listen(None)
    [event] = listen.next_events(0.0)
    writer, pipelined = shard.open_writer(), shard.pipelined_writer("w")
    lease, cursor = shard.open_reader(), shard.critical_reader("job")
    connection = persist.Connection(blob="mem:", consensus="postgresql://ann:a secret@db/x", token="a secret token")

    def asked(*_: Any, **__: Any) -> Any:
        raise AssertionError("a repr asked the shard")

    with monkeypatch.context() as patched:
        patched.setattr(type(client.transport), "apply", asked)
        patched.setattr(type(client.transport), "view", asked)
        things = client, shard, snapshot, *snapshot.splits, listen, event, writer, pipelined, lease, cursor, connection
        shown = [repr(thing) for thing in (*things, shard.attributes)]
    assert not [one for one in shown if "secret" in one]
    kinds = "Client Shard Snapshot SnapshotSplit SnapshotSplit Listen ListenEvent WriteHandle PipelinedWriter ReadLease"
    assert [one.partition("(")[0] for one in shown] == [
        *kinds.split(), "CriticalReaderHandle", "Connection", "Attributes",
    ]  # fmt: skip
    assert shown[1:3] == [
        "Shard('orders', key=['id'], columns=['id', 'name'])",
        "Snapshot('orders', as_of=0, splits=2)",
    ]
    snapshot.close()
    assert repr(snapshot) == "Snapshot('orders', as_of=0, splits=2, closed)"
    pipelined.close()


def test_a_notebook_shows_columns_escaped(client: persist.Client) -> None:
    fields = [pa.field("id", pa.int64(), nullable=False), ("<script>alert(1)</script>", pa.string())]
    shard = client.create_shard("orders", pa.schema(fields), ["id"])
    shard.insert([{"id": 1}])
    with shard.snapshot() as snapshot:
        for shown in (shard._repr_html_(), snapshot._repr_html_()):
            assert "<td>&lt;script&gt;alert(1)&lt;/script&gt;</td><td>string</td>" in shown
            assert "<script>" not in shown
        assert "<td>id</td><td>int64, key</td>" in shard._repr_html_()


# --- the forms in which rows come and go


def test_a_frame_of_pandas_can_be_filtered_and_taken_away_again(shard: persist.Shard) -> None:
    shard.insert([{"id": 2**60 + 1, "name": None}, {"id": 2, "name": "b"}])
    frame = shard.snapshot().to_pandas()
    wrong = frame[frame["name"].isna()].assign(__diff=-1)
    shard.insert(wrong)
    assert shard.snapshot().to_arrow(expand=True).to_pylist() == [{"id": 2, "name": "b"}]


def test_values_of_attributes_are_found_under_the_keys_that_were_asked_for(shard: persist.Shard) -> None:
    key = uuid.uuid4()
    shard.attributes.update(persist.AttributeUpdate.replace(key, 7))
    asked = [key, key.bytes, str(key), key.hex, persist.attribute_key(key), persist.EVENT_COUNT]
    found = shard.attributes.get_many(asked)
    assert [found[each] for each in asked] == [7, 7, 7, 7, 7, 0]
    assert shard.attributes.get(bytearray(key.bytes)) == 7


# --- errors


BAD: list[tuple[Callable[[Any, Any], object], str]] = [
    (lambda c, s: persist.connect("mem:", bolb=1), "no setting 'bolb'"),  # type: ignore[call-arg]
    (lambda c, s: persist.connect(5), "url is 5; it must be str"),  # type: ignore[arg-type]
    (lambda c, s: persist.connect("mem:", handles={}), "must be HandleSettings"),
    (lambda c, s: persist.connect("persist:///a?b"), "%3F for"),
    (lambda c, s: persist.connect("mem:", timeout_s=-1), "timeout_s is -1"),
    (lambda c, s: c.create_shard("x", pandas.DataFrame(), ["id"]), "pyarrow.Schema, not DataFrame"),
    (lambda c, s: c.create_shard("x", {"id": "int64"}, ["id"]), "pyarrow.Schema, not dict"),
    (lambda c, s: c.create_shard("x", SCHEMA, "id"), r"such as \['id'\]"),
    (lambda c, s: c.create_shard("x", SCHEMA, 5), "key is 5"),
    (lambda c, s: c.shard("a" * 128 + "/" + "b" * 128), "257 characters"),
    (lambda c, s: c.shards(5), "prefix is 5; it must be str"),
    (lambda c, s: s.evolve_schema({}), "pyarrow.Schema, not dict"),
    (lambda c, s: s.evolve_schema(pa.schema([("id", pa.int32())])), "cannot evolve"),
    *(
        (lambda c, s, rows=rows: s.insert(rows), f"not (as )?{kind}")
        for rows, kind in (
            ({"id": 1}, "dict"),
            ("orders.csv", "str"),
            ([1], "int"),
            ([(1, "a")], "tuple"),
            (None, "None"),
        )
    ),
    (lambda c, s: s.insert([{"id": 1.5}]), "column 'id' does not fit int64"),
    (lambda c, s: s.compare_and_append([{"id": 1, "__time": 0.5}], 0, 1), "column '__time' does not"),
    (lambda c, s: s.insert([{"id": 1, "__diff": 1.5}]), "column '__diff' does not fit"),
    (
        lambda c, s: s.insert(pandas.DataFrame({"id": [dt.date(2024, 1, 1), pandas.Timestamp("2024-01-01T23:59")]})),
        "date32",
    ),
    (lambda c, s: s.insert([], attributes=5), "AttributeUpdate, not int"),
    (lambda c, s: s.merge([{"id": 1}]).when_matched_update({"v": "source.v"}), r"write persist.source\('v'\)"),
    (lambda c, s: persist.named_key(5), "is text, not 5"),  # type: ignore[arg-type]
    (lambda c, s: persist.named_key("\ud800"), "half a surrogate pair"),
    (lambda c, s: s.attributes.get_many(5), "keys are a list"),
    *(
        (lambda c, s, wait=wait: s.snapshot(0, wait_s=wait), f"wait_s is '?{wait}")
        for wait in (float("nan"), float("inf"), "1")
    ),
    *(
        (lambda c, s, wait=wait: list(s.listen(0).next_events(wait)), f"timeout_s is {wait}")
        for wait in (float("nan"), float("inf"))
    ),
    (lambda c, s: s.snapshot(num_splits="2"), "num_splits is '2'"),
    (lambda c, s: s.open_reader(purpose=None), "purpose is None"),
    (lambda c, s: s.critical_reader(5), "cursor is 5"),
    (lambda c, s: s.critical_reader("\ud800"), "lone surrogate"),
    (lambda c, s: s.pipelined_writer("w", 5), "must be PipelineSettings"),
    (lambda c, s: persist.WriteSettings(lease_ms=True), "lease_ms is True; it must be int"),
    (lambda c, s: persist.WriteSettings(lease_ms=60000.0), "lease_ms is 60000.0"),  # type: ignore[arg-type]
    (lambda c, s: persist.ReadSettings(lease_ms=numpy.int64(1)), "it must be int"),  # type: ignore[arg-type]
    (lambda c, s: persist.ReadSettings(lease_ms=0), r"lease_ms is 0; it must be in \[1, "),
    (lambda c, s: persist.WriteSettings(retry_s=math.nan), "retry_s is nan"),
    (lambda c, s: persist.PipelineSettings(window_appends_max=0), "window_appends_max is 0"),
]


def test_a_bad_argument_is_refused_and_changes_nothing(client: persist.Client, shard: persist.Shard) -> None:
    for act, why in BAD:
        with pytest.raises(persist.InvalidUsage, match=why):
            act(client, shard)
    assert client.shards() == ["orders"]
    assert shard.upper() == persist.Antichain(0)


EXTRAS: list[tuple[str, str, dict[str, str], str]] = [
    ("boto3", "s3", {"blob": "s3://bucket", "consensus": "mem:"}, "s3"),
    ("psycopg", "postgresql", {"blob": "mem:", "consensus": "postgresql://h/d"}, "postgres"),
    ("grpc", "etcd", {"blob": "mem:", "consensus": "etcd://h:1"}, "etcd"),
]
OURS = ("blob.s3", "consensus.postgres", "consensus.etcd", "etcd3")  # what is imported anew without the library


@pytest.mark.parametrize("case", EXTRAS, ids=[row[0] for row in EXTRAS])
def test_a_store_whose_library_is_missing_names_the_install(
    case: tuple[str, str, dict[str, str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library, scheme, stores, extra = case
    for module in [*sys.modules]:
        if module.startswith(OURS) or module.partition(".")[0] == library:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    install = f'needs {library}: pip install "persist-shards[{extra}]"'
    with pytest.raises(persist.InvalidUsage, match=re.escape(install)):
        persist.connect(**stores)
    assert main(["shards", "--blob", stores["blob"], "--consensus", stores["consensus"]]) == 1
    assert capsys.readouterr() == ("", f"persist shards: {scheme}: {install}\n")


@pytest.mark.parametrize("library", ["pandas", "polars", "duckdb"])
def test_a_library_that_frames_miss_is_named(
    library: str, shard: persist.Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.insert([{"id": 1, "name": "a"}])
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(persist.InvalidUsage, match=rf'to_{library}\(\) needs {library}: pip install "{library}"'):
        getattr(shard.snapshot(), f"to_{library}")()


def test_spark_without_pyspark_names_the_install(tmp_path: Path) -> None:
    ran = python("import sys; sys.modules['pyspark'] = None; import persist.spark", tmp_path)
    assert ran.stderr.splitlines()[-1] == (
        'persist.core.errors.InvalidUsage: persist.spark needs pyspark: pip install "persist-shards[spark]"'
    )


def test_a_directory_that_cannot_be_made_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for directory in (f"{tmp_path}/file/x", "/proc/persist-cannot-be-made"):
        with pytest.raises(persist.InvalidUsage, match=directory):
            persist.connect(f"persist://{directory}")
    assert main(["serve", "--port", "0", "--dir", "/proc/persist-cannot-be-made"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(r"persist serve: /proc/persist-cannot-be-made cannot be used: [^\n]+\n", told.err)
