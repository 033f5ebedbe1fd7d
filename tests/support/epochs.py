"""The epoch of a location, raised as recovery and promotion do it."""

from __future__ import annotations

from persist.commit.location import Location
from persist.commit.location_identity import LOG_KEY, epoch_key
from persist.core.ids import LocationBinding
from persist.formats.state_frames import encode_binding


def raise_epoch(location: Location) -> int:
    """Write the next epoch into both stores; the new one."""
    before = location.identity.check()
    binding = LocationBinding(before.location_id, before.epoch + 1, location.ids.uuid7())
    location.blob.put(epoch_key(binding.epoch), encode_binding(binding))
    entry = location.consensus.head(LOG_KEY)
    assert entry is not None
    assert location.consensus.compare_and_set(LOG_KEY, entry.seqno + 1, encode_binding(binding))
    location.identity.check_home()
    return binding.epoch
