"""Fields of vLLM's JSON flags, read as vLLM's own types read them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from capture_planner.engines.history import History
from capture_planner.engines.parsing import NUMBERS, did_you_mean, listed, refusal
from capture_planner_vllm.emulation.releases import minor
from capture_planner_vllm.emulation.tables import names, older

PARTS = History.load(older()).parts
"""Fields that older releases had, by the flag that they are in."""
COMPILE = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")
ALL_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_WHOLE = re.compile(r"\s*([+-]?\d+(?:_\d+)*)(?:\.0+)?\s*")
_TRUE, _FALSE = ("true", "yes", "on", "1", "t", "y"), ("false", "no", "off", "0", "f", "n")


class Part:
    """One JSON flag: reads its fields as leniently as vLLM does; errors name the field."""

    def __init__(self, flag: str, kind: str, value: Mapping[str, Any] | None) -> None:
        self.flag, self.given = flag, dict(value or {})
        for key in self.given:
            if key not in names()[kind]:
                raise self._unknown(key, kind)

    def refuse(self, key: str, reason: str, remedy: str = "") -> Exception:
        return refusal(self.flag, reason, remedy, key)

    def _unknown(self, key: str, kind: str) -> Exception:
        old = PARTS.get(kind, {}).get(key)
        if old is None:
            return self.refuse(key, f"vLLM {minor()} has no such field", did_you_mean(key, names()[kind]))
        last = f"; {old.until} was the last release with it" if old.until else ""
        return self.refuse(key, f"vLLM {minor()} has no such field{last}", old.remedy_of(json.dumps(self.given[key])))

    def boolean(self, key: str, default: bool | None = None) -> bool | None:
        value = self.given.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        text = str(value).lower()
        if text in _TRUE or value == 1:
            return True
        if text in _FALSE or value == 0:
            return False
        raise self.refuse(key, f"expected true or false, got {value!r}", "give true or false")

    def integer(self, key: str, *, least: int | None = None) -> int | None:
        value = self.given.get(key)
        if value is None:
            return None
        number = whole_number(value)
        if number is None:
            raise self.refuse(key, f"expected a whole number, got {value!r}", "give a number")
        if least is not None and number < least:
            raise self.refuse(key, f"vLLM requires at least {least}, got {number}", f"give {least} or more")
        return number

    def integers(self, key: str) -> list[int] | None:
        if key not in self.given:
            return None
        value = self.given[key]
        numbers = [whole_number(item) for item in value] if isinstance(value, list) else [None]
        if None in numbers:
            several = isinstance(value, str) and NUMBERS.fullmatch(value)
            remedy = f"write [{', '.join(listed(value))}]" if several else "as in [1, 2, 4, 8]"
            raise self.refuse(key, f"expected a list of whole numbers, got {value!r}", remedy)
        return [item for item in numbers if item is not None]

    def text(self, key: str) -> str | None:
        value = self.given.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refuse(key, f"expected text, got {value!r}", "write it in quotes")
        return value

    def one_of(self, key: str, names_: tuple[str, ...], by_number: int) -> str | None:
        """Return one of ``names_``, given in any case or as one of the numbers below ``by_number``."""
        value = self.given.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value.upper() in names_:
            return value.upper()
        number = whole_number(value) if not isinstance(value, str) else None
        if number is not None and 0 <= number < by_number:
            return names_[number]
        raise self.refuse(key, f"{value!r} is unknown", f"give one of {', '.join(names_)}")


def whole_number(value: Any) -> int | None:
    """Return a value that vLLM's types read as an integer (true, 2.0, "2", "2.0"), else None."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    match = _WHOLE.fullmatch(value) if isinstance(value, str) else None
    return None if match is None else int(match.group(1))


def translated(text: str) -> str:
    """Return the JSON that older releases read as ``-O`` with the names of today; itself where it is none."""
    try:
        given = json.loads(text)
    except ValueError:
        return text
    if not isinstance(given, dict):
        return f'{{"mode": {text}}}' if isinstance(given, int) else text
    old = PARTS["compilation_config"]
    pairs = [
        old[key].written(json.dumps(value)) if key in old else f"{json.dumps(key)}: {json.dumps(value)}"
        for key, value in given.items()
    ]
    return f"{{{', '.join(pair for pair in pairs if pair)}}}"
