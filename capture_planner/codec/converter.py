"""The one cattrs converter: strict in, compact out, and its errors as problems with paths."""

from __future__ import annotations

import difflib
import enum
import functools
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import attrs
import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from capture_planner.codec.documents import KeyPart
from capture_planner.codec.rows import ROWS, RowTable
from capture_planner.errors import InvalidValue, Problem
from capture_planner.modes import GraphSupport, Reason, Role
from capture_planner.records._base import BYTES, UNIONS, constraints, key_of, raise_any
from capture_planner.records.model import Model
from capture_planner.records.spec import CaptureTiming, Spec
from capture_planner.records.text import UNITS, format_bytes

WORDS: Mapping[type, str] = {CaptureTiming: "policy"}
"""Records in whose place files may have a word, each with the field that it is the value of."""


ELSEWHERE = {
    "max_num_seqs": "limits.max_num_reqs",
    "max_running_requests": "limits.max_num_reqs",
    "max_batch_size": "limits.max_num_reqs",
    "max_num_batched_tokens": "limits.max_num_tokens",
    "chunked_prefill_size": "limits.max_num_tokens",
    "max_model_len": "model.max_model_len",
    "context_length": "model.max_model_len",
    "cudagraph_mode": "mode",
    "attention_backend": "backend",
    "attn_backend": "backend",
    "speculative_config": "speculative",
    "num_speculative_tokens": "speculative.num_tokens",
    "speculative_num_steps": "speculative.num_tokens",
    "num_speculative_tokens_per_batch_size": "speculative.schedule",
    "cudagraph_capture_sizes": "sizes.num_tokens",
    "cuda_graph_bs": "sizes.num_reqs",
    "tensor_parallel_size": "parallel.tensor",
    "tensor_parallel": "parallel.tensor",
    "tp_size": "parallel.tensor",
    "tp": "parallel.tensor",
    "data_parallel_size": "parallel.data",
    "data_parallel": "parallel.data",
    "dp_size": "parallel.data",
    "dp": "parallel.data",
    "decode_context_parallel_size": "parallel.decode_context",
    "dcp_size": "parallel.decode_context",
    "enable_lora": "lora",
    "max_loras": "lora.max_active",
    "max_loras_per_batch": "lora.max_active",
    "specialize_active_lora": "lora.specialize",
    "max_graphs": "budget.max_graphs",
    "memory": "budget.memory",
    "speculative.backend": "roles.draft_decode.backend",
    "speculative.mode": "roles.draft_decode.mode",
    "speculative.sizes": "roles.draft_decode.sizes",
    "budget.decode": "budget.graphs.decode",
    "budget.mixed": "budget.graphs.mixed",
}
"""Names of vLLM, SGLang and TensorRT-LLM, or of a field without its block or in another, each with that of a spec."""


def problems_of(error: Exception) -> list[Problem]:
    """Flatten what cattrs raises into problems with paths."""
    if isinstance(error, InvalidValue):
        return list(error.problems)
    if isinstance(error, ForbiddenExtraKeysError):
        keys = enumerate(sorted(error.extra_fields))
        return [_unknown_key(key, error.cl, first=not at) for at, key in keys]
    assert isinstance(error, ClassValidationError), error
    found = []
    for inner in error.exceptions:
        # cattrs notes the attribute at each error; a path has the key that files have for it.
        notes = getattr(inner, "__notes__", [])
        attribute = next((note.name for note in notes if hasattr(note, "name")), None)
        path = () if attribute is None else (key_of(getattr(attrs.fields(error.cl), attribute)),)
        if isinstance(inner, KeyError):
            found.append(Problem(path=path, message="is missing", remedy="it has no default"))
        else:
            found += [problem.under(path) for problem in problems_of(inner)]
    return found


def _unknown_key(key: str, kind: type, *, first: bool) -> Problem:
    known = [key_of(f) for f in attrs.fields(kind) if f.init]
    # Cut, because a key may fill a line, and comparing takes more than linear time.
    near = difflib.get_close_matches(key[:100], known, n=1)
    # These names stand for fields of a spec, and would mislead in another kind of file.
    if kind.__module__ in (Spec.__module__, Model.__module__):
        name = key[:100].replace("-", "_").lower()
        meant = ELSEWHERE.get(f"{kind.__name__.lower()}.{name}") or ELSEWHERE.get(name)
        near = [meant] if meant else near
    # Once, not with each of 500 keys.
    remedy = f"known are {', '.join(known)}" if first else ""
    return Problem(path=(KeyPart(key),), message="unknown key", remedy=f"did you mean {near[0]}?" if near else remedy)


def _fail(message: str, remedy: str = "") -> InvalidValue:
    return InvalidValue([Problem(message=message, remedy=remedy)])


def _got(value: Any) -> str:
    # Named, not shown: the value may be the rest of the file.
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_exactly(called: str, value: Any, kind: type) -> Any:
    """Accept exactly this type: 8.7 is not 8, "8" is not 8, true is not 1."""
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    # An unquoted 2.13 is a number in YAML, where a version was meant.
    quotes = kind is str and type(value) in (int, float)
    raise _fail(f"expected {called}, got {_got(value)}", f'write it in quotes: "{value}"' if quotes else "")


def parse_bytes(text: str) -> int:
    """Read a number of bytes, such as ``2GiB``. Raises ``InvalidValue``."""
    match = re.fullmatch(r"([0-9]{1,19})\s*(B|KiB|MiB|GiB|TiB)", text)
    if match is None:
        raise _fail(f"expected a size, got {text!r}", "write a whole number of B, KiB, MiB, GiB or TiB, as in 2GiB")
    return int(match[1]) << UNITS[match[2]]


def _annotated_factory(annotation: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    base = typing.get_args(annotation)[0]
    rules, is_size = constraints(annotation), BYTES in _metadata(annotation)

    def structure(value: Any, _: Any) -> Any:
        value = converter.structure(parse_bytes(value) if is_size and isinstance(value, str) else value, base)
        for rule in rules:
            if (wrong := rule.problem(value)) is not None:
                raise _fail(wrong)
        return value

    return structure


def _collect(read: Callable[[Any], Any], items: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Read every item, each with the last part of its path; raises ``InvalidValue`` with the problems of all."""
    values, problems = [], []
    for part, item in items:
        try:
            values.append(read(item))
        except (ClassValidationError, InvalidValue) as error:
            problems += [problem.under((part,)) for problem in problems_of(error)]
    raise_any(problems)
    return values


def _read_tuple(value: Any, annotation: Any) -> Any:
    args = typing.get_args(annotation)
    repeated = args[1:] == (Ellipsis,)
    if not isinstance(value, list):
        raise _fail(f"expected a list, got {_got(value)}")
    if not repeated and len(value) != len(args):
        raise _fail(f"expected a list of {len(args)}, got {len(value)} items")
    typed = zip(value, args[:1] * len(value) if repeated else args, strict=True)
    return tuple(_collect(lambda item: CONVERTER.structure(*item), enumerate(typed)))


def _read_mapping(value: Any, annotation: Any) -> Any:
    types = typing.get_args(annotation)
    if not isinstance(value, dict):
        raise _fail(f"expected a mapping, got {_got(value)}")
    pairs = ((key, (key, item)) for key, item in value.items())
    return dict(_collect(lambda pair: tuple(map(CONVERTER.structure, pair, types)), pairs))


def label(member: enum.Enum) -> str:
    """Return how files and pages write an enum member."""
    # The number of an IntEnum only orders it.
    return member.value if isinstance(member.value, str) else member.name


def _enum_factory(kind: type[enum.Enum], _: Any) -> Callable[[Any, Any], Any]:
    members = {label(member): member for member in kind}
    folded = {word.casefold(): word for word in members}

    def structure(value: Any, _: Any) -> Any:
        if isinstance(value, str) and value in members:
            return members[value]
        near = difflib.get_close_matches(str(value)[:100].casefold().replace("-", "_"), folded, n=1, cutoff=0.5)
        hint = f"did you mean {folded[near[0]]}?" if near else ""
        raise _fail(f"expected one of {', '.join(members)}, got {_got(value)}", hint)

    return structure


def _read_tuple_or_word(value: Any, annotation: Any) -> Any:
    """Read a list, or one of an enum's words in its place."""
    listed, words = typing.get_args(annotation)
    if not isinstance(value, str | list):
        raise _fail(f"expected a list, or {' or '.join(map(label, words))}, got {_got(value)}")
    return CONVERTER.structure(value, words if isinstance(value, str) else listed)


def _is_tuple_or_word(annotation: Any) -> bool:
    args = typing.get_args(annotation)
    return (
        typing.get_origin(annotation) in UNIONS
        and len(args) == 2
        and typing.get_origin(args[0]) is tuple
        and isinstance(args[1], enum.EnumMeta)
    )


def _record_factory(kind: type, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    renamed: Any = {f.name: override(rename=key_of(f)) for f in attrs.fields(kind) if f.init}
    from_dict: Any = make_dict_structure_fn(
        kind, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True, **renamed
    )

    def structure(value: Any, _: Any) -> Any:
        if kind in WORDS and isinstance(value, str):
            value = {WORDS[kind]: value}
        if not isinstance(value, Mapping):
            raise _fail(f"expected a mapping, got {_got(value)}")
        return from_dict(value, kind)

    return structure


def _to_dict(kind: type, converter: cattrs.Converter) -> Callable[[Any], dict[str, Any]]:
    """Unstructure a record: fields in the order of their declaration, defaults left out."""
    fields = [f for f in attrs.fields(kind) if f.init]
    hints = typing.get_type_hints(kind, include_extras=True)
    overrides: Any = {
        f.name: override(
            rename=key_of(f),
            unstruct_hook=_size if BYTES in _metadata(hints[f.name]) else None,
            # Written though it is the default: it says by which schema to read the file.
            omit_if_default=False if f.name == "version" else None,
        )
        for f in fields
    }
    unordered: Any = make_dict_unstructure_fn(kind, converter, _cattrs_omit_if_default=True, **overrides)

    def unstructure(value: Any) -> dict[str, Any]:
        # cattrs appends the fields that may be omitted; files have the order of declaration.
        found = unordered(value)
        return {key: found[key] for key in map(key_of, fields) if key in found}

    return unstructure


def _size(value: int | None) -> str | None:
    return None if value is None else format_bytes(value)


def _metadata(annotation: Any) -> tuple[Any, ...]:
    """Return the metadata of ``Annotated[...]``, or of that in ``Annotated[...] | None``."""
    if _is_annotated(annotation):
        return tuple(annotation.__metadata__)
    return tuple(item for arg in typing.get_args(annotation) if _is_annotated(arg) for item in arg.__metadata__)


def _has_origin(origin: Any) -> Callable[[Any], bool]:
    return lambda annotation: typing.get_origin(annotation) is origin


_is_annotated = _has_origin(Annotated)


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(detailed_validation=True)
    for kind, called in ((int, "an integer"), (float, "a number"), (bool, "true or false"), (str, "text")):
        converter.register_structure_hook(kind, functools.partial(_read_exactly, called))
    # cattrs asks the hooks for types in reverse order, so that the rows below come before plain tuples.
    converter.register_structure_hook_func(_has_origin(tuple), _read_tuple)
    converter.register_structure_hook_func(_has_origin(Mapping), _read_mapping)
    converter.register_structure_hook_func(_is_tuple_or_word, _read_tuple_or_word)
    converter.register_structure_hook_factory(lambda t: isinstance(t, enum.EnumMeta), _enum_factory)
    # cattrs would take these for the int or the str that they are too.
    for also_primitive in (GraphSupport, Reason, Role):
        converter.register_structure_hook(also_primitive, _enum_factory(also_primitive, converter))
    converter.register_structure_hook_factory(attrs.has, _record_factory)
    converter.register_structure_hook_factory(_is_annotated, _annotated_factory)

    converter.register_unstructure_hook_factory(attrs.has, lambda kind: _to_dict(kind, converter))
    # Members stay as they are: ``to_data`` writes their labels.
    converter.register_unstructure_hook(enum.Enum, lambda member: member)
    # By a function, so that each hook keeps its own table.
    for table, rows in ROWS.items():
        _register_rows(converter, table, rows)
    return converter


def _register_rows(converter: cattrs.Converter, table: Any, rows: RowTable) -> None:
    """Have files write ``table``, a type such as ``tuple[BatchCount, ...]``, as rows."""
    listed: Any = types.GenericAlias(tuple, (rows.row, ...))
    # Compared by ``==``: each use of ``tuple[Entry, ...]`` makes a type of its own.
    converter.register_structure_hook_func(
        lambda kind: kind == table, lambda value, _: rows.unpack(converter.structure(value, listed))
    )
    converter.register_unstructure_hook_func(
        lambda kind: kind == table, lambda lines: converter.unstructure(rows.pack(lines), listed)
    )


CONVERTER = _converter()
