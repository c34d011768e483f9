"""Which entry serves a batch, in constant time."""
