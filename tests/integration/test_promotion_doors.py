"""The commands by which another home is made, and what they refuse, with the kinds that docs/regions.md has."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from blob import open_blob
from persist.cli import region
from persist.commit.location import open_stores
from persist.commit.location_identity import epoch_key
from persist.copies.recovery import mark_recovery
from persist.core.ids import LocationBinding
from persist.formats.state_frames import encode_binding
from persist.maintenance.journal_writer import PublishSettings
from persist.regions.failover import HomeWatch
from persist.regions.region_index import IndexFile, read_index
from rpc.cli.program import main, parser_for
from rpc.settings import ServerSettings
from tests.support.embedded import client_of
from tests.support.pages import blocks, error_rows
from tests.support.regions import publish
from tests.support.server import Server
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
NAMES = ("eu/clicks", "eu/orders")
LOST = ("--home-is-lost",)


def run(*arguments: str) -> int:
    """One command in this process; raises the error that the command line would print."""
    parsed = parser_for(arguments[0]).parse_args(arguments)
    return int(parsed.run(parsed))


class Place:
    """A home with two shards, and a copy of its blob store."""

    def __init__(self, root: Path, made: Path | None = None) -> None:
        """A new one, or one that is copied from the root of another: then it is the same location."""
        self.root = root
        self.blob, self.consensus = f"file://{root}/home/blob", f"sqlite:///{root}/home/log.db"
        self.copy, self.fresh = f"file://{root}/copy/blob", f"sqlite:///{root}/new.db"
        self.index = str(root / "regions.json")
        if made is not None:
            shutil.copytree(made, root, dirs_exist_ok=True)
            return
        for name in ("home", "copy"):
            (root / name).mkdir(parents=True)
        assert main(["region", "set", "eu", "--write", "http://127.0.0.1:9", "--index", self.index]) == 0
        with persist.connect(blob=self.blob, consensus=self.consensus, collect=False) as client:
            for name in NAMES:
                client.create_shard(name, SCHEMA, ["id"]).insert([{"id": 1, "v": "first"}])
        self.publish(self.blob, self.consensus)
        self.replicate()

    @property
    def home(self) -> tuple[str, ...]:
        return ("--blob", self.blob, "--consensus", self.consensus)

    @property
    def new(self) -> tuple[str, ...]:
        return ("--blob", self.copy, "--consensus", self.fresh)

    def publish(self, blob: str, consensus: str) -> None:
        """What maintenance does until all is published."""
        with closing(open_stores(blob, consensus)) as location:
            publish(location, PublishSettings())

    def replicate(self) -> None:
        assert run("region", "replicate", "--from", self.blob, "--to", self.copy, "--once") == 0

    def insert(self, number: int) -> None:
        """Acknowledged at home, and not copied."""
        with persist.connect(blob=self.blob, consensus=self.consensus, collect=False) as client:
            client.shard("eu/orders").insert([{"id": number, "v": "alone"}])

    def promote(self, *more: str) -> int:
        return run("region", "promote", "us", "--of", "eu", *self._unless(more), *(more or ("--home-is-lost",)))

    def switch(self, *more: str) -> int:
        home = ("--home-blob", self.blob, "--home-consensus", self.consensus)
        return run("region", "switch", "us", "--of", "eu", *self._unless(more), *home, *more)

    def _unless(self, more: Sequence[str]) -> list[str]:
        """The stores of the new home that `more` does not give."""
        pairs = (("--blob", self.copy), ("--consensus", self.fresh))
        return [word for option, url in pairs if option not in more for word in (option, url)]

    def blobs(self) -> dict[str, list[str]]:
        found = {}
        for url in (self.blob, self.copy):
            with closing(open_blob(url)) as blob:
                found[url] = [f"{stat.key} {stat.size}" for stat in blob.list("")]
        return found

    def other(self) -> Place:
        """Another location, beside this one."""
        return Place(self.root / "other")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Place(tmp_path_factory.mktemp("template")).root


@pytest.fixture
def place(template: Path, tmp_path: Path) -> Place:
    return Place(tmp_path, template)


def ids(blob: str, consensus: str) -> list[int]:
    with persist.connect(blob=blob, consensus=consensus, collect=False) as client:
        return sorted(client.shard("eu/orders").snapshot().to_arrow().column("id").to_pylist())


# --- what is refused


def alive(place: Place) -> None:
    with Server(place.root / "elsewhere") as server:
        place.promote("--home", server.url)


def alive_by_index(place: Place) -> None:
    with Server(place.root / "elsewhere") as server:
        run("region", "set", "eu", "--write", server.url, "--index", place.index)
        place.promote("--index", place.index, "--write", "http://us:1")


def begun_below(place: Place) -> tuple[str, ...]:
    """Another home has taken over while this one was begun."""
    with closing(open_stores(place.copy, place.fresh)) as location:
        mark_recovery(location, 2)
    run("region", "set", "eu", "--write", "http://127.0.0.1:9", "--epoch", "3", "--index", place.index)
    return "--index", place.index, "--write", "http://us:8787"


def not_whole(place: Place) -> None:
    with closing(open_blob(place.copy)) as copy:
        copy.delete([stat.key for prefix in ("s", "pub/") for stat in copy.list(prefix)])
    place.promote()


def another_home(store: str, epoch: int) -> None:
    """Which has taken over this store."""
    with closing(open_blob(store)) as blob:
        blob.put(epoch_key(epoch), encode_binding(LocationBinding(blob.get("location-id").decode(), epoch, "another")))


def overtaken(place: Place) -> None:
    place.promote()
    another_home(place.copy, 3)
    place.promote()


def outdated(place: Place) -> None:
    place.switch()
    run("region", "set", "eu", "--write", "http://ap:9", "--epoch", "3", "--index", place.index)
    place.switch("--index", place.index, "--write", "http://us:9")


def taken_over(place: Place) -> None:
    another_home(place.blob, 2)
    place.switch()


def undone_late(place: Place) -> None:
    place.switch()
    place.switch("--undo")


def salvaged_twice(place: Place) -> None:
    place.promote()
    for _ in range(2):
        place.insert(7)
        run("region", "salvage", *place.home, "--of", place.copy, "--to", str(place.root / "files"))


def of_another_location(place: Place) -> None:
    other = place.other()
    other.promote()
    run("region", "salvage", *place.home, "--of", other.copy, "--dry-run")


def of_itself(place: Place) -> None:
    place.promote()
    run("region", "salvage", *place.new, "--of", place.copy, "--dry-run")


def demoted_of_another(place: Place) -> None:
    other = place.other()
    other.promote()
    run("region", "demote", *place.home, "--of", other.copy)


def demoted_itself(*more: str, at: str = "", by_old_log: bool = False) -> Callable[[Place], object]:
    """The new home, live and ahead of the copy that it was, as both. `at`: by a link of that name."""

    def call(place: Place) -> None:
        place.promote()
        with persist.connect(blob=place.copy, consensus=place.fresh, collect=False) as client:
            client.shard("eu/orders").insert([{"id": 2, "v": "at the new home"}])
        place.publish(place.copy, place.fresh)
        if at:
            (place.root / at).symlink_to(place.root / "copy", target_is_directory=True)
        blob, log = (place.root / at / "blob").as_uri() if at else place.copy, place.fresh
        stores = ("--blob", blob, "--consensus", place.consensus if by_old_log else log)
        before = place.blobs()
        try:
            run("region", "demote", *stores, "--of", place.copy, *more)
        finally:
            assert place.blobs() == before, "something was written"
            assert ids(place.copy, log) == [1, 2]
            with persist.connect(blob=place.copy, consensus=log, collect=False) as client:
                client.shard("eu/orders").insert([{"id": 3, "v": "it goes on"}])

    return call


DEMOTED_ITSELF = [
    demoted_itself(),
    demoted_itself("--drop-diverged", by_old_log=True),
    demoted_itself("--drop-diverged", at="link"),
]


def demoted_alone(place: Place) -> None:
    place.insert(7)
    place.promote()
    run("region", "demote", *place.home, "--of", place.copy)


def demoted_after_taking_over(place: Place) -> None:
    place.promote()
    another_home(place.blob, 3)
    run("region", "demote", *place.home, "--of", place.copy, "--drop-diverged")


def used_as_home(use: Callable[[Place], object]) -> Callable[[Place], object]:
    """After it was demoted."""

    def call(place: Place) -> None:
        place.promote()
        run("region", "demote", *place.home, "--of", place.copy)
        before = place.blobs()
        try:
            use(place)
        finally:
            assert place.blobs() == before

    return call


USED_AS_HOME = [
    used_as_home(lambda p: run("maintain", "run", "--no-gc", *p.home, "--once")),
    used_as_home(lambda p: run("maintain", "gc", *p.home, "--once")),
    used_as_home(lambda p: p.insert(7)),
]


def stopped_after(seconds: int, **settings: bool) -> Callable[[Place], object]:
    return lambda place: ServerSettings(blob="memory:", self_fence=seconds, **settings).check()  # type: ignore[arg-type]


REFUSED: dict[str, list[Callable[[Place], object]]] = {
    "`region promote` while the old home responds, without `--home-blob`": [alive, alive_by_index],
    "`promote` without `--home`, `--index`, `--home-blob` and `--home-is-lost`": [lambda p: p.promote("--gap", "5")],
    "`promote` or `switch` with `--index` and no `--write`, or `--write` and no `--index`": [
        lambda p: p.promote("--index", p.index),
        lambda p: p.promote("--write", "http://us:1", "--home-is-lost"),
        lambda p: p.switch("--index", p.index),
    ],
    "`promote` of a store that has no location": [
        lambda p: ((p.root / "empty").mkdir(), p.promote(*LOST, "--blob", f"file://{p.root}/empty")),
        lambda p: p.promote(*LOST, "--blob", f"file://{p.root}/none"),
    ],
    "`promote` or `switch` to a consensus store that is in use": [
        lambda p: p.promote(*LOST, "--consensus", p.consensus),
        lambda p: p.switch("--consensus", p.consensus),
    ],
    "`--home-blob` of another location, or of a store that is not there or has none": [
        lambda p: p.promote("--home-blob", p.other().blob),
        lambda p: ((p.root / "empty").mkdir(), p.promote("--home-blob", f"file://{p.root}/empty")),
        lambda p: ((p.root / "empty").mkdir(), p.promote("--home-blob", f"file://{p.root}/empty", "--home-is-lost")),
        lambda p: p.promote("--home-blob", f"file://{p.root}/none"),
    ],
    "`region promote` or `switch` started for an epoch below that of the index": [
        lambda p: p.promote(*LOST, *begun_below(p)),
        lambda p: p.switch(*begun_below(p)),
    ],
    "`region promote` of an incomplete newest version, without `--accept-loss`": [not_whole],
    "an option that is given and empty": [
        lambda p: p.promote("--index", "", "--home-is-lost"),
        lambda p: run("maintain", "run", "--no-gc", *p.home, "--region", "", "--once"),
    ],
    "`region promote` or `switch` repeated after another home has taken over": [overtaken, outdated],
    "a region, or a URL of a server, that is none": [
        lambda p: run("region", "promote", "", "--of", "eu", *p.new, "--home-is-lost"),
        lambda p: p.promote("--home", "http://eu:abc"),
        lambda p: p.promote("--index", p.index, "--write", "us:8787", "--home-is-lost"),
    ],
    "`switch` without `--home-dir` or `--home-blob`": [lambda p: run("region", "switch", "us", "--of", "eu", *p.new)],
    "`switch` to a store that is no copy of this home, or is the home itself": [
        lambda p: run("region", "switch", "us", "--of", "eu", *p.new, "--home-dir", str(_dir(p.root / "third"))),
        lambda p: p.switch("--blob", p.blob),
    ],
    "`region switch` of a home that is superseded, or is switching to another copy": [taken_over],
    "`switch --undo` where none was begun": [lambda p: p.switch("--undo")],
    "`region switch --undo` after the new home has started, or another one has taken over": [undone_late],
    "`salvage` without `--to` and `--dry-run`, or with both": [
        lambda p: run("region", "salvage", *p.home, "--of", p.copy),
        lambda p: run("region", "salvage", *p.home, "--of", p.copy, "--dry-run", "--to", str(p.root / "files")),
    ],
    "`salvage --to` a directory that has files": [salvaged_twice],
    "`salvage` or `demote` with `--of` a store that was never made home": [
        lambda p: run("region", "salvage", *p.home, "--of", p.copy, "--dry-run"),
        lambda p: run("region", "demote", *p.home, "--of", p.copy),
        lambda p: run("region", "demote", *p.home, "--of", f"file://{p.root}/none"),
    ],
    "`salvage` or `demote` of another location, or of the new home itself": [
        of_another_location, of_itself, demoted_of_another, *DEMOTED_ITSELF,
    ],
    "`region demote` of a home with divergence, without `--drop-diverged`": [demoted_alone],
    "`region demote` of a home that has taken over since": [demoted_after_taking_over],
    "`serve`, `maintain` or `persist.connect` of an old home that `demote` has made a copy": USED_AS_HOME,
    "`--self-fence` below 20 and not 0, or beyond 86400, or with `--read-only`": [
        *(stopped_after(seconds) for seconds in (1, 19, 86_401, -1)), stopped_after(60, read_only=True),
    ],
    "`maintain` with `--index` and no `--region`": [
        lambda p: run("maintain", "gc", *p.home, "--index", p.index, "--once"),
    ],
}  # fmt: skip
WRITES_FIRST = (
    *(
        overtaken,
        outdated,
        taken_over,
        undone_late,
        salvaged_twice,
        demoted_alone,
        demoted_after_taking_over,
        not_whole,
    ),
    *DEMOTED_ITSELF,
    *USED_AS_HOME,
)


def _dir(path: Path) -> Path:
    with persist.connect(f"persist://{path}") as client:
        client.create_shard("x", SCHEMA, ["id"])
    return path


DOCUMENTED = error_rows("docs/regions.md", "region promote", "region switch", "region demote")


CASES = [(row, number) for row, calls in REFUSED.items() for number in range(len(calls))]


def test_the_page_tells_all_that_is_tried() -> None:
    assert DOCUMENTED.keys() <= REFUSED.keys()


@pytest.mark.parametrize(("row", "number"), CASES, ids=lambda value: str(value)[:60])
def test_what_is_refused_writes_nothing(place: Place, row: str, number: int) -> None:
    call, before = REFUSED[row][number], place.blobs()
    with pytest.raises(persist.PersistError) as refused:
        call(place)
    assert refused.value.kind == DOCUMENTED.get(row, "invalid_usage"), refused.value
    assert refused.value.message.count("\n") == 0
    if call not in WRITES_FIRST and call not in (of_itself,):
        assert place.blobs() == before
    if "salvage" not in row and "demote" not in row and call not in (undone_late, taken_over, outdated):
        place.insert(1_000)  # home goes on


def test_a_home_never_stops_by_itself_after_0_seconds_and_the_bounds_are_in_it() -> None:
    for seconds in (0, 20, 86_400):
        ServerSettings(blob="mem:a", consensus="mem:b", self_fence=seconds).check()
    ServerSettings(blob="mem:a", self_fence=0, read_only=True).check()


@pytest.mark.parametrize(
    "line",
    [
        "region promote us --of eu --gap x", "serve --self-fence 30.5", "serve --self-fence nan",
        "region replicate --from mem:a --to mem:b --at-once 1.5", "region set eu --epoch x --index i",
    ],
)  # fmt: skip
def test_what_is_no_number_is_told_with_the_usage_text(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ")
    assert list(tmp_path.iterdir()) == []


# --- what is done


def test_a_dry_run_writes_nothing_and_tells_every_shard(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    before = place.blobs()
    assert place.promote("--dry-run") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("shard") for line in lines[-3:]] == [*NAMES, None]
    assert (lines[-1]["epoch"], lines[-1]["dry_run"]) == (2, True)
    assert place.blobs() == before


def test_a_promotion_sets_the_index_and_keeps_the_rest_of_it(place: Place) -> None:
    run("region", "set", "eu", "--write", "http://127.0.0.1:9", "--read", "http://us:1", "--index", place.index)
    assert place.promote("--index", place.index, "--write", "http://us:8787/") == 0
    entry = read_index(place.index).regions["eu"]
    assert (entry.write, entry.read, entry.epoch) == (("http://us:8787",), ("http://us:1",), 2)
    run("region", "set", "eu", "--write", "http://us:9", "--index", place.index)
    assert read_index(place.index).regions["eu"].epoch == 2, "a fence is not taken away by the way"


@pytest.mark.parametrize("how", ["promote", "switch"])
def test_the_new_epoch_is_above_that_of_the_index(place: Place, how: str) -> None:
    """The copy may lack the last epochs of home. The new home would only read, by the index that it is set in."""
    run("region", "set", "eu", "--write", "http://127.0.0.1:9", "--epoch", "3", "--index", place.index)
    lost = ("--home-is-lost",) if how == "promote" else ()
    assert getattr(place, how)(*lost, "--index", place.index, "--write", "http://us:8787") == 0
    assert read_index(place.index).regions["eu"].epoch == 4
    with closing(open_stores(place.copy, place.fresh)) as location:
        assert location.identity.check().epoch == 4
        HomeWatch(location.identity, "eu", IndexFile(place.index))._look()
        client_of(location).shard("eu/orders").insert([{"id": 9, "v": "new"}])


def test_a_home_that_can_be_reached_is_stopped_first(place: Place) -> None:
    with Server(place.root / "elsewhere") as server:  # it answers, and its store is given
        assert place.promote("--home", server.url, "--home-blob", place.blob) == 0
    with pytest.raises(persist.ReadOnly, match="this process only reads"):
        place.insert(7)


@pytest.mark.parametrize("verb", ["promote", "switch"])
def test_who_is_killed_before_the_index_is_set_sets_it_by_the_same_command(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    def dies(arguments: object, epoch: int) -> None:
        raise SystemExit

    def command() -> int:
        indexed = ("--index", place.index, "--write", "http://us:8787")
        return place.switch(*indexed) if verb == "switch" else place.promote(*indexed, "--home-is-lost")

    with monkeypatch.context() as patch:
        patch.setattr(region, "_record_home", dies)
        with suppress(SystemExit):
            command()
    capsys.readouterr()
    assert command() == 0
    assert json.loads(capsys.readouterr().out)["had_ended"] is True
    entry = read_index(place.index).regions["eu"]
    assert (entry.write, entry.epoch) == (("http://us:8787",), 2)


def as_the_page_says(place: Place, heading: str, third: str) -> list[list[str]]:
    """The commands below this heading of the page, with the stores of this place."""
    [block] = [block for block in blocks("docs/regions.md") if block.heading == heading]
    here = {"s3://us-copy": place.copy, "s3://eu": place.blob, "postgresql://us/persist": place.fresh}
    here |= {"postgresql://eu/persist": place.consensus, "postgresql://eu/persist2": third}
    here |= {"regions.json": place.index}
    lines = block.text.replace("\\\n", " ").splitlines()
    return [[here.get(word, word) for word in shlex.split(line)[1:]] for line in lines]


def test_a_switch_there_and_back_by_the_commands_of_the_page(place: Place) -> None:
    third = f"sqlite:///{place.root}/third.db"
    [switch] = as_the_page_says(place, "Planned switchover", third)
    demote, replicate, switch_back, demote_again = as_the_page_says(place, "Switch back", third)
    assert run(*switch) == 0
    assert run(*demote) == 0
    with persist.connect(blob=place.copy, consensus=place.fresh, collect=False) as client:
        client.shard("eu/orders").insert([{"id": 2, "v": "at the new home"}])
        client.create_shard("eu/new", SCHEMA, ["id"])
    place.publish(place.copy, place.fresh)
    assert run(*replicate) == 0
    assert run(*switch_back) == 0
    assert ids(place.blob, third) == [1, 2]
    with persist.connect(blob=place.blob, consensus=third, collect=False) as client:
        assert client.shards() == [NAMES[0], "eu/new", NAMES[1]]
    assert run(*demote_again) == 0
    entry = read_index(place.index).regions["eu"]
    assert (entry.write, entry.epoch) == (("http://eu:8787",), 3)


def test_salvage_tells_what_the_old_home_dropped_made_and_set(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    place.promote()
    with persist.connect(blob=place.blob, consensus=place.consensus, collect=False) as client:
        client.create_shard("eu/late", SCHEMA, ["id"]).insert([{"id": 5, "v": "late"}])
        client.shard("eu/orders").tag("mine", 0)
        client.shard("eu/clicks").drop(force=True)
    capsys.readouterr()
    assert run("region", "salvage", *place.home, "--of", place.copy, "--to", str(place.root / "files")) == 0
    lines = {line.get("shard"): line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert lines["eu/late"]["kept"] is False
    assert (lines["eu/late"]["updates"], lines["eu/orders"]["updates"], lines["eu/orders"]["commits"]) == (1, 0, 1)
    assert lines["eu/clicks"]["dropped"] is True
    assert lines[None] == {"epoch": 2, "region": "us", "of": "eu", "shards": 3, "lost": 0}
    assert [path.name for path in (place.root / "files").iterdir()] == ["eu%2Flate.parquet"]


# --- an old home that has become a copy


COPY_NOW = r"^this store is a copy now: .* `persist serve --read-only --blob file:.*/blob`$"


@pytest.fixture
def demoted(place: Place) -> Place:
    place.promote()
    assert run("region", "demote", *place.home, "--of", place.copy) == 0
    return place


def test_an_old_home_that_is_a_copy_is_served_as_one_only(demoted: Place) -> None:
    """It started, was ready, and refused every read as ReadOnly."""
    (demoted.root / "home" / "log.db").rename(demoted.root / "home" / "consensus.db")
    (demoted.root / "home" / "persist.json").write_text('{"persist": "location", "version": 1}')
    before = demoted.blobs()
    with Server(demoted.root / "home") as server:
        assert server.process.wait(WAIT_S) == 1
    assert re.search(COPY_NOW.removeprefix("^"), server.said(), re.MULTILINE)
    assert server.said().count("\n") == 1
    assert demoted.blobs() == before


def test_an_old_home_that_is_a_copy_is_not_opened_by_a_program_as_home(demoted: Place) -> None:
    with persist.connect(blob=demoted.blob, consensus=demoted.consensus, collect=False) as client:
        for call in (lambda: client.shard(NAMES[0]), client.shards, lambda: client.create_shard("x", SCHEMA, ["id"])):
            with pytest.raises(persist.InvalidUsage, match=COPY_NOW):
                call()
    assert run("region", "replicate", "--from", demoted.copy, "--to", demoted.blob, "--once") == 0
    with persist.connect(blob=demoted.blob, read_only=True) as client:
        assert client.shard(NAMES[0]).snapshot().to_arrow().num_rows == 1
    assert run("region", "demote", *demoted.home, "--of", demoted.copy) == 0, "it can be repeated"


def test_a_home_whose_mark_as_a_copy_stayed_is_no_copy(place: Place) -> None:
    """Its promotion was killed before the mark went."""
    place.promote()
    with closing(open_blob(place.copy)) as blob:
        blob.put("copy-of", blob.get("location-id"))
    with Server(place.root, *place.new) as server, persist.connect(server.url) as client:
        client.shard("eu/orders").insert([{"id": 5, "v": "new"}])
    assert ids(place.copy, place.fresh) == [1, 5]
