"""Documents for the fuzzer that are built to hurt a YAML reader, alone or behind a real one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable


def bomb(rng: random.Random, base: str, kind: str) -> tuple[str, str]:
    """A document built to hurt a YAML reader, alone or behind a real one."""
    make = rng.choice(_BOMBS)
    size = int(2 ** rng.uniform(4, 20))
    text = make(rng, size)
    if rng.random() < 0.4:
        text = base + "extra: " + (text if "\n" not in text else "\n" + re.sub("^", "  ", text, flags=re.MULTILINE))
    return "bomb: " + make.__name__.strip("_"), text


def _repeat(unit: str, size: int) -> str:
    return unit * max(size // len(unit), 1)


def _deep_flow(rng: random.Random, size: int) -> str:
    return rng.choice(("[", "{a: ", "[{a: ", "[a, ", "{? ", "{[")) * min(size, 200_000)


def _deep_block(rng: random.Random, size: int) -> str:
    if rng.random() < 0.5:
        return "- " * min(size // 2, 200_000)
    return "".join(" " * i + "a:\n" for i in range(min(int((2 * size) ** 0.5), 1400)))


def _aliases(rng: random.Random, size: int) -> str:
    levels, fan = rng.randint(2, 30), rng.choice((2, 5, 10))
    text = "a0: &a0 [x, x]\n"
    for i in range(1, levels):
        text += f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * fan)}]\n"
    return text


def _alias_keys(rng: random.Random, size: int) -> str:
    return "a: &a x\n" + _repeat("*a : 1\n", min(size, 200_000))


def _self_alias(rng: random.Random, size: int) -> str:
    return rng.choice(("&a [*a]", "a: &a {b: *a}", "&a {*a : 1}", "a: &a [&b {c: *a}, *b]"))


def _many_aliases(rng: random.Random, size: int) -> str:
    return "a: &a [1, 2, 3]\nb: [" + _repeat("*a, ", size) + "]\n"


def _many_anchors(rng: random.Random, size: int) -> str:
    return "".join(f"k{i}: &n{i} {i}\n" for i in range(min(size // 12, 60_000)))


def _merge(rng: random.Random, size: int) -> str:
    return "base: &b {x: 1}\n" + _repeat("y: {<<: *b}\n", min(size, 50_000)) + "<<: [*b, *b]\n"


def _long_scalar(rng: random.Random, size: int) -> str:
    body = _repeat(rng.choice(("x", "x ", "é", "\\x41", "''", '\\"', "a: ", "#", " #", "1", "\U0001f600", "-")), size)
    return "name: " + rng.choice(("{}", "'{}'", '"{}"', "|\n  {}\n", ">\n  {}\n", "{}\n")).replace("{}", body)


def _long_key(rng: random.Random, size: int) -> str:
    key = _repeat(rng.choice(("k", "k ", "é", "\\n")), size)
    return rng.choice(("{}: 1\n", "? {}\n: 1\n", '"{}": 1\n', "[{}]: 1\n")).replace("{}", key)


def _many_lines(rng: random.Random, size: int) -> str:
    units = (
        "\n",
        "#\n",
        "# c\n",
        " \n",
        "\t\n",
        "\r",
        "\r\n",
        "\u2028",
        "- a\n",
        "- \n",
        "-\n",
        "a\n",
        "  a\n",
        "? a\n",
    )
    return rng.choice(("", "name:\n", "name: |\n", "name: >\n", "name: 'x\n", "a: [\n")) + _repeat(
        rng.choice(units), size
    )


def _many_keys(rng: random.Random, size: int) -> str:
    count = min(size // 8, 100_000)
    if rng.random() < 0.5:
        return "".join(f"k{i}: {i}\n" for i in range(count))
    return "{" + ", ".join(f"k{i}" for i in range(count)) + "}"


def _same_keys(rng: random.Random, size: int) -> str:
    return _repeat("version: 1\n", size)


def _many_items(rng: random.Random, size: int) -> str:
    unit = rng.choice(
        ("1, ", "[], ", "{}, ", "a: b, ", ", ", "'', ", "null, ", "1.5e3, ", "[1, 2], ", "? , ", "!!int 1, ")
    )
    return f"limits: [{_repeat(unit, size)}]\n"


def _many_documents(rng: random.Random, size: int) -> str:
    return _repeat(rng.choice(("---\n", "--- a\n", "...\n", "%YAML 1.2\n---\n")), size)


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


_BOMBS: tuple[Callable[[random.Random, int], str], ...] = (
    *(_deep_flow, _deep_block, _aliases, _alias_keys, _self_alias, _many_aliases, _many_anchors, _merge),
    *(_long_scalar, _long_key, _many_lines, _many_keys, _same_keys, _many_items, _many_documents, _directives),
    *(_tags, _unclosed, _numerals, _escapes),
)
