"""`persist serve`: shards over HTTP, with maintenance beside it."""

from __future__ import annotations

import argparse
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import quote

from persist.check.location_checks import open_places
from persist.cli.connection_args import Where, check_given
from persist.cli.connection_args import add_arguments as add_where
from persist.cli.long_running import LEVELS, announce, configure_logs
from persist.client.connect import Connection
from persist.commit.location import Location, LocationSettings
from persist.core.errors import InvalidUsage
from persist.maintenance.publication_writer import PublishSettings
from persist.regions.failover import HomeWatch
from persist.regions.replica import Home, open_replica
from persist.telemetry.tracing import open_tracer
from rpc.auth import Tokens, maintenance_token
from rpc.config_file import in_force, load, misspelt
from rpc.quota_file import quota_file_of
from rpc.server import bind, local_url_of, serve, url_of
from rpc.settings import DEFAULT_DIRECTORY, SETTINGS, ServerSettings, Setting, Value

# Maintenance beside a server goes on: a process of it that ended, or was killed, is started again.


LOOK_S = 0.5
PAUSE_FIRST_S, PAUSE_MAX_S = 1.0, 60.0  # before it is started again; each time in a row twice as long
STOP_EXTRA_S = 5.0  # that a process may take to end, beyond the server's own shutdown time
Children = list[subprocess.Popen[bytes]]


class ChildKeeper:
    """Keeps the processes that `start` gives; `children` are those of now."""

    def __init__(self, start: Callable[[], Children]) -> None:
        self.children: Children = []
        self._start = start
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="persist-keeper", daemon=True)

    def begin(self) -> None:
        self.children = self._start()
        if self.children:
            self._thread.start()

    def end(self) -> None:
        """Start nothing any more. Also where it has not begun."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def stop(self, shutdown_s: float) -> None:
        """End what was started: each process may take so long, and `STOP_EXTRA_S`, before it is killed."""
        self.end()
        for child in self.children:
            if child.poll() is None:
                child.terminate()
        deadline = time.monotonic() + shutdown_s + STOP_EXTRA_S
        for child in self.children:
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _keep(self) -> None:
        pause_s, well_s = PAUSE_FIRST_S, 0.0
        while not self._ending.wait(LOOK_S):
            ended = [child.returncode for child in self.children if child.poll() is not None]
            if not ended:
                well_s += LOOK_S
                if well_s > PAUSE_MAX_S:
                    pause_s = PAUSE_FIRST_S
                continue
            announce("maintenance ended; it is started again", exit_code=ended[0])
            if self._ending.wait(pause_s):
                return
            pause_s, well_s = min(2 * pause_s, PAUSE_MAX_S), 0.0
            try:
                self.children = self._start()
            except OSError as error:  # no process, or no memory, for now
                announce("maintenance cannot be started; it is tried again", why=str(error))


# `persist serve`: shards over HTTP.


NICENESS = 10  # of maintenance
_OF_MAINTENANCE = frozenset(
    ("directory", "blob", "consensus", "ca_file", "certificate_file", "index_token", "publish_every", "verify_sample")
)
HOME_TIMEOUT_S = 5.0  # of one request for a hold
_log = logging.getLogger("persist.rpc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_where(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings; see docs/settings.md")
    parser.add_argument("--check", action="store_true", help="show what is in force, from where, and end")
    for setting in SETTINGS:
        if setting.flag is not None:
            _add_flag(parser, setting)
    parser.add_argument("--log-level", choices=LEVELS, default="warning")


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    """The option of a setting. One that is not given is None."""
    flag, _, metavar = (setting.flag or "").partition(" ")
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", setting.text).replace("%", "%%")
    if setting.kind is bool:
        action = "store_false" if flag.startswith("--no-") else "store_true"
        text = f"do not {text}" if flag.startswith("--no-") else text
        parser.add_argument(flag, dest=setting.name, action=action, default=None, help=text)
        return
    if setting.default not in (None, "", 0):
        text = f"{text} (default {setting.default})"
    parser.add_argument(flag, dest=setting.name, type=setting.kind, metavar=metavar, help=text)


def run(arguments: argparse.Namespace) -> int:
    loaded = load(given_by(arguments), os.environ, arguments.config)
    settings = loaded.settings
    if arguments.check:
        _check(settings)
        print("\n".join(in_force(loaded)))
        print("".join(f"# {_misspelt(name, meant)}\n" for name, meant in misspelt(os.environ)), end="")
        return 0
    if settings.maintenance and settings.tokens_file and settings.maintenance_token is None:
        settings = replace(settings, maintenance_token=maintenance_token())
    _check(settings)
    configure_logs("info" if settings.access_log and arguments.log_level == "warning" else arguments.log_level)
    for name, meant in misspelt(os.environ):
        _log.warning("%s", _misspelt(name, meant))
    listener = bind(settings.host, settings.port)
    return _serve(settings, listener)


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


def given_by(arguments: argparse.Namespace) -> dict[str, Value]:
    """The settings that options give, by their names. Raises InvalidUsage: one of them is empty."""
    check_given(arguments, "region", "of", "home", "index")
    stores: dict[str, Value] = {"directory": arguments.dir, "blob": arguments.blob, "consensus": arguments.consensus}
    flags = {setting.name: getattr(arguments, setting.name) for setting in SETTINGS if setting.flag is not None}
    given = {name: value for name, value in stores.items() if value}
    return given | {name: value for name, value in flags.items() if value is not None}


def _serve(settings: ServerSettings, listener: socket.socket) -> int:
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
        location = _opened(settings, served)
    except BaseException:
        listener.close()
        raise
    for path in open_places(location.blob.url, location.consensus.url):
        _log.warning("every user of this machine may read %s, whatever tokens say: run chmod -R o-rwx on it", path)
    watch = _watch(location, settings)
    keeper = ChildKeeper(lambda: _maintenance(settings, listener))

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


def _opened(settings: ServerSettings, served: LocationSettings) -> Location:
    """What is served: a location, or a copy of one that is looked at for news."""
    where = Where(settings.directory, settings.blob, settings.consensus)
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


def maintenance_command(settings: ServerSettings, url: str | None) -> list[str]:
    """The command line of maintenance: a process of low priority that ends when this one does, which has to start it.

    It commits through the server at `url`; None: itself. The URLs of stores and the server's token are not among the
    words, because they may be secret and every user may read a command line: the caller puts them into the environment
    (PERSIST_BLOB, PERSIST_CONSENSUS, PERSIST_TOKEN).
    """
    command = [sys.executable, "-m", "rpc.cli", "maintain", "run", "--nice", str(NICENESS)]
    command += ["--end-with-parent", str(os.getpid())]
    options = {
        "dir": settings.directory if settings.blob is None and settings.consensus is None else None,
        "url": url,
        "region": settings.region,
        "index": settings.index,
        "part-size": f"{settings.part_mib}MiB" if settings.part_mib != ServerSettings.part_mib else None,
        "metrics-port": settings.maintenance_metrics_port,
    }
    return command + [f"--{name}={value}" for name, value in options.items() if value]


def _maintenance(settings: ServerSettings, listener: socket.socket) -> list[subprocess.Popen[bytes]]:
    """Start maintenance as a process of low priority, unless it is switched off.

    It commits through the server. If that takes TLS, it does not know whom to trust, and commits itself.
    """
    if settings.read_only or not settings.maintenance:
        return []
    if settings.in_memory:  # another process would find other stores there
        return []
    command = maintenance_command(settings, None if settings.tls_certificate else local_url_of(listener, settings))
    environment = dict(os.environ)
    for setting in SETTINGS:  # what maintenance reads of them; anybody may read a command line
        value = setting.value_in(settings)
        if setting.name in _OF_MAINTENANCE:
            environment.pop(setting.variable, None)
            if value is not None:
                environment[setting.variable] = str(value)
    if settings.maintenance_token is not None:
        environment["PERSIST_TOKEN"] = settings.maintenance_token
    # Our own output is the URL alone: what maintenance says goes to standard error.
    return [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment)]
