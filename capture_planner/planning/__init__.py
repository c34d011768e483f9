"""From a spec, a machine and backends to a plan: modes, sizes, entries, waivers."""
