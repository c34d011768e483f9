"""Documents for the fuzzer: mutations of real ones, documents built to hurt, and legal extremes."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from _fuzz_bombs import bomb
from _fuzz_extremes import legal
from ruamel.yaml import YAML

KINDS = ("spec", "environment", "plan")
LIMIT = 1 << 20
"""The size limit of a file."""


@attrs.frozen
class Corpus:
    """Real documents by kind."""

    spec: Sequence[str]
    environment: Sequence[str]
    plan: Sequence[str]

    def of(self, kind: str) -> Sequence[str]:
        """Return the documents of one kind."""
        documents: Sequence[str] = getattr(self, kind)
        return documents


@attrs.frozen
class Document:
    """One document, and how it was made."""

    kind: str
    made_by: str
    data: bytes


def document(corpus: Corpus, seed: int, index: int, kind: str | None = None) -> Document:
    """Return document ``index`` of a seed."""
    rng = random.Random(f"{seed}:{index}")
    kind = kind or rng.choices(KINDS, (5, 3, 2))[0]
    base = rng.choice(corpus.of(kind))
    family = rng.choices((_text, _structure, legal, bomb, _noise), (48, 32, 7, 9, 4))[0]
    made_by, content = family(rng, base, kind)
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    if len(data) > LIMIT and rng.random() < 0.8:
        data = data[:LIMIT]
    return Document(kind, made_by, data)


# Text ------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\s+|[\w./+-]+|[^\w\s]", re.ASCII)
_STRANGE = (
    *("\0", "\x07", "\x1b[31m", "\x7f", "\x85", "\xa0", "\u2028", "\u200b", "\ufeff", "\ud800", "\uffff"),
    *("\U0001f600", "é", "\uff41", "\t", "\r", "\r\n", "\n", "٣", "İ", "\u0301" * 50),
)
_YAML_BITS = (
    *("&a ", "*a", "*missing", "<<: ", "<<: *a", "<<: [*a, *a]", "!!python/object:os.system ", "!!int ", "!x "),
    *("!!binary ", "!!set ", "? ", "- ", ": ", ", ", "[", "]", "{", "}", "|\n", ">-\n", "'", '"', "#", "---\n"),
    *("...\n", "%YAML 1.1\n---\n", "%YAML 9.9\n---\n", "%TAG ! tag:x,2000:\n---\n", "%FOO\n", "@", "`", "\\", "=", "~"),
)
_NUMBERS = (
    *("0", "-1", "1", "2", "255", "256", "257", "1048576", "1048577", "9" * 18, "9" * 19, "9" * 400, "-" + "9" * 30),
    *("1e308", "1e309", "1e-400", "1e999", "-0", "-0.0", "0x10", "0o17", "0b1", "1_000", "1:30", ".inf", "-.inf"),
    *(
        ".nan",
        "8.7",
        "1.",
        ".5",
        "+3",
        "007",
        "1e3",
        "\uff12",
        "1" + "0" * 5000,
        "0.1" + "0" * 3000,
        "1152921504606846976",
    ),
)
_WORDS = (
    *("null", "~", "yes", "no", "on", "off", "true", "True", "TRUE", "false", "FULL", "full", "PIECEWISE", "NONE"),
    *("2GiB", "2 GiB", "0B", "-1GiB", "999999999999999TiB", "1.5GiB", "[]", "{}", '""', "''", "2001-12-14", "=", "<<"),
    *("default", "minimax", "vllm", "sglang", "tensorrt_llm", "explicit", "powers_of_two", "sha256:" + "0" * 64),
)


def _text(rng: random.Random, base: str, kind: str) -> tuple[str, str | bytes]:
    """One or several changes to the characters, tokens or lines of a real document."""
    text: str | bytes = base
    names = []
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        change = rng.choice(_TEXT_CHANGES)
        names.append(change.__name__.strip("_"))
        as_text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        text = change(rng, as_text)
    return "text: " + "+".join(dict.fromkeys(names)), text


def _flip_bytes(rng: random.Random, text: str) -> bytes:
    data = bytearray(text.encode("utf-8", "surrogatepass")) or bytearray(b"a")
    for _ in range(rng.choice((1, 1, 2, 10))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(text) or [text]


def _delete_tokens(rng: random.Random, text: str) -> str:
    tokens = _tokens(text)
    start = rng.randrange(len(tokens))
    del tokens[start : start + rng.choice((1, 1, 2, 5, 50))]
    return "".join(tokens)


def _duplicate_tokens(rng: random.Random, text: str) -> str:
    tokens = _tokens(text)
    start = rng.randrange(len(tokens))
    part = tokens[start : start + rng.choice((1, 2, 5, 50))]
    return "".join(tokens[:start] + part * rng.choice((2, 2, 3, 100)) + tokens[start:])


def _swap_tokens(rng: random.Random, text: str) -> str:
    tokens = _tokens(text)
    one, other = rng.randrange(len(tokens)), rng.randrange(len(tokens))
    tokens[one], tokens[other] = tokens[other], tokens[one]
    return "".join(tokens)


def _indent(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True) or [""]
    start = rng.randrange(len(lines))
    for at in range(start, min(start + rng.choice((1, 1, 3, 20)), len(lines))):
        stripped = lines[at].lstrip(" ")
        width = len(lines[at]) - len(stripped)
        lines[at] = rng.choice((" " * max(width + rng.choice((-2, -1, 1, 2, 8, 200)), 0), "\t")) + stripped
    return "".join(lines)


def _lines(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True) or [""]
    at = rng.randrange(len(lines))
    change = rng.randrange(4)
    if change == 0:
        del lines[at]
    elif change == 1:
        lines.insert(rng.randrange(len(lines) + 1), lines[at])
    elif change == 2:
        rng.shuffle(lines)
    else:
        lines = lines[:at]
    return "".join(lines)


def _insert(rng: random.Random, text: str) -> str:
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice((*_STRANGE, *_YAML_BITS, *_YAML_BITS)) + text[at:]
    return text


def _replace_value(rng: random.Random, text: str) -> str:
    values = list(re.finditer(r"(?<=: )[^\s,{}\[\]]+|(?<=[\[,] )?\b\d+\b", text))
    for _ in range(rng.choice((1, 1, 2))):
        if not values:
            break
        match = values.pop(rng.randrange(len(values)))
        text = text[: match.start()] + rng.choice((*_NUMBERS, *_WORDS, *_STRANGE)) + text[match.end() :]
        values = [value for value in values if value.end() <= match.start()]
    return text


def _prefix(rng: random.Random, text: str) -> str:
    heads = (
        "%YAML 1.1\n---\n",
        "%YAML 1.2\n---\n",
        "%YAML 1.0\n---\n",
        "%YAML 2.0\n---\n",
        "%YAML x\n---\n",
        "\ufeff",
        *("%TAG !! tag:evil,2000:\n---\n", "--- \n", "---\n...\n---\n", "a\n", "&x\n", "!!map\n", "# é\n"),
    )
    return rng.choice(heads) + text


def _two(rng: random.Random, text: str) -> str:
    return text + rng.choice(("---\n", "...\n", "...\n---\n", "\n", "")) + text


def _anchor(rng: random.Random, text: str) -> str:
    keys = list(re.finditer(r"^( *)(\w+):", text, re.MULTILINE))
    if len(keys) < 2:
        return text
    one, other = sorted(rng.sample(keys, 2), key=lambda match: match.start())
    text = text[: other.end()] + rng.choice((" *z", " {<<: *z}", " [*z, *z]")) + text[other.end() :]
    return text[: one.end()] + " &z" + text[one.end() :]


_TEXT_CHANGES: tuple[Callable[[random.Random, str], str | bytes], ...] = (
    *(_flip_bytes, _delete_tokens, _duplicate_tokens, _swap_tokens, _indent, _lines, _insert),
    *(_replace_value, _replace_value, _prefix, _two, _anchor),
)


# Structure -------------------------------------------------------------------------------------


def _structure(rng: random.Random, base: str, kind: str) -> tuple[str, str]:
    """Change the data of a real document, and write it as JSON, which is YAML too."""
    data = YAML(typ="safe", pure=True).load(base)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change_data(rng, data)
    return "structure", json.dumps(data, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)), default=str)


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 3 else 7)
    if kind == 0:
        return rng.choice((0, 1, 2, 3, 4, 8, 255, 256, 1 << 20, (1 << 20) + 1, 1 << 60, -1, 10**18, 10**30))
    if kind == 1:
        return rng.choice((0.0, 0.5, 1.5, -1.0, 1e300, float("inf"), float("nan"), 1e-300, 5e-324))
    if kind == 2:
        return rng.choice((True, False, None))
    if kind in (3, 4):
        return rng.choice(_WORDS)
    if kind == 5:
        return rng.choice(_STRANGE) * rng.choice((1, 1, 40)) + rng.choice(_WORDS)
    if kind == 6:
        return "x" * rng.choice((0, 1, 127, 128, 129, 100_000))
    if kind == 7:
        return [_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 3, 30)))]
    return {rng.choice((*_WORDS, "name", "mode", "sizes")): _value(rng, depth + 1) for _ in range(rng.randrange(4))}


def _change_data(rng: random.Random, data: Any) -> None:
    places = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(data)
    if not places:
        return
    node, key = rng.choice(places)
    change = rng.randrange(8)
    if change == 0:
        del node[key]
    elif change == 1 and isinstance(node, dict):
        node[rng.choice((str(key) + "s", "x", "\x1b[2J", "k" * 100_000, "", "__class__", "<<"))] = node[key]
    elif change == 2:
        other, place = rng.choice(places)
        node[key], other[place] = copy.deepcopy(other[place]), _value(rng)
    elif change == 3 and isinstance(node, list):
        node *= rng.choice((2, 3, 50))
    elif change == 4 and isinstance(node[key], int):
        node[key] = rng.choice((node[key] - 1, node[key] + 1, node[key] * 2, -node[key], 0, 1, 1 << 20))
    elif change == 5:
        node[key] = str(node[key])
    else:
        node[key] = _value(rng)


def _noise(rng: random.Random, base: str, kind: str) -> tuple[str, str | bytes]:
    """Bytes or YAML tokens at random."""
    count = rng.choice((0, 1, 10, 1000))
    if rng.random() < 0.5:
        return "noise: bytes", rng.randbytes(count)
    bits = (
        *_STRANGE,
        *_YAML_BITS,
        *_YAML_BITS,
        *_NUMBERS[:12],
        *_WORDS,
        "\n",
        "\n  ",
        " ",
        "model",
        "limits",
        "version: 1\n",
    )
    return "noise: tokens", "".join(rng.choice(bits) for _ in range(count))
