"""Settings of the service, and the only reader of its environment variables (`PERSIST_*`)."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches

from persist.client.trust import Trust
from persist.commit.publishing import EVERY_S_MAX
from persist.commit.system import Clock
from persist.copies.verify import samples_of
from persist.core.errors import InvalidUsage
from persist.core.shard_settings import DEFAULT_HISTORY, HistoryDefaults
from persist.core.state import Policy
from persist.regions.fencing import check_fence
from persist.regions.index import IndexFile, IndexUrl, open_index
from persist.regions.opening import check_region
from rpc.levers import BY_NAME, LEVER_PREFIX, LEVERS, Lever, check_levers, policy_with
from rpc.tls import TlsFiles, context_of

DEFAULT_DIRECTORY = "persist-data"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8787
TOKEN_CHARS_MIN = 32
PRESIGNED_S_MAX = 600  # SECURITY.md promises it
LIMIT_PREFIX = "PERSIST_LIMIT_"
# Variables that other parts of persist read; so they are no misspelt settings.
VARIABLES_OF_OTHERS = frozenset(f"PERSIST_{name}" for name in ("URL", "TOKEN"))
_FILES_OF_TLS = ("tls_certificate", "tls_key", "tls_client_ca", "ca_file", "certificate_file")
SHUTDOWN_S_MAX = 3_600


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """What one server takes on at once, and how long it waits for a client. See docs/operations.md."""

    connections_max: int = 20_000  # open connections; fewer where the system lets a process open fewer files
    address_connections_max: int = 15_000  # of them, of one address (IPv6: of one /64 network)
    token_connections_max: int = 15_000  # of them, of one token
    idle_s: float = 120.0  # a connection without a request
    request_line_bytes_max: int = 32 * KIB
    headers_bytes_max: int = 64 * KIB  # of one request, with its request line
    headers_max: int = 128  # of one request
    headers_s: float = 20.0  # from a request's first byte to the end of its headers
    heads_bytes_max: int = 32 * MIB  # of all requests whose headers are not complete
    pipelined_max: int = 64  # requests of one connection that wait for the answer before them
    body_grace_s: float = 20.0  # for so long a body may come slower than this:
    body_bytes_per_s_min: int = 8 * KIB
    slow_reader_s: float = 60.0  # for so long a client may take an answer slower than this; it can resume
    answer_bytes_per_s_min: int = 8 * KIB
    answers_bytes_max: int = 128 * MIB  # of all answers that clients have not taken yet
    sweep_s: float = 1.0  # how often connections are looked at for the times above
    share_percent: int = 50  # of snapshots, bodies, commands and work, that one token or address may have
    streams_share_percent: int = 75  # of listen streams
    io_share_percent: int = 25  # of io_threads: each that works keeps the event loop waiting, too
    refusal_pause_s: float = 1.0  # for so long who is beyond a quota a second waits for the refusal
    commands_max: int = 10_000  # commands queued or being committed
    command_bytes_max: int = 16 * MIB  # body of one command
    read_command_bytes_max: int = 64 * KIB  # of one by a token that may only read
    rows_bytes_max: int = 64 * MIB  # body of one insert, append, compare-and-append
    rows_max: int = 5_000_000  # rows of one such body
    blob_bytes_max: int = 256 * MIB  # one part through the server's routes for blobs
    body_memory_bytes: int = 256 * KIB  # a body with more lies in a temporary file until it is whole
    bodies_bytes_max: int = 64 * MIB  # all bodies in memory that are being received
    spool_bytes_max: int = 4 * GIB  # all bodies in temporary files
    worked_bytes_max: int = 128 * MIB  # of those, in memory to be worked on; others wait
    decoded_bytes_max: int = 144 * MIB  # what the rows of one body take once they are decoded
    decoding_bytes_max: int = 192 * MIB  # what all those take that are worked on, besides the bodies and small ones
    decoders_max: int = 2  # processes that decode Parquet bodies
    decoder_memory_bytes: int = 256 * MIB  # what each of them takes for a body
    decode_s_max: float = 30.0  # longest time that it takes for one
    decodes_queued_max: int = 8  # Parquet bodies that wait for such a process
    downloads_bytes_max: int = 64 * MIB  # of parts that are sent; others wait
    download_piece_bytes: int = 4 * MIB  # as which one is read
    waits_max: int = 20_000  # requests that wait for a shard to move
    listeners_max: int = 20_000  # listen streams
    snapshots_max: int = 8  # snapshots that are streamed through the server
    snapshot_memory_bytes: int = 32 * MIB  # what each of them holds while it consolidates
    listen_memory_bytes: int = 16 * MIB  # what a listener takes for one event
    wait_s_max: float = 60.0  # longest wait of one request
    lead_threads: int = 16  # commits under way, one a shard
    io_threads: int = 32  # store reads, parts, rows
    io_queue_max: int = 2_000  # work that waits for such a thread
    metric_shards_max: int = 1_000  # shards with gauges of their own
    token_shard_leases_max: int = 1_000  # leased readers of one token on one shard, at this server
    token_leases_max: int = 20_000  # leased readers of one token on all shards, at this server

    def check(self) -> None:
        """Raises InvalidUsage naming the limit that is wrong."""
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not 0 < value < 1 << 50:
                raise InvalidUsage(f"the limit {limit.name} is {value}; it must be more than 0, and below 2^50")
        if self.decoded_bytes_max > self.decoding_bytes_max:
            one, most = self.decoded_bytes_max, self.decoding_bytes_max
            raise InvalidUsage(f"the limit decoded_bytes_max is {one}; it must be at most decoding_bytes_max, {most}")
        for name in ("share_percent", "streams_share_percent", "io_share_percent"):
            if getattr(self, name) > 100:
                raise InvalidUsage(f"the limit {name} is {getattr(self, name)}; it must be in [1, 100]")

    def share(self, most: int, percent: int | None = None) -> int:
        """How much of `most` one caller may have: always something."""
        return max(1, most * (self.share_percent if percent is None else percent) // 100)


@dataclass(frozen=True)
class ServerSettings:
    """Where the shards are and how the server listens. `port` 0 takes a free one."""

    directory: str | None = None
    blob: str | None = field(default=None, repr=False)
    consensus: str | None = field(default=None, repr=False)  # which may hold a password
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    tokens_file: str | None = None
    quotas: str | None = None  # the file of quotas
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None  # who signs certificates of clients, by which they need no token
    insecure: bool = False
    maintenance: bool = True
    maintenance_metrics_port: int = 0  # at which maintenance of its own tells /metrics; 0: nowhere
    maintenance_token: str | None = field(default=None, repr=False)  # by which maintenance of its own is known
    history: str = DEFAULT_HISTORY  # what new shards keep: `7d`, or by names `7d,eu/=30d,tmp/=none`
    read_only: bool = False  # a copy of another location's blob store is served, and nothing is written
    region: str = ""  # the name of the region in which this server is
    of: str = ""  # the region that is home to what a read-only server shows
    index: str = ""  # the index of regions, of which clients are told: a file, or the URL of a server that tells it
    index_token: str | None = field(default=None, repr=False)  # by which it is asked for there
    self_fence: int = 0  # seconds after which a home that cannot look whether another has taken over stops writing
    home: str = ""  # URLs of servers there, with commas: answers to who would write name them
    home_token: str | None = field(default=None, repr=False)  # by which holds are taken there
    holds: bool = True  # whether what readers need here is held at home
    ca_file: str | None = None  # whom to trust, of the servers that this one asks: at home, and for the index
    certificate_file: str | None = None  # with its key: the certificate by which these know this server
    publish_every: int = 5  # seconds between publications of what was committed, at least; 0: none
    verify_sample: str = "1%"  # of the parts, that its own maintenance looks at once a day; 0: none
    presigned_s: int = 600
    shutdown_s: int = 30
    linger_ms: int = 0  # for which a commit waits for more commands
    part_mib: int = 128  # as large as its own maintenance makes parts, about
    access_log: bool = False
    traces: bool = False  # whether spans are sent by OpenTelemetry
    limits: Limits = field(default_factory=Limits)
    policy: Policy = field(default_factory=Policy)

    def check(self) -> None:
        """Raises InvalidUsage naming the setting that is wrong."""
        self._check_region()
        self.limits.check()
        check_levers({lever.name: self.lever(lever) for lever in LEVERS})
        for name in (*_FILES_OF_TLS, "tokens_file", "quotas"):
            if getattr(self, name) == "":  # a variable that another program left empty: nobody meant to go without
                raise InvalidUsage(f"{name} is empty: name a file, or leave the option or variable out")
        if not self.read_only and bool(self.blob) != bool(self.consensus):
            raise InvalidUsage("give both a blob and a consensus location, or a directory, or none of them")
        if self.directory and self.blob:
            raise InvalidUsage("give either a directory, or a blob and a consensus location, not both")
        if not 0 <= self.port < 65536:
            raise InvalidUsage(f"port is {self.port}; it must be in [0, 65535]")
        if not 0 <= self.maintenance_metrics_port < 65536:
            port = self.maintenance_metrics_port
            raise InvalidUsage(f"maintenance_metrics_port is {port}; it must be in [0, 65535]")
        if self.maintenance_token is not None and len(self.maintenance_token) < TOKEN_CHARS_MIN:
            raise InvalidUsage(f"the maintenance token is shorter than {TOKEN_CHARS_MIN} characters")
        if not 0 <= self.publish_every <= EVERY_S_MAX:
            raise InvalidUsage(f"publish_every is {self.publish_every}; it must be in [0, {EVERY_S_MAX:.0f}] seconds")
        if not 1 <= self.presigned_s <= PRESIGNED_S_MAX:
            raise InvalidUsage(f"presigned_s is {self.presigned_s}; it must be in [1, {PRESIGNED_S_MAX}] seconds")
        if not 1 <= self.shutdown_s <= SHUTDOWN_S_MAX:
            raise InvalidUsage(f"shutdown_s is {self.shutdown_s}; it must be in [1, {SHUTDOWN_S_MAX}] seconds")
        HistoryDefaults(self.history)
        if self.verify_sample.strip() != "0":
            samples_of(self.verify_sample)
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise InvalidUsage("TLS needs both a certificate and a key file")
        if self.tls_client_ca and not (self.tls_certificate and self.tokens_file):
            raise InvalidUsage(
                "certificates of clients need one of the server, and a tokens file, which says what each may do"
            )
        if self.tls is not None:
            context_of(self.tls)
        if not self.is_loopback and not self.tokens_file and not self.insecure:
            raise InvalidUsage(
                f"without tokens the server listens on loopback only, not on {self.host}; "
                "give --tokens FILE (or --insecure, if everybody who reaches it may do everything)"
            )

    def lever(self, lever: Lever) -> int:
        """What one of the levers is set to."""
        found: int = getattr(self.policy if lever.of_policy else self, lever.name)
        return found

    @property
    def in_memory(self) -> bool:
        """Whether a store is in the memory of one process, so that no other one sees it."""
        return any((url or "").partition(":")[0].lower() == "mem" for url in (self.blob, self.consensus))

    def _check_region(self) -> None:
        for region in filter(None, (self.region, self.of)):
            check_region(region)
        if self.read_only and self.consensus:
            raise InvalidUsage("a read-only server needs the blob store alone: give no consensus location")
        check_fence(self.self_fence)
        if self.read_only and self.self_fence:
            raise InvalidUsage("a read-only server does not write: --self-fence is for a home")
        if not self.read_only and (self.of or self.home):
            raise InvalidUsage("of and home are for a read-only server: give --read-only")

    @property
    def tls(self) -> TlsFiles | None:
        """None: it speaks HTTP without TLS."""
        if not self.tls_certificate or not self.tls_key:
            return None
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_ca or None)

    @property
    def trust(self) -> Trust:
        """TLS of the requests that this server makes to others."""
        return Trust(self.ca_file, self.certificate_file)

    def open_index(self, clock: Clock) -> IndexFile | IndexUrl | None:
        """The index of regions; None: there is none. Raises what `persist.regions.index.open_index` raises."""
        return open_index(self.index, self.index_token, clock, self.trust) if self.index else None

    @property
    def home_urls(self) -> tuple[str, ...]:
        """The servers at home, as far as they are known."""
        return tuple(url.strip() for url in self.home.split(",") if url.strip())

    @property
    def is_loopback(self) -> bool:
        return is_local(self.host)


def is_local(host: str) -> bool:
    """Whether a host means this machine: a loopback address, or `localhost`. Other names can lead anywhere."""
    name = host.strip("[]").removesuffix(".").lower()
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def from_environment(environment: Mapping[str, str] | None = None) -> dict[str, object]:
    """The settings that `PERSIST_*` variables give, by the field of ServerSettings: PERSIST_PORT, PERSIST_DIRECTORY, …

    Each of the limits has one, too: PERSIST_LIMIT_SNAPSHOTS_MAX, …, and each of the levers: PERSIST_LEVER_LINGER_MS, ….
    Raises InvalidUsage naming a variable that cannot be read.
    """
    environment = os.environ if environment is None else environment
    found: dict[str, object] = {}
    for setting in fields(ServerSettings):
        if setting.name in ("limits", "policy") or setting.name in BY_NAME:
            continue
        name = f"PERSIST_{setting.name.upper()}"
        if name in environment:
            found[setting.name] = _read(name, environment[name], str(setting.type))
    given = {name: text for name, text in environment.items() if name.startswith(LIMIT_PREFIX)}
    if given:
        found["limits"] = _limits(given)
    return found | _levers({name: text for name, text in environment.items() if name.startswith(LEVER_PREFIX)})


def _levers(given: Mapping[str, str]) -> dict[str, object]:
    """The settings that variables of levers give: PERSIST_LEVER_ROLLUP_BYTES, …"""
    values: dict[str, int] = {}
    for name, text in given.items():
        lever = name.removeprefix(LEVER_PREFIX).lower()
        if lever not in BY_NAME:
            meant = _meant(name, (LEVER_PREFIX + known.upper() for known in BY_NAME))
            raise InvalidUsage(f"there is no lever for the variable {name}{meant}; docs/levers.md names them")
        if not re.fullmatch(r"[0-9]{1,16}", text):
            least, most = BY_NAME[lever].least, BY_NAME[lever].most
            raise InvalidUsage(f"the variable {name} is {text!r}; it must be a whole number in [{least}, {most}]")
        values[lever] = int(text)
    found: dict[str, object] = {name: value for name, value in values.items() if not BY_NAME[name].of_policy}
    if len(found) < len(values):
        found["policy"] = policy_with(Policy(), values)
    return found


def _limits(given: Mapping[str, str]) -> Limits:
    """The limits that variables give: PERSIST_LIMIT_SNAPSHOTS_MAX, …"""
    kinds = {f"{LIMIT_PREFIX}{limit.name.upper()}": limit for limit in fields(Limits)}
    values: dict[str, float] = {}
    for name, text in given.items():
        if name not in kinds:
            meant = _meant(name, kinds)
            raise InvalidUsage(f"there is no limit for the variable {name}{meant}; docs/operations.md names them")
        limit = kinds[name]
        pattern = r"[0-9]{1,16}" if limit.type == "int" else r"[0-9]{1,16}(\.[0-9]{1,6})?"
        if not re.fullmatch(pattern, text):
            wanted = "a whole number" if limit.type == "int" else "a number"
            raise InvalidUsage(f"the variable {name} is {text!r}; it must be {wanted}")
        values[limit.name] = int(text) if limit.type == "int" else float(text)
    return replace(Limits(), **values)  # type: ignore[arg-type]


def _meant(name: str, known: Iterable[str]) -> str:
    """What to say of a name that is not known: the known one that is most like it."""
    close = get_close_matches(name, list(known), 1, 0.85)
    return f" (did you mean {close[0]}?)" if close else ""


def _read(name: str, text: str, kind: str) -> object:
    if kind == "int":
        if not text.isdecimal():
            raise InvalidUsage(f"the variable {name} is {text!r}; it must be a whole number")
        return int(text)
    if kind == "bool":
        if text.lower() not in ("0", "1", "true", "false"):
            raise InvalidUsage(f"the variable {name} is {text!r}; it must be 0 or 1")
        return text.lower() in ("1", "true")
    return text
