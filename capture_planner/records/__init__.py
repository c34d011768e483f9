"""The immutable values that files and calls carry: specs, environments, batches, plans."""
