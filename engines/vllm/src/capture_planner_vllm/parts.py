"""The JSON flags of vLLM that bear on graphs, checked field by field as its own types check them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from capture_planner.engines.parsing import NUMBERS, did_you_mean, listed
from capture_planner_vllm.flags import refusal

MODES = ("NONE", "PIECEWISE", "FULL")
COMPILE = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
ALL_MODES = (*MODES, "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_WHOLE = re.compile(r"\s*([+-]?\d+(?:_\d+)*)(?:\.0+)?\s*")
_TRUE, _FALSE = ("true", "yes", "on", "1", "t", "y"), ("false", "no", "off", "0", "f", "n")


@cache
def names() -> dict[str, list[str]]:
    """Return the names that vLLM's JSON flags, backends and methods have, as recorded from the release."""
    text = (resources.files(__package__) / "names.json").read_text(encoding="utf-8")
    found: dict[str, list[str]] = json.loads(text)
    return found


class Part:
    """One JSON flag: reads its fields with vLLM's leniency, and refuses with the place."""

    def __init__(self, flag: str, kind: str, value: Mapping[str, Any] | None) -> None:
        self.flag, self.given = flag, dict(value or {})
        for key in self.given:
            if key not in names()[kind]:
                raise self.refuse(key, "vLLM 0.33 has no such field", did_you_mean(key, names()[kind]))

    def refuse(self, key: str, reason: str, remedy: str = "") -> Exception:
        return refusal(self.flag, reason, remedy, key)

    def boolean(self, key: str, default: bool | None = None) -> bool | None:
        value = self.given.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        text = str(value).lower()
        if text in _TRUE or value == 1:
            return True
        if text in _FALSE or value == 0:
            return False
        raise self.refuse(key, f"vLLM wants true or false, not {value!r}", "give true or false")

    def integer(self, key: str, *, least: int | None = None) -> int | None:
        value = self.given.get(key)
        if value is None:
            return None
        found = whole_number(value)
        if found is None:
            raise self.refuse(key, f"vLLM wants a whole number, not {value!r}", "give a number")
        if least is not None and found < least:
            raise self.refuse(key, f"vLLM wants at least {least}, got {found}", f"give {least} or more")
        return found

    def number(self, key: str) -> float | None:
        value = self.given.get(key)
        if value is None:
            return None
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self.refuse(key, f"vLLM wants a number, not {value!r}", "give a number") from None

    def integers(self, key: str) -> list[int] | None:
        if key not in self.given:
            return None
        value = self.given[key]
        found = [whole_number(item) for item in value] if isinstance(value, list) else [None]
        if None in found:
            several = isinstance(value, str) and NUMBERS.fullmatch(value)
            remedy = f"write [{', '.join(listed(value))}]" if several else "as in [1, 2, 4, 8]"
            raise self.refuse(key, f"vLLM wants a list of whole numbers, not {value!r}", remedy)
        return [item for item in found if item is not None]

    def text(self, key: str) -> str | None:
        value = self.given.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refuse(key, f"vLLM wants a text, not {value!r}", "write it in quotes")
        return value

    def one_of(self, key: str, names_: tuple[str, ...], by_number: int) -> str | None:
        """Return a name in capitals, given as a name or as one of the first ``by_number`` numbers."""
        value = self.given.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value.upper() in names_:
            return value.upper()
        number = whole_number(value) if not isinstance(value, str) else None
        if number is not None and 0 <= number < by_number:
            return names_[number]
        raise self.refuse(key, f"vLLM does not know {value!r}", f"give one of {', '.join(names_)}")


def whole_number(value: Any) -> int | None:
    """Return what vLLM's types read as a whole number (true, 2.0, "2", "2.0"), or None for anything else."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    match = _WHOLE.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else int(match.group(1))
