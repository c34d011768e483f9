"""Variants of a recipe of srt-slurm: overrides of a base, one by one or zipped, and sweeps of placeholders.

By its docs/overrides.md and core/sweep.py of August 2026.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from capture_planner.engines.parsing import refusal

MOST_VARIANTS = 64
"""Variants of one file that are read."""
RESOLVE = "write each variant to a file of its own: srtctl resolve-override"
"""What to do about variants that are not read."""


@attrs.frozen(kw_only=True)
class RecipeVariant:
    """A recipe as it is submitted."""

    name: str
    """As in the names of its jobs, such as ``lowmem``; empty for a recipe without variants."""
    data: Mapping[str, Any]
    key: str = ""
    """The key of the file that it comes from."""


def variants(data: Mapping[str, Any]) -> Iterator[RecipeVariant]:
    """Yield the base of a file of overrides, then each override; of a sweep each combination that changes a worker.

    Raises ``FlagError`` for lists of an override that have different lengths, and for too many variants.
    """
    base = data.get("base")
    if isinstance(base, Mapping):
        found = (RecipeVariant(name="base", data=base, key="base"), *_overrides(data, base))
    else:
        found = tuple(_sweep(data))
    if len(found) > MOST_VARIANTS:
        raise refusal("recipe", f"{len(found)} variants, and {MOST_VARIANTS} are read", RESOLVE)
    yield from found


def _overrides(data: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[RecipeVariant]:
    for key, value in data.items():
        if not isinstance(value, Mapping):
            continue
        if key.startswith("override_"):
            yield RecipeVariant(name=key.removeprefix("override_"), data=_merged(base, value), key=key)
        elif key.startswith("zip_override_"):
            counts = {len(each) for each in _lists(value)} - {1}
            if len(counts) > 1:
                says = f"its lists have {' and '.join(map(str, sorted(counts)))} values"
                raise refusal(key, says, "give each list the same number of values, or one for all")
            for index in range(max(counts, default=1)):
                name = f"{key.removeprefix('zip_override_')}_{index}"
                yield RecipeVariant(name=name, data=_merged(base, _picked(value, index)), key=key)


def _merged(base: Any, over: Any) -> Any:
    """Return a base with an override: mappings merge, all else replaces, and null removes."""
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)):
        return over
    both = {**base, **{key: _merged(base.get(key), value) for key, value in over.items()}}
    return {key: value for key, value in both.items() if value is not None or key not in over}


def _lists(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _lists(each)
    elif isinstance(value, list):
        yield value


def _picked(value: Any, index: int) -> Any:
    """Return the values of one of the zipped variants; a list of one is for all."""
    if isinstance(value, Mapping):
        return {key: _picked(each, index) for key, each in value.items()}
    return value[index if len(value) > 1 else 0] if isinstance(value, list) and value else value


def _sweep(data: Mapping[str, Any]) -> Iterator[RecipeVariant]:
    swept = data.get("sweep")
    # Only placeholders of these two change what a worker runs.
    text = json.dumps([data.get("backend"), data.get("model")], default=str)
    used = {
        name: values
        for name, values in (swept.items() if isinstance(swept, Mapping) else ())
        if isinstance(values, list) and f"{{{name}}}" in text
    }
    # No more than it takes to see that they are too many.
    for chosen in itertools.islice(itertools.product(*used.values()), MOST_VARIANTS + 1):
        pairs = dict(zip(used, chosen, strict=True))
        name = "_".join(f"{key}{value}" for key, value in pairs.items())
        yield RecipeVariant(name=name, data=_expanded(data, pairs))


def _expanded(value: Any, pairs: Mapping[str, Any]) -> Any:
    """Return a value with its placeholders filled: ``{name}``."""
    if isinstance(value, Mapping):
        return {key: _expanded(each, pairs) for key, each in value.items()}
    if isinstance(value, list):
        return [_expanded(each, pairs) for each in value]
    for name, chosen in pairs.items() if isinstance(value, str) else ():
        # By itself a placeholder becomes the list; inside a text its items are joined.
        if value == f"{{{name}}}" and isinstance(chosen, list):
            return chosen
        value = value.replace(f"{{{name}}}", ",".join(map(str, chosen)) if isinstance(chosen, list) else str(chosen))
    return value
