"""Files in and out: the only user of cattrs and YAML.

Reading gives all problems at once, each at its file, line, column and path; types are strict, and
nothing is coerced. Writing is compact, stable to the byte, and whole or not at all.
"""

from capture_planner.codec.converter import format_bytes, label, parse_bytes
from capture_planner.codec.documents import parse
from capture_planner.codec.reading import (
    is_plan,
    load_environment,
    load_plan,
    load_spec,
    loads,
    placed,
    read,
)
from capture_planner.codec.writing import HEADER, dumps, dumps_json, to_data, write

__all__ = [
    "HEADER",
    "dumps",
    "dumps_json",
    "format_bytes",
    "is_plan",
    "label",
    "load_environment",
    "load_plan",
    "load_spec",
    "loads",
    "parse",
    "parse_bytes",
    "placed",
    "read",
    "to_data",
    "write",
]
