"""`persist serve`: serve shards over HTTP, with maintenance in a child process."""

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
from contextlib import ExitStack, closing
from dataclasses import replace
from urllib.parse import quote

from persist.check.location_checks import open_places
from persist.cli.connection_args import Where, check_given
from persist.cli.connection_args import add_arguments as add_where
from persist.cli.long_running import LEVELS, announce, configure_logs
from persist.cli.terminal import print_line
from persist.client.client import Connection
from persist.commit.location import Location, LocationSettings
from persist.core.errors import InvalidUsage
from persist.maintenance.journal_writer import PublishSettings
from persist.regions.failover import HomeWatch
from persist.regions.replica import Home, open_replica
from persist.telemetry.tracing import open_tracer
from rpc.app import bind, local_url_of, serve, url_of
from rpc.auth import Tokens, mint
from rpc.config_file import effective_settings, load, misspelt
from rpc.quotas import quota_file_of
from rpc.settings import DEFAULT_DIRECTORY, SETTINGS, ServerSettings, Setting, Value

# The maintenance process of a server is restarted when it ends.

LOOK_S = 0.5
PAUSE_FIRST_S, PAUSE_MAX_S = 1.0, 60.0  # before a restart; doubled at each consecutive one
STOP_EXTRA_S = 5.0  # for a process to end, beyond the server's own shutdown time


class ChildKeeper:
    """Restarts the process that `start` returns, if any."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes] | None]) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._start = start
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="persist-keeper", daemon=True)

    def begin(self) -> None:
        self._child = self._start()
        if self._child is not None:
            self._thread.start()

    def stop(self, shutdown_s: float) -> None:
        """Stop restarting, and end the process; after `shutdown_s` and `STOP_EXTRA_S` it is killed."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(shutdown_s + STOP_EXTRA_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _keep(self) -> None:
        pause_s, running_s = PAUSE_FIRST_S, 0.0
        while not self._ending.wait(LOOK_S):
            exit_code = None if self._child is None else self._child.poll()
            if exit_code is None:
                running_s += LOOK_S
                if running_s > PAUSE_MAX_S:
                    pause_s = PAUSE_FIRST_S
                continue
            announce("maintenance ended; it is restarted", exit_code=exit_code)
            if self._ending.wait(pause_s):
                return
            pause_s, running_s = min(2 * pause_s, PAUSE_MAX_S), 0.0
            try:
                self._child = self._start()
            except OSError as error:  # not enough processes or memory at the moment
                announce("maintenance cannot be started; it is retried", why=str(error))


# The command.

NICENESS = 10  # of maintenance
_OF_MAINTENANCE = frozenset(
    ("directory", "blob", "consensus", "ca_file", "certificate_file", "index_token", "publish_every", "verify_sample")
)
HOME_TIMEOUT_S = 5.0  # of one request for a hold
_log = logging.getLogger("persist.rpc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_where(parser)
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings; see docs/settings.md")
    parser.add_argument("--check", action="store_true", help="show the settings in effect with their sources, and exit")
    for setting in SETTINGS:
        if setting.flag is not None:
            _add_flag(parser, setting)
    parser.add_argument("--log-level", choices=LEVELS, default="warning")


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    """The option of a setting. Its default is None."""
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
    loaded = load(option_values(arguments), os.environ, arguments.config)
    settings = loaded.settings
    if arguments.check:
        _check(settings)
        for line in (*effective_settings(loaded), *(f"# {_unknown(*name)}" for name in misspelt(os.environ))):
            print_line(line)
        return 0
    if settings.maintenance and settings.tokens_file and settings.maintenance_token is None:
        settings = replace(settings, maintenance_token=mint("maintenance")[0])
    _check(settings)
    configure_logs("info" if settings.access_log and arguments.log_level == "warning" else arguments.log_level)
    for name, meant in misspelt(os.environ):
        _log.warning("%s", _unknown(name, meant))
    return _serve(settings, bind(settings.host, settings.port))


def _check(settings: ServerSettings) -> None:
    """Raises InvalidUsage if the settings, or a file that they name, are invalid. No store is opened."""
    settings.check()
    if settings.tokens_file is not None:
        Tokens(settings.tokens_file, now_s=time.time)
    quota_file_of(settings, time.monotonic)


def _unknown(name: str, meant: str) -> str:
    return f"nothing reads the variable {name}: did you mean {meant}?"


def option_values(arguments: argparse.Namespace) -> dict[str, Value]:
    """The settings of the options, by name. Raises InvalidUsage if one of them is empty."""
    check_given(arguments, "region", "of", "home", "index")
    stores: dict[str, Value] = {"directory": arguments.dir, "blob": arguments.blob, "consensus": arguments.consensus}
    flags = {setting.name: getattr(arguments, setting.name) for setting in SETTINGS if setting.flag is not None}
    return {name: value for name, value in stores.items() if value} | {
        name: value for name, value in flags.items() if value is not None
    }


def _serve(settings: ServerSettings, listener: socket.socket) -> int:
    """Serve until a signal comes. The URL is printed when the server is ready."""
    publish = PublishSettings(float(settings.publish_every)) if settings.publish_every else None
    location_settings = LocationSettings(
        policy=settings.policy,
        history=settings.history,
        metered=True,
        publish=publish,
        shows_no_copy=True,
        tracer=open_tracer("persist") if settings.traces else None,
    )
    with closing(listener), closing(_opened(settings, location_settings)) as location, ExitStack() as stack:
        for path in open_places(location.blob.url, location.consensus.url):
            _log.warning("%s is readable for every user of this machine: run chmod -R o-rwx on it", path)
        watch = None  # for another region that has become home
        if not settings.read_only:
            index = settings.open_index(location.clock)
            watch = HomeWatch(location.identity, settings.region, index, float(settings.self_fence))
            stack.callback(watch.close)
        keeper = ChildKeeper(lambda: _maintenance(settings, listener))
        stack.callback(keeper.stop, settings.shutdown_s)

        def ready() -> None:
            if watch is not None:
                watch.start()
            print_line(url_of(listener, settings))
            sys.stdout.flush()
            keeper.begin()

        serve(location, settings, listener, ready)
    return 0


def _opened(settings: ServerSettings, location_settings: LocationSettings) -> Location:
    """The location, or a copy that follows the publications of one."""
    where = Where(settings.directory, settings.blob, settings.consensus)
    if not settings.read_only:
        return where.open(location_settings)
    if where.blob and where.directory:
        raise InvalidUsage("give either --dir or --blob, not both")
    url = where.blob or f"persist://{quote(os.path.abspath(where.directory or DEFAULT_DIRECTORY))}"
    replica = open_replica(url, Home(settings.of, settings.home_urls), location_settings)
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
    """The command line of maintenance: a process of low priority that ends with this one.

    It commits through the server at `url`; None: directly. The command line is visible to every user, so the URLs of
    stores and the server's token are passed in the environment (PERSIST_BLOB, PERSIST_CONSENSUS, PERSIST_TOKEN).
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


def _maintenance(settings: ServerSettings, listener: socket.socket) -> subprocess.Popen[bytes] | None:
    """Start maintenance as a process of low priority, unless it is disabled.

    It commits through the server. With TLS, maintenance bypasses the server and commits directly.
    """
    if settings.read_only or not settings.maintenance or settings.in_memory:
        return None  # another process could not open stores in memory
    command = maintenance_command(settings, None if settings.tls_certificate else local_url_of(listener, settings))
    environment = dict(os.environ)
    for setting in SETTINGS:
        value = setting.value_in(settings)
        if setting.name in _OF_MAINTENANCE:
            environment.pop(setting.variable, None)
            if value is not None:
                environment[setting.variable] = str(value)
    if settings.maintenance_token is not None:
        environment["PERSIST_TOKEN"] = settings.maintenance_token
    # Standard output is for the URL alone, so the output of maintenance is redirected to standard error.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment)
