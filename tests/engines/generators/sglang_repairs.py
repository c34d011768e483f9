"""Cases of SGLang without the flags that decide nothing about graphs."""

from __future__ import annotations

import attrs

from engines.generators.sglang import Case

DECIDES_NOTHING = (
    "--lora-paths",
    "--lora-target-modules",
    "--max-lora-rank",
    "--max-loaded-loras",
    "--max-lora-chunk-size",
    "--nnodes",
    "--enable-dp-lm-head",
    "--enable-tp-lm-head-all-to-all",
    "--schedule-policy",
    "--log-requests-level",
    "--port",
)
"""Flags that are drawn, whose values SGLang judges and the emulation does not: graphs do not depend on them."""

_ADAPTERS = ("--max-lora-rank", "16", "--lora-target-modules", "all")


def repaired(case: Case) -> list[tuple[str, Case]]:
    """Return the case without values that decide nothing about graphs: one such flag out, and then all of them.

    Where SGLang refuses a case that the emulation accepts, it has to accept one of these, and answer it as the
    emulation answers the case itself.
    """
    words, file = _by_flag(case.command), case.file or {}
    if {"lora-paths", "enable-tp-lm-head-all-to-all"} & set(file):
        return []  # SGLang refuses the place, whatever the value.
    lora = any(flag in words or flag[2:] in file for flag in ("--enable-lora", "--lora-paths"))
    given = [flag for flag in DECIDES_NOTHING if flag in words or flag[2:] in file]
    given += ["--max-lora-rank"] if lora and "--max-lora-rank" not in given else []
    groups = [(flag, [flag]) for flag in given] + [(" ".join(given), given)] * (len(given) > 1)
    found = []
    for name, dropped in groups:
        left = {flag: values for flag, values in words.items() if flag not in dropped}
        command = [word for values in left.values() for word in values]
        adapters = [flag for flag in dropped if "lora" in flag]
        if lora and adapters:
            for flag in ("--max-lora-rank", "--lora-target-modules"):
                left.pop(flag, None)
            command = [word for values in left.values() for word in values] + ["--enable-lora", *_ADAPTERS]
        kept = {key: value for key, value in file.items() if f"--{key}" not in dropped}
        found.append((name, attrs.evolve(case, command=tuple(command), file=kept if case.file else None)))
    return found


def _by_flag(command: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the words of each flag of a command, by its name."""
    found: dict[str, list[str]] = {}
    for word in command:
        if word.startswith("--"):
            name = word.partition("=")[0]
        found.setdefault(name, []).append(word)
    return found
