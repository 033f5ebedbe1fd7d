"""Prometheus' own tool, on rules of the documentation and on figures of real processes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.installed import installed
from tests.support.pages import ROOT

ALERTS = ROOT / "docs" / "monitoring" / "alerts.yaml"
MINUTES = 100
TARGET = 'instance="here:8787",job="persist"'


def promtool(*arguments: str) -> str:
    """What it says. Fails where it is not content; the test is skipped where it is not installed, but not in CI."""
    done = subprocess.run([installed("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def firing(
    directory: Path,
    alerts: Sequence[str],
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    fires: bool = True,
) -> None:
    """Check that these alerts fire, or do not, where what came between the two scrapes comes again every minute.

    What did not change stays as it was. Series that no rule names are left out: promtool computes each of them.
    """
    named = set(re.findall(r"\w+", ALERTS.read_text()))
    series = {name: last for name, last in {**before, **after}.items() if name.partition("{")[0] in named}
    lines = [
        "rule_files:",
        f"  - {ALERTS}",
        "evaluation_interval: 1m",
        "tests:",
        "  - interval: 1m",
        "    input_series:",
    ]
    for name, last in series.items():
        step = last - before.get(name, 0.0) if _is_count(name) else 0.0
        first = before.get(name, 0.0) if step else last
        lines.append(f"      - {{series: '{_at_target(name)}', values: '{first!r}+{step!r}x{MINUTES}'}}")
    lines += ["    promql_expr_test:"]
    for alert in alerts:
        want = f"[{{labels: '{{alertname=\"{alert}\"}}', value: 1}}]" if fires else "[]"
        lines += [
            f'      - expr: group by (alertname) (ALERTS{{alertname="{alert}",alertstate="firing"}})',
            f"        eval_time: {MINUTES - 5}m",
            f"        exp_samples: {want}",
        ]
    path = directory / "provoked.yaml"
    path.write_text("\n".join(lines) + "\n")
    promtool("test", "rules", str(path))


def _is_count(name: str) -> bool:
    return name.partition("{")[0].endswith(("_total", "_bucket", "_count", "_sum"))


def _at_target(name: str) -> str:
    """The series as Prometheus stores it, with the labels of where it was scraped."""
    metric, _, labels = name.removesuffix("}").partition("{")
    target = 'instance="here:8787"' if "job=" in labels else TARGET
    return f"{metric}{{{target}{',' if labels else ''}{labels}}}"
