"""`persist serve`: shards over HTTP."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from persist.cli.process import LEVELS, configure_logs
from persist.cli.where import add_arguments as add_where
from persist.cli.where import check_given, where_of
from persist.client.connect import Connection
from persist.commit.location import Location, LocationSettings
from persist.commit.publishing import PublishSettings
from persist.commit.tracing import open_tracer
from persist.core.errors import InvalidUsage
from persist.doctor.location import open_places
from persist.regions.fencing import HomeWatch
from persist.regions.opening import open_replica
from persist.regions.replica import Home
from rpc.auth import Tokens, maintenance_token
from rpc.cli.keeping import Keeper
from rpc.config_file import in_force, misspelt, put_into, read_config
from rpc.quota_file import quota_file_of
from rpc.serving import bind, local_url_of, serve, url_of
from rpc.settings import DEFAULT_DIRECTORY, ServerSettings, from_environment

HOME_TIMEOUT_S = 5.0  # of one request for a hold
_log = logging.getLogger("persist.rpc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_where(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings, limits and levers; see docs/levers.md")
    parser.add_argument("--check", action="store_true", help="show what is in force, from where, and end")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port (default 8787; 0 takes a free one); the URL is the first line")
    parser.add_argument("--tokens", metavar="FILE", help="file of hashed bearer tokens; see docs/http.md")
    parser.add_argument("--quotas", metavar="FILE", help="how much each token may use; read again when it changes")
    parser.add_argument("--tls-certificate", metavar="FILE", help="PEM file; needs --tls-key")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM file; needs --tls-certificate")
    parser.add_argument(
        "--tls-client-ca",
        metavar="FILE",
        help="PEM file of who signs the certificates of clients; they need no token",
    )
    parser.add_argument("--insecure", action="store_true", default=None, help="listen beyond loopback without tokens")
    parser.add_argument(
        "--history", metavar="AGE", help="what new shards keep readable: 7d (default), none, forever, or 7d,tmp/=none"
    )
    parser.add_argument(
        "--read-only", action="store_true", default=None, help="serve a copy of another location's blob store (--blob)"
    )
    parser.add_argument("--region", metavar="NAME", help="the region in which this server is")
    parser.add_argument("--of", metavar="NAME", help="with --read-only: the region that is home to the copy")
    parser.add_argument("--index", metavar="FILE", help="the index of regions: a file, or the URL of another server")
    parser.add_argument(
        "--self-fence", type=int, metavar="S", help="stop writing after S seconds in which nothing told who is home"
    )
    parser.add_argument("--home", metavar="URLS", help="with --read-only: servers there, told to who would write")
    parser.add_argument(
        "--no-holds", action="store_true", help="with --home: do not hold there what readers here still need"
    )
    parser.add_argument("--ca-file", metavar="FILE", help="PEM file of whom to trust, for --home and --index https://…")
    parser.add_argument("--no-maintenance", action="store_true", help="run neither compaction nor garbage collection")
    parser.add_argument(
        "--maintenance-metrics-port", type=int, metavar="PORT", help="where that tells /metrics (127.0.0.1 only)"
    )
    parser.add_argument("--access-log", action="store_true", default=None, help="a JSON line for each request")
    parser.add_argument(
        "--traces", action="store_true", default=None, help="send spans by OTLP, as OTEL_* variables say"
    )
    parser.add_argument("--log-level", choices=LEVELS, default="warning")


def run(arguments: argparse.Namespace) -> int:
    config = read_config(arguments.config) if arguments.config is not None else {}
    environment = frozenset(os.environ)
    put_into(os.environ, config)
    settings = settings_of(arguments)
    if arguments.check:
        _check(settings)
        print("\n".join(in_force(settings, _given(arguments), config, environment)))
        print("".join(f"# {_misspelt(name, meant)}\n" for name, meant in misspelt(environment)), end="")
        return 0
    if settings.maintenance and settings.tokens_file and settings.maintenance_token is None:
        settings = replace(settings, maintenance_token=maintenance_token())
    _check(settings)
    configure_logs("info" if settings.access_log and arguments.log_level == "warning" else arguments.log_level)
    for name, meant in misspelt(environment):
        _log.warning("%s", _misspelt(name, meant))
    listener = bind(settings.host, settings.port)
    return _serve(arguments, settings, listener)


def _check(settings: ServerSettings) -> None:
    """Raises InvalidUsage: what the settings say cannot be served, or a file that they name cannot be used.

    No store is opened and no directory made: a start that fails here leaves none.
    """
    settings.check()
    if settings.tokens_file is not None:
        Tokens(settings.tokens_file, now_s=time.time)
    quota_file_of(settings, time.monotonic)


def _misspelt(name: str, meant: str) -> str:
    return f"nothing reads the variable {name}: did you mean {meant}?"


def settings_of(arguments: argparse.Namespace) -> ServerSettings:
    """Arguments over environment over defaults. Raises InvalidUsage: one of them is empty, or cannot be read."""
    check_given(arguments, "region", "of", "home", "index")
    found: dict[str, Any] = {**from_environment(), **_given(arguments)}
    where = where_of(arguments)
    return ServerSettings(**{**found, "directory": where.directory, "blob": where.blob, "consensus": where.consensus})


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that options give."""
    given: dict[str, Any] = {
        "directory": arguments.dir,
        "blob": arguments.blob,
        "consensus": arguments.consensus,
        "host": arguments.host,
        "port": arguments.port,
        "tokens_file": arguments.tokens,
        "quotas": arguments.quotas,
        "tls_certificate": arguments.tls_certificate,
        "tls_key": arguments.tls_key,
        "tls_client_ca": arguments.tls_client_ca,
        "insecure": arguments.insecure,
        "access_log": arguments.access_log,
        "traces": arguments.traces,
        "history": arguments.history,
        "read_only": arguments.read_only,
        "region": arguments.region,
        "of": arguments.of,
        "home": arguments.home,
        "index": arguments.index,
        "ca_file": arguments.ca_file,
        "self_fence": arguments.self_fence,
        "holds": False if arguments.no_holds else None,
        "maintenance": False if arguments.no_maintenance else None,
        "maintenance_metrics_port": arguments.maintenance_metrics_port,
    }
    return {name: value for name, value in given.items() if value is not None}


def _serve(arguments: argparse.Namespace, settings: ServerSettings, listener: socket.socket) -> int:
    """Serve until a signal comes. Its URL goes to standard output once it answers."""
    publish = PublishSettings(float(settings.publish_every)) if settings.publish_every else None
    served = LocationSettings(
        policy=settings.policy,
        history=settings.history,
        metered=True,
        publish=publish,
        shows_no_copy=True,
        tracer=open_tracer("persist") if settings.traces else None,
    )
    try:
        location = _opened(arguments, settings, served)
    except BaseException:
        listener.close()
        raise
    for path in open_places(location.blob.url, location.consensus.url):
        _log.warning("every user of this machine may read %s, whatever tokens say: run chmod -R o-rwx on it", path)
    watch = _watch(location, settings)
    keeper = Keeper(lambda: _maintenance(arguments, settings, listener))

    def ready() -> None:
        if watch is not None:
            watch.start()
        print(url_of(listener, settings), flush=True)
        keeper.begin()

    try:
        serve(location, settings, listener, ready)
    finally:
        keeper.stop(settings.shutdown_s)
        if watch is not None:
            watch.close()
        location.close()
    return 0


def _watch(location: Location, settings: ServerSettings) -> HomeWatch | None:
    """What looks whether another home has taken over, besides who commits; None: it is a copy itself."""
    if settings.read_only:
        return None
    index = settings.open_index(location.clock)
    return HomeWatch(location.identity, settings.region, index, float(settings.self_fence))


def _opened(arguments: argparse.Namespace, settings: ServerSettings, served: LocationSettings) -> Location:
    """What is served: a location, or a copy of one that is looked at for news."""
    where = where_of(arguments)
    if not settings.read_only:
        return where.open(served)
    if where.blob and where.directory:
        raise InvalidUsage("give either --dir or --blob, not both")
    url = where.blob or f"persist://{quote(os.path.abspath(where.directory or DEFAULT_DIRECTORY))}"
    replica = open_replica(url, Home(settings.of, settings.home_urls), served)
    if settings.holds and settings.home_urls:
        home = Connection(
            ",".join(settings.home_urls),
            token=settings.home_token,
            ca_file=settings.ca_file,
            certificate_file=settings.certificate_file,
            timeout_s=HOME_TIMEOUT_S,
        )
        replica.hold_at(home.transport, settings.region or "copy")
    replica.watch()
    return replica


def _maintenance(
    arguments: argparse.Namespace, settings: ServerSettings, listener: socket.socket
) -> list[subprocess.Popen[bytes]]:
    """Start maintenance as a process of low priority, unless it is switched off.

    It commits through the server. Where that takes TLS it does not know whom to trust, and commits by itself.
    """
    if settings.read_only or not settings.maintenance or importlib.util.find_spec("compactor.supervise") is None:
        return []
    if settings.in_memory:  # another process would find other stores there
        return []
    supervise = importlib.import_module("compactor.supervise")
    where = where_of(arguments)
    url = None if settings.tls_certificate else local_url_of(listener, settings)
    extra = [f"--{name}={value}" for name in ("region", "index") if (value := getattr(settings, name))]
    if settings.part_mib != ServerSettings.part_mib:
        extra.append(f"--part-size={settings.part_mib}")
    if settings.maintenance_metrics_port:
        extra.append(f"--metrics-port={settings.maintenance_metrics_port}")
    command = supervise.child_command(
        directory=where.directory, blob=where.blob, consensus=where.consensus, url=url, extra=extra
    )
    environment = _environment(arguments)
    if settings.ca_file is not None:
        environment["PERSIST_CA_FILE"] = settings.ca_file
    if settings.maintenance_token is not None:
        environment["PERSIST_TOKEN"] = settings.maintenance_token
    # Our own output is the URL alone: what maintenance says goes to standard error.
    return [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment)]


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    """What children inherit: locations go by the environment, since anybody may read a command line."""
    where = where_of(arguments)
    found = {"PERSIST_DIRECTORY": where.directory, "PERSIST_BLOB": where.blob, "PERSIST_CONSENSUS": where.consensus}
    kept = {name: value for name, value in os.environ.items() if name not in found}
    return {**kept, **{name: value for name, value in found.items() if value}}
