"""A run leaves sound shards behind: the checker finds nothing, during claims and loans and after them."""

from __future__ import annotations

import random

from persist.copies.verify import Depth, verify_shards
from tests.simulation.host import Host
from tests.simulation.oracle_errors import expect
from tests.support.read_comparison import reader_differences

VERIFIED_ALL = 50  # of the first seeds each is verified
VERIFIED_SHARE = 0.25  # of the others


def is_verified(seed: int) -> bool:
    """Whether this run is looked at: that takes a fifth of the time of a run."""
    return seed < VERIFIED_ALL or random.Random(f"verified {seed}").random() < VERIFIED_SHARE


def check_verified(host: Host) -> None:
    """No shard has a fault at the greatest depth, and its contents are those that a naive reader finds."""
    if not is_verified(host.run.seed):
        return
    names = host.location.all_names(with_dropped=False)
    for found in verify_shards(host.location, names, Depth(deep=True, threads=1)):
        expect(found.is_sound, "verify", f"a healthy shard has faults: {'; '.join(map(str, found.faults))}")
        host.run.path("verified")
    differences = reader_differences(host.location)
    expect(not differences, "verify", f"the readers differ: {'; '.join(differences)}")
