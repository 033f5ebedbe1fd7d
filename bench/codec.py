"""How much faster are States and state diffs read and written than with the hand-written codecs of 226984e?

Two processes, one with the code of that commit and one with this code, build the same State of 36 batches and the same
diff of one append, and take turns, so that both see the same machine:

    python -m bench.codec [--rounds 15] [--loops 100]

The old code is taken from the repository's history (`git archive`). The figures are microseconds a call, medians over
the rounds.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from bench.bars import bar, median

OLD = "226984e"
ROOT = Path(__file__).resolve().parent.parent
WHAT = ("decode_state", "encode_state", "decode_diff", "encode_diff")


class Worker:
    """A process that runs `bench/codec_worker.py` with the code of one tree."""

    def __init__(self, tree: Path, loops: int) -> None:
        script = str(ROOT / "bench" / "codec_worker.py")
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", script, str(loops)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=tree,
        )
        self.sizes = self._answer()
        self.rounds: list[dict[str, float]] = []

    def round(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.rounds.append(self._answer())

    def microseconds(self, what: str) -> float:
        return median([found[what] for found in self.rounds])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--loops", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", OLD, "persist", "blob", "consensus"], cwd=ROOT, check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        old, new = Worker(Path(folder), args.loops), Worker(ROOT, args.loops)
        for _ in range(args.rounds):
            old.round()
            new.round()
        old.close()
        new.close()
    for what in WHAT:
        before, after = old.microseconds(what), new.microseconds(what)
        print(f"{what:<12} {before:9.1f} us at {OLD}, {after:7.1f} us now: {before / after:.1f} times faster")
    for name in ("state", "diff"):
        print(f"{name:<12} {old.sizes[name]:9.0f} bytes at {OLD}, {new.sizes[name]:7.0f} bytes now")
    bar("codec-decode-state", old.microseconds("decode_state") / new.microseconds("decode_state"), ">= 10")


if __name__ == "__main__":
    main()
