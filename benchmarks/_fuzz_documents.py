"""Documents for the fuzzer: mutations of real ones, documents built to hurt a YAML reader, and legal extremes."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from ruamel.yaml import YAML


def bomb(rng: random.Random, base: str, kind: str) -> tuple[str, str]:
    """A document built to hurt a YAML reader, alone or behind a real one."""
    name = rng.choice(list(_BOMBS))
    text = _BOMBS[name](rng, int(2 ** rng.uniform(4, 20)))
    if rng.random() < 0.4:
        text = base + "extra: " + (text if "\n" not in text else "\n" + re.sub("^", "  ", text, flags=re.MULTILINE))
    return f"bomb: {name}", text


def _repeat(unit: str, size: int) -> str:
    return unit * max(size // len(unit), 1)


def _deep_block(rng: random.Random, size: int) -> str:
    if rng.random() < 0.5:
        return "- " * min(size // 2, 200_000)
    return "".join(" " * i + "a:\n" for i in range(min(int((2 * size) ** 0.5), 1400)))


def _aliases(rng: random.Random, size: int) -> str:
    levels, fan = rng.randint(2, 30), rng.choice((2, 5, 10))
    return "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * fan)}]\n" for i in range(1, levels))


def _long_scalar(rng: random.Random, size: int) -> str:
    body = _repeat(rng.choice(("x", "x ", "é", "\\x41", "''", '\\"', "a: ", "#", " #", "1", "\U0001f600", "-")), size)
    return "name: " + rng.choice(("{}", "'{}'", '"{}"', "|\n  {}\n", ">\n  {}\n", "{}\n")).replace("{}", body)


def _long_key(rng: random.Random, size: int) -> str:
    key = _repeat(rng.choice(("k", "k ", "é", "\\n")), size)
    return rng.choice(("{}: 1\n", "? {}\n: 1\n", '"{}": 1\n', "[{}]: 1\n")).replace("{}", key)


def _many_lines(rng: random.Random, size: int) -> str:
    breaks = ("\n", "#\n", "# c\n", " \n", "\t\n", "\r", "\r\n", "\u2028")
    items = ("- a\n", "- \n", "-\n", "a\n", "  a\n", "? a\n")
    begun = rng.choice(("", "name:\n", "name: |\n", "name: >\n", "name: 'x\n", "a: [\n"))
    return begun + _repeat(rng.choice(breaks + items), size)


def _many_keys(rng: random.Random, size: int) -> str:
    count = min(size // 8, 100_000)
    if rng.random() < 0.5:
        return "".join(f"k{i}: {i}\n" for i in range(count))
    return "{" + ", ".join(f"k{i}" for i in range(count)) + "}"


def _many_items(rng: random.Random, size: int) -> str:
    unit = rng.choice(
        ("1, ", "[], ", "{}, ", "a: b, ", ", ", "'', ", "null, ", "1.5e3, ", "[1, 2], ", "? , ", "!!int 1, ")
    )
    return f"limits: [{_repeat(unit, size)}]\n"


def _directives(rng: random.Random, size: int) -> str:
    lines = (f"%TAG !{i}! tag:x{i},2000:\n" for i in range(min(size // 24, 20_000)))
    return rng.choice(("".join(lines), _repeat("%FOO bar\n", size), "%YAML " + "1" * size + ".1\n")) + "---\na: 1\n"


def _tags(rng: random.Random, size: int) -> str:
    unit = rng.choice(("!!python/name:os.system ", "!<tag:" + "x" * 50 + "> ", "!a!b ", "!%41 ", "!! "))
    return "a: [" + _repeat(unit + "1, ", min(size, 300_000)) + "]\n"


def _unclosed(rng: random.Random, size: int) -> str:
    return rng.choice(("name: '", 'name: "', "a: [", "a: {", "? ", "a: |9\n")) + _repeat(
        rng.choice(("x\n", "\n", "a, ")), size
    )


def _numerals(rng: random.Random, size: int) -> str:
    units = ("1", "0", "1_", "9", "1:", "0x", "-", "+.", "1e", ".")
    return f"version: {rng.choice(('', '-', '.', '0x', '1e'))}{_repeat(rng.choice(units), size)}\n"


def _escapes(rng: random.Random, size: int) -> str:
    unit = rng.choice(("\\0", "\\ud800", "\\U0010FFFF", "\\xff", "\\\n", "\\q", "\\e[2J"))
    return f'name: "{_repeat(unit, size)}"\n'


_BOMBS: dict[str, Callable[[random.Random, int], str]] = {
    "deep flow": lambda rng, size: rng.choice(("[", "{a: ", "[{a: ", "[a, ", "{? ", "{[")) * min(size, 200_000),
    "deep block": _deep_block,
    "aliases": _aliases,
    "alias keys": lambda rng, size: "a: &a x\n" + _repeat("*a : 1\n", min(size, 200_000)),
    "self alias": lambda rng, size: rng.choice(("&a [*a]", "a: &a {b: *a}", "&a {*a : 1}", "a: &a [&b {c: *a}, *b]")),
    "many aliases": lambda rng, size: "a: &a [1, 2, 3]\nb: [" + _repeat("*a, ", size) + "]\n",
    "many anchors": lambda rng, size: "".join(f"k{i}: &n{i} {i}\n" for i in range(min(size // 12, 60_000))),
    "merge": lambda rng, size: "base: &b {x: 1}\n" + _repeat("y: {<<: *b}\n", min(size, 50_000)) + "<<: [*b, *b]\n",
    "long scalar": _long_scalar,
    "long key": _long_key,
    "many lines": _many_lines,
    "many keys": _many_keys,
    "same keys": lambda rng, size: _repeat("version: 1\n", size),
    "many items": _many_items,
    "many documents": lambda rng, size: _repeat(rng.choice(("---\n", "--- a\n", "...\n", "%YAML 1.2\n---\n")), size),
    "directives": _directives,
    "tags": _tags,
    "unclosed": _unclosed,
    "numerals": _numerals,
    "escapes": _escapes,
}


def _number(rng: random.Random) -> int:
    """Return a legal count, log-uniform, often at an edge."""
    if rng.random() < 0.3:
        return rng.choice((1, 2, 3, 255, 256, 1 << 19, (1 << 20) - 1, 1 << 20))
    return max(int(2 ** rng.uniform(0, 20)), 1)


def _sizes(rng: random.Random) -> dict[str, Any]:
    policy = rng.choice(("default", "minimax", "explicit", "powers_of_two", "vllm", "sglang", "tensorrt_llm"))
    sizes: dict[str, Any] = {"policy": policy}
    if policy == "minimax":
        sizes["graphs"] = _number(rng)
    if policy == "explicit" or (policy == "vllm" and rng.random() < 0.3):
        sizes["num_tokens"] = [_number(rng) for _ in range(rng.choice((1, 3, 30, 3000, 12_000)))]
    if policy == "explicit" and rng.random() < 0.8:
        sizes["num_reqs"] = [_number(rng) for _ in range(rng.choice((1, 3, 30, 3000, 12_000)))]
    if policy in ("sglang", "tensorrt_llm") and rng.random() < 0.7:
        sizes["padding"] = rng.random() < 0.5
    for bound in ("max_tokens", "max_reqs"):
        if rng.random() < 0.4:
            sizes[bound] = _number(rng)
    return sizes


def _schedule(rng: random.Random, most: int) -> list[list[int]]:
    """Return tiers over up to ``most`` requests: few, or thousands."""
    count = rng.choice((1, 2, 3, 4, 20, 200, 5000))
    firsts = sorted({1, *(rng.randint(1, max(most, 2)) for _ in range(count))})
    ends = [first - 1 for first in firsts[1:]] + [max(most, firsts[-1])]
    return [[first, last, rng.randint(0, rng.choice((1, 4, 255)))] for first, last in zip(firsts, ends, strict=True)]


def _wrapped(data: Any) -> str:
    """Write data as JSON in lines of moderate length, as limits on lines are not what is tried here."""
    return re.sub(r"(.{1,2000}), ", r"\1,\n  ", json.dumps(data))


def legal(rng: random.Random, base: str, kind: str) -> tuple[str, str]:
    """A document that breaks no rule of its schema, as large as the rules let it be."""
    if kind == "environment":
        packages = {f"p{i}": "1." + str(i) for i in range(rng.choice((0, 10, 100, 1000, 14_000)))}
        device = {"kind": "cpu", "name": "x" * 128, "memory": "999999999999999B"}
        return "legal: environment", _wrapped({"version": 1, "name": "big", "device": device, "packages": packages})
    data = YAML(typ="safe", pure=True).load(base)
    if kind == "plan":
        return "legal: plan", _wrapped(_legal_plan(rng, data))
    reqs, tokens = _number(rng), _number(rng)
    data["limits"] = {"max_num_reqs": reqs, "max_num_tokens": tokens}
    data["mode"] = rng.choice(("FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"))
    data["backend"] = rng.choice(("flashinfer", "flash_attention", "reference"))
    data["sizes"] = _sizes(rng)
    data.pop("roles", None)
    if rng.random() < 0.6:
        data.pop("budget", None)
    elif rng.random() < 0.5:
        data["budget"] = {"max_graphs": _number(rng)}
    if rng.random() < 0.5:
        data["lora"] = {"max_active": _number(rng), "specialize": rng.random() < 0.6}
    if rng.random() < 0.6:
        data["speculative"] = {"method": "eagle3", "num_tokens": rng.choice((1, 2, 3, 7, 255))}
        if rng.random() < 0.7:
            data["speculative"]["schedule"] = _schedule(rng, reqs)
        if rng.random() < 0.3:
            roles = rng.sample(("target", "draft_prefill", "draft_decode"), 2)
            data["roles"] = {role: {"sizes": _sizes(rng)} for role in roles}
    else:
        data.pop("speculative", None)
    if rng.random() < 0.3:
        tensor = rng.choice((1, 2, 4, 8))
        data["parallel"] = {"tensor": tensor, "sequence": True}
    return "legal: spec", _wrapped(data)


def _legal_plan(rng: random.Random, data: Any) -> Any:
    """Give a plan entries that no planner would, within the schema."""
    data["limits"] = {"max_num_reqs": _number(rng), "max_num_tokens": _number(rng)}
    if rng.random() < 0.4:
        data["lora"] = {"max_active": _number(rng), "specialize": rng.random() < 0.6}
    if "speculative" in data and rng.random() < 0.5:
        data["speculative"]["schedule"] = _schedule(rng, data["limits"]["max_num_reqs"])
    for role in data["roles"]:
        rows = []
        for _ in range(rng.choice((1, 2, 4, 40))):
            count = rng.choice((1, 5, 5, 30, 30, 100, 100, 1000, 4000))
            full, uniform = rng.random() < 0.6, rng.random() < 0.5
            row: dict[str, Any] = {"mode": "FULL" if full else "PIECEWISE"}
            if full and uniform:
                row["query_len"] = rng.choice((1, 2, 3, 4, 256))
            if full:
                row["num_reqs"] = [_number(rng) for _ in range(count)]
            if not (full and uniform) or rng.random() < 0.2:
                row["num_tokens"] = [_number(rng) for _ in range(count)]
            if rng.random() < 0.3:
                loras = rng.sample(range(1 << 20), rng.choice((1, 3, 20, 500, 4000)))
                row["active_loras"] = sorted(loras, reverse=True)
            if rng.random() < 0.1:
                row["draft_steps"] = _number(rng)
            rows.append(row)
            if sum(len(row.get("num_reqs", ())) + len(row.get("num_tokens", ())) for row in rows) > 8000:
                break
        role["entries"] = rows
        if rng.random() < 0.3:
            waiver = {"first": 0, "last": 1 << 20, "reason": "sizes", "says": "x"}
            kinds = ("decode", "mixed")
            role["waivers"] = [
                {"kind": rng.choice(kinds), **waiver, "first": _number(rng), "max_loras": _number(rng)}
                for _ in range(rng.choice((1, 10, 500)))
            ]
    return data


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
    *(".nan", "8.7", "1.", ".5", "+3", "007", "1e3", "\uff12", "1" + "0" * 5000, "0.1" + "0" * 3000, str(1 << 60)),
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
        *(f"%YAML {version}\n---\n" for version in ("1.1", "1.2", "1.0", "2.0", "x")),
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
    words = ("\n", "\n  ", " ", "model", "limits", "version: 1\n")
    bits = (*_STRANGE, *_YAML_BITS, *_YAML_BITS, *_NUMBERS[:12], *_WORDS, *words)
    return "noise: tokens", "".join(rng.choice(bits) for _ in range(count))
