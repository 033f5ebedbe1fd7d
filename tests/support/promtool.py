"""Prometheus' own tool, on rules of the documentation and on figures of real processes."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

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
    directory: Path, alerts: Sequence[str], before: Mapping[str, float], after: Mapping[str, float], *more: str
) -> None:
    """Check that these alerts fire where what came between the two scrapes comes again every minute, and not before.

    Those of `more` fire as well, and perhaps before. Only the rules of these alerts are evaluated, with the series
    that they name: promtool computes each rule at every minute.
    """
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    rules = [rule for rule in group["rules"] if rule["alert"] in {*alerts, *more}]
    tests = [
        _test([*alerts, *more], before, after, rules, fires=True),
        _test(alerts, before, before, rules, fires=False),
    ]
    only = directory / "rules.yaml"
    only.write_text(json.dumps({"groups": [{**group, "rules": rules}]}))
    path = directory / "provoked.yaml"
    path.write_text(json.dumps({"rule_files": [str(only)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", str(path))


def _test(
    alerts: Sequence[str],
    before: Mapping[str, float],
    after: Mapping[str, float],
    rules: Sequence[Mapping[str, str]],
    *,
    fires: bool,
) -> dict[str, Any]:
    """One test of promtool. What did not change stays as it was."""
    named = set(re.findall(r"\w+", " ".join(rule["expr"] for rule in rules)))
    series = []
    for name, last in {**before, **after}.items():
        if name.partition("{")[0] in named:
            step = last - before.get(name, 0.0) if _is_count(name) else 0.0
            first = before.get(name, 0.0) if step else last
            series.append({"series": _at_target(name), "values": f"{first!r}+{step!r}x{MINUTES}"})
    wanted = [
        {
            "expr": f'group by (alertname) (ALERTS{{alertname="{alert}",alertstate="firing"}})',
            "eval_time": f"{MINUTES - 5}m",
            "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if fires else [],
        }
        for alert in alerts
    ]
    return {"interval": "1m", "input_series": series, "promql_expr_test": wanted}


def _is_count(name: str) -> bool:
    return name.partition("{")[0].endswith(("_total", "_bucket", "_count", "_sum"))


def _at_target(name: str) -> str:
    """The series as Prometheus stores it, with the labels of where it was scraped."""
    metric, _, labels = name.removesuffix("}").partition("{")
    target = 'instance="here:8787"' if "job=" in labels else TARGET
    return f"{metric}{{{target}{',' if labels else ''}{labels}}}"
