"""Files in and out: the only user of cattrs and YAML.

Reading gives all problems at once, each at its file, line, column and path; types are strict, and
nothing is coerced. Writing is compact, stable to the byte, and whole or not at all.
"""

from capture_planner.codec.converter import label, parse_bytes
from capture_planner.codec.plain import json_fields, json_of, plain, plain_fields
from capture_planner.codec.reading import (
    Document,
    load_environment,
    load_measurements,
    load_observation,
    load_plan,
    load_profile,
    load_spec,
    load_traffic,
    loads,
    read,
    read_stream,
    structure,
)
from capture_planner.codec.writing import (
    HEADER,
    dumps,
    dumps_json,
    dumps_plain,
    is_in_place,
    replaceable,
    to_data,
    write,
)
from capture_planner.records.text import format_bytes

__all__ = [
    "HEADER",
    "Document",
    "dumps",
    "dumps_json",
    "dumps_plain",
    "format_bytes",
    "is_in_place",
    "json_fields",
    "json_of",
    "label",
    "load_environment",
    "load_measurements",
    "load_observation",
    "load_plan",
    "load_profile",
    "load_spec",
    "load_traffic",
    "loads",
    "parse_bytes",
    "plain",
    "plain_fields",
    "read",
    "read_stream",
    "replaceable",
    "structure",
    "to_data",
    "write",
]
