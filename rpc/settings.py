"""Settings of the service: one definition each for options, variables, the configuration file and docs/settings.md."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from persist.client.arguments import ClientTls
from persist.commit.clocks_and_ids import Clock
from persist.copies.verify import samples_of
from persist.core import record
from persist.core.errors import InvalidUsage
from persist.core.shard_settings import DEFAULT_HISTORY, HistoryDefaults
from persist.core.state import Policy
from persist.maintenance.journal_writer import EVERY_S_MAX
from persist.regions.failover import FENCE_S_MAX, check_fence
from persist.regions.region_index import IndexFile, IndexUrl, check_region, open_index
from rpc.tls import TlsFiles, context_of

DEFAULT_DIRECTORY = "persist-data"
TOKEN_CHARS_MIN = 32
PRESIGNED_S_MAX = 600  # SECURITY.md promises it
PREFIXES = {"": "PERSIST_", "limits": "PERSIST_LIMIT_", "levers": "PERSIST_LEVER_"}  # of variables, by table
_FILES = ("tls_certificate", "tls_key", "tls_client_ca", "ca_file", "certificate_file", "tokens_file", "quotas")
_METADATA = "persist.setting"  # the key of a field's metadata that holds its `Setting`
_LIMIT_MOST = (1 << 50) - 1
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its name in a file, as a variable and as an option, and its allowed values.

    `kind` is int, float, bool or str; numbers are in `[least, most]`. `flag` is the option with its argument, such as
    `--tokens FILE`. A secret can only be set by its variable. `is_of_policy`: it is a field of `Policy`.
    """

    name: str
    kind: type
    default: Value
    text: str
    least: float = 0
    most: float = 0
    table: str = ""
    flag: str | None = None
    is_secret: bool = False
    is_of_policy: bool = False

    @property
    def variable(self) -> str:
        return PREFIXES[self.table] + self.name.upper()

    @property
    def key(self) -> str:
        return f"{self.table}.{self.name}" if self.table else self.name

    def refusal(self, value: object) -> str | None:
        """Why a value is invalid, and what is allowed; None: it is valid."""
        if type(value) is not self.kind and not (self.kind is float and type(value) is int):
            return f"is {shown(value)} and must be {_KINDS[self.kind]}{self._range()}"
        if self.kind in (int, float) and not self.least <= value <= self.most:  # type: ignore[operator]
            return f"is {value} and must be{self._range()}"
        return None

    def value_in(self, settings: ServerSettings) -> Value:
        owner: object = settings
        if self.table == "limits":
            owner = settings.limits
        elif self.is_of_policy:
            owner = settings.policy
        value: Value = getattr(owner, self.name)
        return value

    def _range(self) -> str:
        return f" in [{self.least:g}, {self.most}]" if self.kind in (int, float) else ""


_KINDS: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def shown(value: object) -> str:
    """A value for an error message."""
    text = repr(value) if len(repr(value)) <= 60 else f"{str(value)[:57]}..."
    return text.lower() if isinstance(value, bool) else text


def _setting(
    default: Value, text: str, least: float = 0, most: float = 0, *, is_shown: bool = True, **more: Any
) -> Any:
    """The default of a field, with its `Setting`. One without a default is a string."""
    kind = str if default is None else type(default)
    setting = Setting("", kind, default, text, least, most, **more)
    return field(default=default, repr=is_shown and not setting.is_secret, metadata={_METADATA: setting})


def _limit(default: int | float, text: str) -> Any:
    return _setting(default, text, 1 if isinstance(default, int) else 1e-6, _LIMIT_MOST, table="limits")


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources and times that one server allows. See docs/settings.md."""

    connections_max: int = _limit(
        20_000, "open connections, at most `ulimit -n` minus 512; a server raises that limit as far as it may"
    )
    headers_s: float = _limit(20.0, "seconds from the first byte of a request to the end of its headers")
    slow_reader_s: float = _limit(60.0, "seconds for which a client may read slower than 8 KiB/s; it can resume")
    commands_max: int = _limit(10_000, "commands that are queued or being committed")
    rows_bytes_max: int = _limit(64 * MIB, "body of one post of rows")
    rows_max: int = _limit(5_000_000, "rows of one such body")
    blob_bytes_max: int = _limit(256 * MIB, "one part sent through the server; writers make parts of 64 MiB")
    bodies_bytes_max: int = _limit(64 * MIB, "all bodies in memory while they are received")
    spool_bytes_max: int = _limit(
        4 * GIB, "all bodies in temporary files (in `TMPDIR`, which must not be a file system in memory)"
    )
    decoded_bytes_max: int = _limit(
        144 * MIB,
        "decoded size of the rows of one body ([details](operations.md#limits)); the limit for all "
        "bodies together is a third higher",
    )
    listeners_max: int = _limit(20_000, "listen streams")
    snapshots_max: int = _limit(8, "snapshots streamed through the server, of 32 MiB each")
    io_threads: int = _limit(32, "threads that read stores, parts and rows; half as many commits run at once")


@dataclass(frozen=True)
class ServerSettings:
    """Where the shards are and how the server listens."""

    directory: str | None = _setting(None, "location: a directory (`persist-data`)")
    blob: str | None = _setting(None, "or the URL of a blob store", is_shown=False)
    consensus: str | None = _setting(None, "and the URL of a consensus store", is_shown=False)
    host: str = _setting("127.0.0.1", "address to listen on", flag="--host HOST")
    port: int = _setting(
        8787, "port; 0 picks a free one. The first line of output is the URL", 0, 65_535, flag="--port PORT"
    )
    tokens_file: str | None = _setting(None, "file of hashed bearer tokens; see docs/http.md", flag="--tokens FILE")
    quotas: str | None = _setting(
        None, "file with the quotas of tokens and prefixes; it is reloaded when it changes", flag="--quotas FILE"
    )
    tls_certificate: str | None = _setting(None, "PEM file; needs a key", flag="--tls-certificate FILE")
    tls_key: str | None = _setting(None, "PEM file; needs a certificate", flag="--tls-key FILE")
    tls_client_ca: str | None = _setting(
        None, "PEM file of the CA of client certificates, which replace tokens", flag="--tls-client-ca FILE"
    )
    insecure: bool = _setting(False, "listen beyond loopback without tokens", flag="--insecure")
    maintenance: bool = _setting(True, "run compaction and garbage collection", flag="--no-maintenance")
    maintenance_metrics_port: int = _setting(
        0,
        "port of /metrics of the server's own maintenance (127.0.0.1 only); 0: none",
        0,
        65_535,
        flag="--maintenance-metrics-port PORT",
    )
    maintenance_token: str | None = _setting(None, "token of the server's own maintenance", is_secret=True)
    history: str = _setting(
        DEFAULT_HISTORY,
        "history retention of new shards: `7d`, `none`, `forever`, or by prefix `7d,tmp/=none`",
        flag="--history AGE",
    )
    read_only: bool = _setting(False, "serve a copy of another location's blob store", flag="--read-only")
    region: str = _setting("", "the region of this server", flag="--region NAME")
    of: str = _setting("", "with `read_only`: the home region of the copy", flag="--of NAME")
    index: str = _setting("", "the index of regions: a file, or the URL of a server that has it", flag="--index FILE")
    index_token: str | None = _setting(None, "token for the server of the index", is_secret=True)
    self_fence: int = _setting(
        0,
        "stop writing after so many seconds without confirmation of which region is home; 0: never",
        0,
        int(FENCE_S_MAX),
        flag="--self-fence S",
    )
    home: str = _setting(
        "", "with `read_only`: URLs of servers at home, reported to clients that want to write", flag="--home URLS"
    )
    home_token: str | None = _setting(None, "token for the servers at home, to take holds", is_secret=True)
    holds: bool = _setting(True, "hold at `home` what readers here still need", flag="--no-holds")
    ca_file: str | None = _setting(
        None, "PEM file of the CA that signs the servers of `home` and `index`", flag="--ca-file FILE"
    )
    certificate_file: str | None = _setting(None, "PEM file with the certificate and key presented to these servers")
    publish_every: int = _setting(
        5, "seconds between [publications](backup.md#publications); 0: none", 0, int(EVERY_S_MAX)
    )
    verify_sample: str = _setting(
        "1%", "share of the parts that its own maintenance [checks](check.md#samples) once a day; 0: none"
    )
    presigned_s: int = _setting(
        600, "validity of presigned URLs in seconds, at most that of the token or certificate", 1, PRESIGNED_S_MAX
    )
    shutdown_s: int = _setting(30, "seconds to answer accepted requests at shutdown", 1, 3_600)
    linger_ms: int = _setting(0, "more: fewer, larger commits; each insert waits that long", 0, 1_000, table="levers")
    part_mib: int = _setting(128, "more: fewer blobs; a merge rewrites more, in more memory", 1, 1_024, table="levers")
    access_log: bool = _setting(False, "log a JSON line for each request", flag="--access-log")
    traces: bool = _setting(False, "send spans by OTLP, configured by `OTEL_*` variables", flag="--traces")
    limits: Limits = field(default_factory=Limits)
    policy: Policy = field(default_factory=Policy)

    def check(self) -> None:
        """Raises InvalidUsage naming the invalid setting."""
        self._check_region()
        for setting in SETTINGS:
            value = setting.value_in(self)
            if value is not None and (refusal := setting.refusal(value)) is not None:
                raise InvalidUsage(f"{setting.key} {refusal}")
        part, shard = self.policy.inline_part_bytes_max, self.policy.inline_shard_bytes_max
        if part > shard:
            raise InvalidUsage(
                f"levers.inline_part_bytes_max is {part}; it must be at most inline_shard_bytes_max, {shard}"
            )
        for name in _FILES:
            if getattr(self, name) == "":  # an empty environment variable
                raise InvalidUsage(f"{name} is empty: set it to a file, or remove the option or variable")
        if not self.read_only and bool(self.blob) != bool(self.consensus):
            raise InvalidUsage("give both a blob and a consensus location, or a directory, or none of them")
        if self.directory and self.blob:
            raise InvalidUsage("give either a directory, or a blob and a consensus location, not both")
        if self.maintenance_token is not None and len(self.maintenance_token) < TOKEN_CHARS_MIN:
            raise InvalidUsage(f"the maintenance token is shorter than {TOKEN_CHARS_MIN} characters")
        HistoryDefaults(self.history)
        if self.verify_sample.strip() != "0":
            samples_of(self.verify_sample)
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise InvalidUsage("TLS needs both a certificate and a key file")
        if self.tls_client_ca and not (self.tls_certificate and self.tokens_file):
            raise InvalidUsage(
                "client certificates need a server certificate, and a tokens file, which says what each may do"
            )
        if self.tls is not None:
            context_of(self.tls)
        if not self.is_loopback and not self.tokens_file and not self.insecure:
            raise InvalidUsage(
                f"without tokens the server listens on loopback only, not on {self.host}; "
                "give --tokens FILE (or --insecure, if everyone who can reach it may do everything)"
            )

    @property
    def in_memory(self) -> bool:
        """Whether a store is in the memory of this process, so that other processes cannot use it."""
        return any((url or "").partition(":")[0].lower() == "mem" for url in (self.blob, self.consensus))

    def _check_region(self) -> None:
        for region in filter(None, (self.region, self.of)):
            check_region(region)
        if self.read_only and self.consensus:
            raise InvalidUsage("a read-only server uses the blob store alone: give no consensus location")
        check_fence(self.self_fence)
        if self.read_only and self.self_fence:
            raise InvalidUsage("a read-only server does not write: --self-fence is for the home region")
        if not self.read_only and (self.of or self.home):
            raise InvalidUsage("of and home are for a read-only server: give --read-only")

    @property
    def tls(self) -> TlsFiles | None:
        """None: the server speaks HTTP without TLS."""
        if not self.tls_certificate or not self.tls_key:
            return None
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_ca or None)

    @property
    def trust(self) -> ClientTls:
        """TLS settings of requests to other servers."""
        return ClientTls(self.ca_file, self.certificate_file)

    def open_index(self, clock: Clock) -> IndexFile | IndexUrl | None:
        """The index of regions; None: there is none. Raises what `persist.regions.region_index.open_index` raises."""
        return open_index(self.index, self.index_token, clock, self.trust) if self.index else None

    @property
    def home_urls(self) -> tuple[str, ...]:
        return tuple(url.strip() for url in self.home.split(",") if url.strip())

    @property
    def is_loopback(self) -> bool:
        return is_local(self.host)


def is_local(host: str) -> bool:
    """Whether a host is this machine: a loopback address or `localhost`. Other names can resolve to anything."""
    name = host.strip("[]").removesuffix(".").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _settings() -> tuple[Setting, ...]:
    of_fields = [
        replace(setting.metadata[_METADATA], name=setting.name)
        for owner in (ServerSettings, Limits)
        for setting in fields(owner)
        if _METADATA in setting.metadata
    ]
    defaults = Policy()
    of_policy = [
        Setting(name, int, getattr(defaults, name), text, least, most, "levers", is_of_policy=True)
        for name, least, most, text in _POLICY_LEVERS
    ]
    return tuple(sorted([*of_fields, *of_policy], key=lambda setting: list(PREFIXES).index(setting.table)))


_POLICY_LEVERS = (
    ("inline_part_bytes_max", 0, MIB, "more: fewer blobs; a larger log, and a larger State"),
    ("inline_shard_bytes_max", 0, 8 * MIB, "more: fewer merges into blobs; a larger State, which opening reads"),
    ("inline_batches", 4, 256, "more: fewer merges; reads look at more batches"),
    ("batches_max", 256, 100_000, "more: writers continue longer without maintenance; reads get slower"),
    ("plain_parts_max", 64, 16_384, "more: fewer and larger bundles to read; a larger State"),
    ("rollup_every", 32, 65_536, "more: fewer rollups; opening reads more state diffs"),
    ("overlay_flush_at", 100, 10_000, "more: fewer blobs of attributes, outcomes, history and marks; a larger State"),
)
SETTINGS = _settings()
"""All settings of a server, grouped by table."""


def server_settings(values: Mapping[Setting, Value]) -> ServerSettings:
    """The settings with these values, and defaults for the others. They are not checked."""
    by_owner: dict[str, dict[str, Any]] = {"": {}, "limits": {}, "policy": {}}
    for setting, value in values.items():
        owner = "policy" if setting.is_of_policy else "limits" if setting.table == "limits" else ""
        by_owner[owner][setting.name] = value
    policy = record.replace(Policy(), **by_owner["policy"])
    return ServerSettings(**by_owner[""], limits=Limits(**by_owner["limits"]), policy=policy)
