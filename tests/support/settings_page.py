"""Writes docs/settings.md from the settings of a server: `python -m tests.support.settings_page`, or `make docs`."""

from __future__ import annotations

from collections.abc import Iterator

from rpc.settings import SETTINGS, Setting
from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "settings.md"
STORES = {"directory": "--dir PATH", "blob": "--blob URL", "consensus": "--consensus URL"}
SIZES = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}

HEAD = """\
# Settings of a server

This page is made from the code by `make docs`, and a test compares the two.

Each setting of `persist serve` is a variable of the environment, and a line of a TOML file that `--config`
names. Many are options, too:

```toml
host = "0.0.0.0"
port = 8787
tokens_file = "/etc/persist/tokens.json"
blob = "s3://bucket/prefix"
consensus = "postgresql://db/persist"

[limits]
snapshots_max = 16

[levers]
linger_ms = 2
inline_batches = 128
```

An option comes before the file. The file comes before the environment, and the environment before the
default. If the file names a location, the environment's location does not count. The file is read once, at
the start. Secrets are given by variables alone: `PERSIST_MAINTENANCE_TOKEN`, `PERSIST_INDEX_TOKEN` and
`PERSIST_HOME_TOKEN`. A URL with a password belongs in `PERSIST_CONSENSUS`, because every user of the machine
may read a command line.

An unknown name, a value of another type, and a value out of its range are refused, and nothing starts. The
message names the file, the line and the key of the first fault, and what is allowed or the nearest name:

```text
persist.toml, line 2: prot is no setting of the part before the first table; did you mean port?
persist.toml, line 11: levers.linger_ms is -1 and must be in [0, 1000]
```

A value that is wrong in another way, such as an age, and two settings that contradict each other are refused
as well. That message names the settings alone, since the other one may be an option, a variable or a default.

`persist serve --config FILE --check` shows each setting that is in force and what gave it: an option, the
file, the environment or the default. Then it ends. Passwords in URLs and secrets are not shown. The exit code
is 0 if a server could start with these settings, and 1 with one sentence if not. The files of tokens, quotas
and certificates are read. The stores are not opened, so a wrong URL is not noticed. The output is such a file
again, without passwords. `--check` works without `--config`, too.

A variable `PERSIST_…` that nothing reads, but that looks like one that is read, is a warning in the log of
the server, and a comment at the end of the output of `--check`:

```text
nothing reads the variable PERSIST_PROT: did you mean PERSIST_PORT?
```

A variable that begins with `PERSIST_LIMIT_` or `PERSIST_LEVER_` and names no setting is refused.

## Server

The variable of a setting is `PERSIST_` and its name in capitals. An empty variable of `region`, `of`, `home`
or `index` counts as one that is not set. An empty option, such as `--region ""`, is refused.
"""
LIMITS = """
## Limits

Each server counts for itself. Nothing is lost when a request is refused. The variable of a limit is
`PERSIST_LIMIT_` and its name in capitals. [Running the service](operations.md#limits) says how requests
beyond a limit are refused.
"""
LEVERS = """
## Levers

Each trades one cost for another. The defaults are those with which everything is measured. The variable of a
lever is `PERSIST_LEVER_` and its name in capitals.
"""
TAIL = """
- `linger_ms` is for many writers on one shard whose commits are expensive, for example over a remote store.
  Commands that come while a commit is under way are committed together anyway.
- Clients get `inline_part_bytes_max` when they connect. `inline_part_bytes_max` must be at most
  `inline_shard_bytes_max`.
- A rollup is due after `rollup_every` commits. It is due sooner after 32 of them, once they have logged
  512 KiB, or as much as the State takes if that is more, or once 32 blobs have left the State.
- A bundle lists up to four times `plain_parts_max` parts. Writers are slowed down while five times
  `overlay_flush_at` attributes or outcomes wait for their blobs, or the history of half as many commits.
- `part_mib` is for the maintenance that the server starts. `persist maintain run` has `--part-size`.
- All servers of a location should have the same levers: each acts by its own.
"""


def page() -> str:
    """The whole page."""
    lines = [HEAD, "| setting | option | default | what it sets |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{one.name}` | {_option(one)} | {_default(one)} | {one.text}{_range(one)} |"
        for one in SETTINGS
        if not one.table and not one.is_secret
    ]
    lines += [LIMITS, "| limit | default | what it bounds |", "| --- | --- | --- |"]
    lines += [f"| `{one.name}` | {_default(one)} | {one.text} |" for one in _of("limits")]
    lines += [LEVERS, "| lever | default | range | what it trades |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{one.name}` | {one.default:,} | {int(one.least):,} to {int(one.most):,} | {one.text} |"
        for one in _of("levers")
    ]
    return "\n".join([*lines, TAIL])


def _of(table: str) -> Iterator[Setting]:
    return (one for one in SETTINGS if one.table == table)


def _option(setting: Setting) -> str:
    flag = {"directory": "--dir PATH", "blob": "--blob URL", "consensus": "--consensus URL"}.get(
        setting.name, setting.flag
    )
    return f"`{flag}`" if flag else ""


def _range(setting: Setting) -> str:
    return f" ({int(setting.least):,} to {int(setting.most):,})" if setting.kind is int else ""


def _default(setting: Setting) -> str:
    value = setting.default
    if value in (None, ""):
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"`{str(value).lower()}`"
    if "_bytes" in setting.name:
        unit, size = next((unit, size) for unit, size in SIZES.items() if value >= size)
        return f"{value // size:,} {unit}"
    if setting.name.endswith("_s"):
        return f"{value:g} s"
    return str(value) if setting.name == "port" else f"{value:,}"


if __name__ == "__main__":
    PAGE.write_text(page())
