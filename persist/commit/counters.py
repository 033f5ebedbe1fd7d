"""What a machine counts."""

from __future__ import annotations


class MachineMetrics:
    """Counters of one machine; read without locks, so a reader may see one commit half counted."""

    def __init__(self) -> None:
        self.commits = 0
        self.commands = 0
        self.races_lost = 0
        self.retries = 0
        self.spills = 0
        self.flushes = 0
        self.reliefs = 0
        self.upkeep_bytes = 0
        self.upkeep_failed = 0
        self.upkeep_refused = 0
        self.group_max = 0

    def committed(self, commands: int, lost: int) -> None:
        self.commits += 1
        self.commands += commands
        self.races_lost += lost
        self.group_max = max(self.group_max, commands)
