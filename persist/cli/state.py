"""`persist state export | import`: the State of a shard as a JSON file, and a shard made of one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from blob import open_blob
from persist.cli.connection_args import add_arguments as add_where
from persist.cli.connection_args import check_there, where_of
from persist.copies.state_file import FILE_BYTES_MAX, exported, imported, read_file
from persist.core.errors import InvalidUsage
from persist.formats.store_errors import translated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    what = "write the State of a shard as JSON, with the blobs that it names"
    out = actions.add_parser("export", help=what, description=what)
    out.add_argument("name", metavar="NAME", help="the shard")
    add_where(out)
    out.add_argument("-o", "--out", metavar="FILE", help="where to; without it to the standard output")
    out.set_defaults(act=_export)
    what = "make a shard of such a file, with copies of its blobs"
    back = actions.add_parser("import", help=what, description=what)
    back.add_argument("file", metavar="FILE")
    add_where(back)
    back.add_argument("--as", dest="as_name", required=True, metavar="NAME", help="the name of the shard that is made")
    back.add_argument("--from", dest="source", metavar="URL", help="the blob store that has its blobs; else this one")
    back.add_argument("--keep-policies", action="store_true", help="let its policy of rows go on at once")
    back.set_defaults(act=_import)


def run(arguments: argparse.Namespace) -> int:
    act: Callable[[argparse.Namespace], int] = arguments.act
    return act(arguments)


def _export(arguments: argparse.Namespace) -> int:
    location = where_of(arguments).open(must_exist=True)
    try:
        text = json.dumps(exported(location, arguments.name), indent=1)
    finally:
        location.close()
    if arguments.out is None:
        sys.stdout.write(text + "\n")
    else:
        try:
            Path(arguments.out).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidUsage(f"{arguments.out} cannot be written: {error.strerror}") from error
    return 0


def _import(arguments: argparse.Namespace) -> int:
    try:
        file = Path(arguments.file)
        if file.stat().st_size > FILE_BYTES_MAX:
            raise InvalidUsage(f"{arguments.file} is larger than {FILE_BYTES_MAX} bytes")
        data = file.read_bytes()
    except OSError as error:
        raise InvalidUsage(f"{arguments.file} cannot be read: {error.strerror}") from error
    found = read_file(data)
    with ExitStack() as opened:
        location = where_of(arguments).open()
        opened.callback(location.close)
        source = location.blob
        if arguments.source is not None:
            check_there(arguments.source)
            with translated():
                source = open_blob(arguments.source)
            opened.callback(source.close)
        made = imported(location, found, arguments.as_name, source, keeps_policies=arguments.keep_policies)
    told = {"shard": made.name, "upper": made.upper, "sent": made.sent, "policy_taken_away": made.policy}
    print(json.dumps({**told, "critical_readers": list(made.readers)}))
    return 0
