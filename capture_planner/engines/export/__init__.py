"""From a plan to the flags of an engine: what comes closest, what it loses, and the proof."""
