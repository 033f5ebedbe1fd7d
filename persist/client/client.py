"""`connect()`: one client for a directory, two stores, a server, or another region; and clones."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, Self

import pyarrow as pa

from blob import without_secrets
from persist.client import many_shards
from persist.client.arguments import ClientTls, check_numbers, checked
from persist.client.arguments import names as tuple_of
from persist.client.commit_info import Info
from persist.client.contents_diff import NamedTime
from persist.client.deadlines import Timeable, checked_timeout
from persist.client.many_shards import Cut, CutTruncated, ShardsDropped, ShardSummary
from persist.client.optimistic_loop import check_complete, read_facts
from persist.client.restore_and_truncate import RestoreOperation
from persist.client.shard import HandleSettings, Shard
from persist.client.timestamps import retention_ms
from persist.client.transport import OneShard, Transport
from persist.commit.location import Location, LocationSettings, all_names, open_location, open_stores
from persist.core.errors import InvalidUsage, NotReadable, Unavailable, UnknownShard
from persist.core.ids import Token, check_shard_name, mint
from persist.core.shard_phases import dropped
from persist.core.shard_settings import DEFAULT_HISTORY, DROP, HistoryDefaults, ShardSettings
from persist.core.shard_view import ShardView, ViewRequest
from persist.formats.exposition import figures
from persist.maintenance.collector import collect_in_background
from persist.parts import ShardSchema
from persist.parts.constraint_checks import ConstraintChange, without_constraints
from persist.telemetry.tracing import open_tracer

# Every method that changes the shard; what it reads for that, it also reads at home.
AT_HOME = (
    "add_column", "advance_upper", "allow_nulls", "alter", "append", "compare_and_append", "configure",
    "critical_reader", "delete", "downgrade_since", "drop", "drop_column", "erase", "erased", "erasures",
    "evolve_schema", "forget", "insert", "merge", "move_column", "open_writer", "overwrite", "pipelined_writer",
    "rename_column", "replace_where", "restore", "retain", "run_retention", "set_constraints", "tag", "truncate",
    "untag", "update", "upsert", "widen_column", "_update_attributes",
)  # fmt: skip


class FarShard(Shard):
    """As `Shard`. Reads show what the nearby region has accepted, so a write is visible a few seconds later."""

    def __init__(
        self, transport: Transport, name: str, view: ShardView, settings: HandleSettings, home: Callable[[], Shard]
    ) -> None:
        super().__init__(transport, name, view, settings)
        self._open_home = home
        self._opened: Shard | None = None

    @property
    def at_home(self) -> Shard:
        """The same shard, read and written at its home, where writes are visible at once."""
        if self._opened is None:
            self._opened = self._open_home()
        return self._opened

    def close(self) -> None:
        super().close()
        if self._opened is not None:
            self._opened.close()


def _forward_home(verb: str) -> Callable[..., Any]:
    @wraps(getattr(Shard, verb))
    def forward(self: FarShard, *args: Any, **options: Any) -> Any:
        return getattr(self.at_home, verb)(*args, **options)

    return forward


for _verb in AT_HOME:
    setattr(FarShard, _verb, _forward_home(_verb))


COPY = "copy"  # an internal scheme: a blob store alone, which is only read
# The modules of transports. They are imported on demand, since they depend on this package and not vice versa.
EMBEDDED = "persist"
_TRANSPORTS = {
    EMBEDDED: "compactor.on_demand",
    "http": "rpc.client.http_transport",
    "https": "rpc.client.http_transport",
    COPY: "persist.regions.replica",
}
_SERVERS = ("http", "https")
REQUEST_S = 60.0  # a request to servers that have answered before: one of them may be restarting
LIVES_MAX = 100  # dropped shards of a name that one call may encounter


@dataclass(frozen=True)
class Connection:
    """The settings of a connection; pickle it to connect elsewhere.

    Either `url` (`persist:///dir`, or one or more `http(s)://host:port` with commas), or `blob` and `consensus`, the
    URLs of two stores. `token`, `ca_file` (PEM of trusted authorities) and `certificate_file` (PEM of a client
    certificate and its key) are for servers. A server that has never answered is tried for `connect_s` seconds; after
    an answer, a request is tried for a minute. With `timeout_s` each call ends within that many seconds, as
    `Client.with_timeout` says; without, it is retried for `retry_s` seconds of `handles`.

    `handles` are the settings of readers and writers, `location` those of stores that this process opens. `collect`:
    delete garbage and run retention policies in the background of commits; not through a server. `history`: what new
    shards retain, such as `7d` (the default), `none` or `forever`, also by name prefix (`7d,tmp/=none`); not through a
    server, which has its own setting. `read_only`: open the blob store alone, perhaps a copy in another region, as far
    as versions were published there. `traces`: spans of the program's OpenTelemetry provider (extra `otel`).
    """

    url: str | None = None
    blob: str | None = None
    consensus: str | None = None
    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    certificate_file: str | None = None
    timeout_s: float | None = None
    connect_s: float = 5.0
    handles: HandleSettings = field(default_factory=HandleSettings)
    location: LocationSettings = field(default_factory=LocationSettings)
    collect: bool = True
    history: str | None = None
    read_only: bool = False
    traces: bool = False

    def __post_init__(self) -> None:
        for name in ("url", "blob", "consensus", "token", "ca_file", "certificate_file"):
            checked(name, getattr(self, name), str, type(None))
        check_numbers(self)
        if self.timeout_s is not None:
            checked_timeout(self.timeout_s)
        checked("handles", self.handles, HandleSettings)
        checked("location", self.location, LocationSettings)
        for name in ("collect", "read_only", "traces"):
            checked(name, getattr(self, name), bool)
        checked("history", self.history, str, type(None))
        HistoryDefaults(self.history or DEFAULT_HISTORY)

    @property
    def trust(self) -> ClientTls:
        """The TLS files of the client: trusted CAs, and its certificate."""
        return ClientTls(self.ca_file, self.certificate_file)

    @property
    def request_s(self) -> float:
        """For how long a request to a server that has answered before is tried."""
        return REQUEST_S if self.timeout_s is None else self.timeout_s

    def __repr__(self) -> str:
        urls = {name: getattr(self, name) for name in ("url", "blob", "consensus")}
        shown = (f"{name}={without_secrets(url)!r}" for name, url in urls.items() if url is not None)
        return f"Connection({', '.join(shown)})"

    def transport(self) -> Transport:
        """Open the transport for these settings. Raises InvalidUsage naming what is wrong with them."""
        if self.read_only:
            return self._copy()
        if self.url is not None and (self.blob or self.consensus):
            raise InvalidUsage("give either a url, or a blob and a consensus location, not both")
        if self.url is None:
            if not self.blob or not self.consensus:
                raise InvalidUsage("give a url, or both a blob and a consensus location")
            return self._embedded(open_stores(self.blob, self.consensus, settings=self._here))
        scheme = self.url.partition(":")[0].lower()
        if scheme == EMBEDDED:
            return self._embedded(open_location(self.url, settings=self._here))
        if scheme in _SERVERS:
            if self.history is not None:
                raise InvalidUsage(
                    "a server decides how much history new shards keep: give history to `persist serve`, or to "
                    "create_shard"
                )
            return _transports_of(scheme).open_transport(self)  # type: ignore[no-any-return]
        raise InvalidUsage(f"{without_secrets(self.url)!r} is neither persist:///directory nor http(s)://host:port")

    def at(self, name: str, *, writes: bool) -> Connection:
        """The connection for reading the shard `name`, or writing it (`writes`), whose region may be another one.

        The servers of `url` have the index of regions. Raises InvalidUsage (it has no such region, or no server for
        that), Unavailable.
        """
        scheme = (self.url or "").partition(":")[0].lower()
        if scheme not in _SERVERS or "/" not in name:
            return self
        return _transports_of(scheme).routed(self, name, writes=writes)  # type: ignore[no-any-return]

    @staticmethod
    def _embedded(location: Location) -> Transport:
        return _transports_of(EMBEDDED).open_transport(location)  # type: ignore[no-any-return]

    def _copy(self) -> Transport:
        scheme = (self.url or "").partition(":")[0].lower()
        if scheme in _SERVERS:
            raise InvalidUsage("a server decides whether it is read-only: leave read_only out")
        if self.url is not None and (scheme != EMBEDDED or self.blob):
            raise InvalidUsage("read_only takes persist:///directory as a url, or a blob location alone")
        return _transports_of(COPY).open_transport(self)  # type: ignore[no-any-return]

    @property
    def _here(self) -> LocationSettings:
        return replace(
            self.location,
            collects=collect_in_background if self.collect else None,
            history=self.history or DEFAULT_HISTORY,
            shows_no_copy=True,
            metered=True,
            tracer=open_tracer() if self.traces else self.location.tracer,
        )


class Client(Timeable):
    """Opens shards; `persist.connect` returns one. Thread-safe. Close it, or use it in a `with`, to release
    connections.

    Beside what its docstring names, every call may raise Unavailable (it did not happen; retrying is safe), Overloaded,
    Unauthorized and Forbidden.
    """

    def __init__(
        self, transport: Transport, settings: HandleSettings | None = None, connection: Connection | None = None
    ) -> None:
        self.transport = transport
        self._settings = settings or HandleSettings()
        self._connection = connection
        self._far: dict[Connection, Client] = {}  # clients of other regions, closed with this one
        self._opening = threading.Lock()

    def __repr__(self) -> str:
        return f"Client({self.transport!r})"

    def create_shard(
        self,
        name: str,
        schema: pa.Schema | ShardSchema,
        key: Sequence[str],
        *,
        history: timedelta | str | None = None,
        unique: bool = False,
        checks: Mapping[str, str] | None = None,
    ) -> Shard:
        """Create a shard, or open the one of that name if it has this schema. Repeating it is safe.

        The name of a shard that was dropped may be used again, with any schema. The new shard begins at time 0.

        Args:
            name: 1 to 128 of `A-Z a-z 0-9 . _ -`, not `-` first and not only dots, or two such with a slash, which
                are at most 256 characters together.
            schema: the columns. A column without nulls is `pa.field(name, type, nullable=False)`. The schema of another
                shard (`Shard.schema`) gives its columns the same numbers and defaults, and no constraints.
            key: the columns by which rows are ordered and found. Without `unique` a key may have several rows.
            history: for how long every time stays readable: a timedelta, or text such as `7d`, `none` (as long as
                readers need it) or `forever`. None is the default of the location. An existing shard keeps its own;
                `Shard.configure` changes it.
            unique: whether a key has at most one row at each time, as `Shard.set_constraints` says.
            checks: predicates by their names that are false for no row, as `Shard.set_constraints` says.
        Raises: ShardExists (it has another schema), InvalidUsage (the name or the schema is not supported),
            Indeterminate (it may have happened, or may yet: look whether the shard exists).
        """
        check_shard_name(name)
        if (home := self._at(name, writes=True)) is not self:
            return home.create_shard(name, schema, key, history=history, unique=unique, checks=checks)
        settings = None if history is None else ShardSettings(retention_ms(history), version=1)
        constraining = ConstraintChange.of(unique, None, {} if checks is None else checks)
        if isinstance(schema, ShardSchema):
            columns = replace(without_constraints(schema), key=tuple_of("key", key))
        else:
            columns = ShardSchema(schema, tuple_of("key", key))
        record, follows = constraining.applied(columns).to_record(), ""
        for _ in range(LIVES_MAX):
            view = self.transport.create(name, record, follows, settings)
            if not view.is_dropped:
                return Shard(self.transport, name, view, self._settings)
            follows = view.shard_id
        raise Unavailable(f"shard {name!r} was dropped again each of {LIVES_MAX} times that it was created; retry")

    def clone(
        self,
        source: str,
        name: str,
        *,
        as_of: int | datetime | None = None,
        tag: str | None = None,
        keep_policies: bool = False,
    ) -> Shard:
        """Make a shard `name` with the contents of another one, without copying rows. Both are independent then.

        The clone names the blobs of the source, which stay until neither needs them. It takes two commits, one more
        for each further shard whose blobs the source names as a clone itself. Times, schemas, attributes, tags and
        readable history are those of the source. Readers, writers, tokens and the commit history are not. With an
        earlier time the clone is made as of now, then restored to that time: this reads and writes the rows that have
        changed since. Scope `write` for both names.

        Args:
            source: the shard to clone, whose history is readable.
            name: of the clone; an unused name, or that of a dropped shard.
            as_of: a time, or a wall clock with its zone; None: as of now.
            tag: a tag of the source, instead of a time.
            keep_policies: whether the clone keeps the row policy of the source. Without it the clone has none until one
                is set.
        Raises: Conflict (the name is taken, or it is that of a dropped shard whose blobs the source uses, or an erasure
            of the source is not complete; nothing was changed), UnknownShard (there is no such source), InvalidUsage
            (no such tag or time), NotReadable (that time was forgotten, or the clone would not keep it: tag it; nothing
            was changed), Overloaded (the source has 10,000 clones that still use its blobs), Indeterminate (it may have
            happened: look whether the clone exists). After any other error there is no clone, or with an earlier time
            one as of now, to be restored or dropped.
        """
        if (home := self._at(source, writes=True)) is not self:
            return home.clone(source, name, as_of=as_of, tag=tag, keep_policies=keep_policies)
        checked("as_of", as_of, int, datetime, type(None))
        checked("tag", tag, str, type(None))
        checked("keep_policies", keep_policies, bool)
        check_shard_name(source)
        check_shard_name(name)
        if as_of is not None and tag is not None:
            raise InvalidUsage("give either a time or a tag")
        time = None if as_of is None and tag is None else self._restorable(source, as_of, tag, keep_policies)
        shard = Shard(self.transport, name, self.transport.clone(source, name, keep_policies), self._settings)
        if time is not None:
            shard.restore(time)
        return shard

    def _restorable(self, name: str, as_of: int | datetime | None, tag: str | None, keep_policies: bool) -> int:
        """The time that a clone of the shard is restored to. Raises if that is impossible, before it is cloned."""
        settings = self._settings
        view = self.transport.view(name, ViewRequest(with_batches=False))
        if view.is_dropped:
            raise UnknownShard(dropped(name))
        source = Shard(self.transport, name, view, settings)
        if tag is not None:
            tags = source.tags()
            if tag not in tags:
                raise InvalidUsage(f"shard {name!r} has no tag {tag!r:.300}; `persist tag list {name}` shows them")
            as_of = tags[tag].time
        to = NamedTime.of("as_of", as_of, self.transport, name, (0.0, settings.read.retry_s))
        check_complete(name, to.time, view, "cloned")
        assert to.time is not None
        source.snapshot(to.time).close()
        if not self._is_cloned(source, view, to.time, keep_policies):
            raise NotReadable(
                f"time {to.time} of shard {name!r} is only kept by a reader or a cut, which a clone does not have: tag "
                f"it by `persist tag set {name} NAME --at {to.time}`, and clone it by the tag",
                as_of=[to.time],
                since=view.since.to_json(),
            )
        RestoreOperation.of(OneShard(self.transport, view.shard_id), name, settings, to).check()
        return to.time

    def _is_cloned(self, source: Shard, view: ShardView, time: int, keep_policies: bool) -> bool:
        """Whether a readable time of the source is readable in a clone, which has its history and its tags.

        Times before the cuts of the row policy are cloned with it.
        """
        if view.since.less_equal(time) or any(tag.time == time for tag in source.tags().values()):
            return True
        if not keep_policies:
            return False
        facts = read_facts(self.transport, source.name, self._settings.read.retry_s).facts
        is_cut = any(cut.upper - 1 == time for cut in facts.cuts.values())
        return is_cut and facts.policy is not None and facts.policy.mode != DROP

    def shard(self, name: str) -> Shard:
        """Open the shard called `name`.

        If the server knows regions, `eu/orders` is read from servers nearby, and written at home in `eu`.

        Raises: UnknownShard (there is none, or it was dropped), InvalidUsage (the name is invalid, or the region is
            not known).
        """
        check_shard_name(name)
        near = self._at(name, writes=False)
        view = near.transport.view(name, ViewRequest(with_batches=False))
        if view.is_dropped:
            raise UnknownShard(dropped(name))
        is_here = near is self and not (self.transport.shows_copy and self.transport.knows_regions)
        if is_here or "/" not in name:
            return Shard(near.transport, name, view, self._settings)
        return FarShard(near.transport, name, view, self._settings, lambda: self._at_home(name))

    def _at_home(self, name: str) -> Shard:
        """The shard as the servers at its home show it; those of this client, if no others are known."""
        home = self._at(name, writes=True)
        if home is not self:
            return home.shard(name)
        return Shard(self.transport, name, self.transport.view(name, ViewRequest(with_batches=False)), self._settings)

    def _at(self, name: str, *, writes: bool) -> Client:
        """The client for reading this shard, or writing it: this one, or one of another region's servers."""
        if self._connection is None or not self.transport.knows_regions:
            return self
        connection = self._connection.at(name, writes=writes)
        if connection == self._connection:
            return self
        with self._opening:
            client = self._far.get(connection)
            if client is None:
                client = self._far[connection] = Client(connection.transport(), self._settings)
            return client

    def shards(self, prefix: str = "") -> list[str]:
        """The names of all shards that begin with `prefix`, ascending; not those of dropped shards.

        Raises InvalidUsage (`prefix` is not text).
        """
        checked("prefix", prefix, str)
        return list(all_names(self.transport.names, prefix))

    def cut(
        self,
        names: Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        at: datetime | None = None,
        cursors: Sequence[str] = (),
        at_once: int = many_shards.ASKED_AT_ONCE,
    ) -> Cut:
        """Take a frontier for each of many shards, to truncate by it later. It changes nothing, and holds nothing.

        Args:
            names: the shards, at most 10,000.
            prefix: instead of names: the shards whose names begin so.
            at: a wall clock with its zone: the cut of every shard is after all that was written by then. None: each
                shard's upper when it is asked.
            cursors: instead of a wall clock: names of critical readers, at most 100, which have all passed what is
                before the cut.
            at_once: how many shards are asked at once, in [1, 64].
        Raises: InvalidUsage (no such shards, too many, or a shard lacks one of the critical readers), UnknownShard,
            NotReadable (the wall clock is not known any more in a shard), Unavailable (it is in the future).
        """
        checked("at", at, datetime, type(None))
        chosen = None if names is None else tuple_of("names", names)
        request = many_shards.CutRequest(chosen, prefix, at, tuple_of("cursors", cursors))
        return many_shards.take_cut(self.transport, request, self._settings, at_once)

    def truncate(
        self,
        cut: Cut,
        *,
        dry_run: bool = False,
        retries: int = 0,
        info: Info | None = None,
        at_once: int = many_shards.TRUNCATED_AT_ONCE,
    ) -> CutTruncated:
        """Truncate every shard of a `cut`, as `Shard.truncate` does: one shard after the other, not atomically.

        An error of one shard is part of its outcome, and does not stop the others; the result is `complete` if none was
        refused or is pending. Repeating it is safe: it completes the rest, and changes nothing in shards that are
        truncated that far. `dry_run`, `retries` and `info` are as there. Up to 64 shards are truncated `at_once`, each
        in the memory of a truncation.

        Raises: InvalidUsage (the cut is of another location, or an argument is invalid; nothing was changed).
        """
        return many_shards.truncate_by_cut(
            self.transport, cut, self._settings, many_shards.TruncationRequest(dry_run, retries, info, at_once)
        )

    def summaries(self, prefix: str = "") -> Iterator[ShardSummary]:
        """What each shard holds whose name begins with `prefix`: rows, bytes, since, upper, policy. Ascending.

        It asks each shard, a page of 100 at a time; one that is dropped meanwhile is left out. Raises InvalidUsage
        (`prefix` is not text).
        """
        checked("prefix", prefix, str)
        after: str | None = ""
        while after is not None:
            found, after = many_shards.summary_page(self.transport, self._settings, prefix, after, many_shards.PAGE_MAX)
            yield from found

    def drop_shards(
        self,
        names: Sequence[str] | None = None,
        *,
        prefix: str | None = None,
        confirm: int | None = None,
        force: bool = False,
    ) -> ShardsDropped:
        """Drop many shards, as `Shard.drop` does, one by one. Repeating it is safe. Needs the scope `admin`.

        They are given by `names`, at most 1,000, or are those whose names begin with a `prefix`, which must not be
        empty. `confirm` is how many they are; a prefix without it drops nothing: the result lists its shards. `force`:
        also while readers hold them. An error of one shard is part of its outcome, and does not stop the others.

        Raises: InvalidUsage (no such shards, too many, or not as many as were confirmed; nothing was dropped).
        """
        chosen = None if names is None else tuple_of("names", names)
        checked("confirm", confirm, int, type(None))
        checked("force", force, bool)
        return many_shards.drop_shards(self.transport, self._settings.write.retry_s, chosen, prefix, confirm, force)

    def metrics(self) -> dict[str, float]:
        """What this client has done so far: calls, bytes, seconds, tries. It needs no request.

        Returns: the values by the names of their series, such as
            `persist_store_calls_total{outcome="ok",store="blob",verb="put"}`, which a server's `/metrics` has for its
            stores. docs/metrics.md lists them. Counters begin at 0 with the client. Durations have a sum, in seconds,
            and a count.
        Raises: nothing.
        """
        return figures(self.transport.families())

    def new_token(self) -> Token:
        """A token for one write. Keep it with what is written: with it the write can be repeated. Raises nothing."""
        return mint(Token, self.transport.ids)

    def close(self) -> None:
        """Release connections, and end the background work of stores that this client opened. Raises nothing.

        Close its snapshots, listeners and writers first. Waits of other threads, such as those of listeners, end with
        InvalidUsage, and later calls raise it.
        """
        for far in self._far.values():
            far.close()
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _transports_of(scheme: str) -> Any:
    """The module that opens transports of this scheme."""
    return importlib.import_module(_TRANSPORTS[scheme])


def connect(url: str | None = None, **settings: Any) -> Client:
    """Open a client of the shards at a location: a directory, one or several servers, or two stores.

        connect("persist:///path")
        connect("http://host:8787", token="...")
        connect(blob="s3://bucket", consensus="postgresql://host/db")

    Args:
        url: the directory or the servers, with commas between them; None if the stores are given.
        settings: the other fields of `Connection`, which documents them.
    Raises: InvalidUsage (a setting is invalid; the message names it), Unavailable (no server answers).
    """
    known = [field.name for field in fields(Connection)]
    for name in settings:
        if name not in known:
            raise InvalidUsage(f"connect() has no setting {name!r}; it takes {', '.join(known)}")
    connection = Connection(url, **settings)
    client = Client(connection.transport(), connection.handles, connection)
    return client if connection.timeout_s is None else client.with_timeout(connection.timeout_s)
