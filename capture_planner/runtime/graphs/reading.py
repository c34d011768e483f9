"""A reading of a device's memory, around captures. Plain data, no torch."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Reading:
    """What a device says of its memory at one moment, when nothing runs and no freed block is kept."""

    used: int
    """Bytes that are gone, as the device reports it: taken by any process, for anything."""
    held: int
    """Bytes of all segments of the caching allocator, in pools of graphs and outside."""

    @property
    def outside(self) -> int:
        """Bytes that the allocator knows nothing of: modules, handles, executable graphs, others' memory."""
        return self.used - self.held
