"""Files of each kind as text, whole or spoilt."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from capture_planner import codec
from capture_planner.testing.strategies.machines import environments
from capture_planner.testing.strategies.plans import arbitrary_plans
from capture_planner.testing.strategies.specs import specs
from support.strategies.observations import observations
from support.strategies.profiles import profiles
from support.strategies.traffic import traffics


@attrs.frozen(kw_only=True)
class DocumentText:
    """The text of a file that is, or once was, a record of ``kind``."""

    kind: type[Any]
    text: str
    mutated: bool


_SCRAPS = (
    *["null", "no", "8.7", '"8"', "-1", "99999999999999999999", "[]", "{}", "*a", "---", "é", "FULL", ".inf"],
    *("", "[1, 2", "!!python/name:os.system x", "&a [*a]", "<<: {a: 1}", "? x", "\t", "\x00"),
)


@st.composite
def _mutations(draw: DrawFn, text: str) -> str:
    lines = text.split("\n")
    at = draw(st.integers(0, len(lines) - 1))
    scrap = draw(st.sampled_from(_SCRAPS) | st.text(max_size=8))
    way = draw(st.sampled_from(("drop", "double", "value", "insert", "cut", "indent")))
    if way == "drop":
        del lines[at]
    elif way == "double":
        lines.insert(at, lines[at])
    elif way == "value":
        key, colon, _ = lines[at].partition(":")
        lines[at] = f"{key}{colon} {scrap}"
    elif way == "insert":
        lines.insert(at, scrap)
    elif way == "cut":
        del lines[at + 1 :]
        lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
    else:
        lines[at] = "  " + lines[at]
    return "\n".join(lines)


@st.composite
def documents(draw: DrawFn) -> DocumentText:
    """Return the text of files of every kind, half of them damaged in a place or two."""
    kinds = specs(max_reqs=64) | environments() | arbitrary_plans() | observations() | traffics() | profiles()
    value: Any = draw(kinds)
    text, damage = codec.dumps(value), draw(st.sampled_from((0, 0, 1, 2)))
    for _ in range(damage):
        text = draw(_mutations(text))
    return DocumentText(kind=type(value), text=text, mutated=damage > 0)
