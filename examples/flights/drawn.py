"""The timeline on the page: the console's own modules as one script within it, so that the page needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rpc.routes.server_routes import console_files

MODULES = ("dom.js", "clock.js", "format.js", "draw.js", "timeline.js")  # each after those that it imports
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_DRAW = """
const place = document.getElementById("timeline");
const run = JSON.parse(document.getElementById("run").textContent);
new ResizeObserver(() => fill(place, timelineDrawing(run, place.clientWidth))).observe(place);
"""


def drawn(run: Mapping[str, Any]) -> str:
    """A place for the drawing, the data, and the script that draws them, however wide the page is."""
    data = json.dumps(run, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
    return (
        f'<div id="timeline"></div>\n<script type="application/json" id="run">{data}</script>\n'
        f'<script type="module">//<![CDATA[\n{script()}//]]>\n</script>\n'
    )


def script() -> str:
    """The modules as one: what they import from one another is there already."""
    files = console_files()
    texts = (files[name].data.decode() for name in MODULES)
    return "".join(_EXPORT.sub("", _IMPORT.sub("", text)) for text in texts) + _DRAW


__all__ = ["drawn"]
