"""Changes of a ``vllm serve`` command line that may remove a finding of ``check``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from capture_planner.engines.emulation import Emulation
from capture_planner.engines.remedies import FlagChange, appended
from capture_planner.engines.walk import Run
from capture_planner.modes import Role
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import decode_families
from capture_planner_vllm.flags import name_of, read
from capture_planner_vllm.size_list import size_list
from capture_planner_vllm.tables import flag_table

SIZES, LARGEST, REQUESTS = "--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--max-num-seqs"
_MODE, _COMPILATION = "cudagraph_mode", "--compilation-config"
_GRID = 16
"""vLLM's own sizes above 256 are multiples of it, and the largest one is rounded down to one."""
_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")


def changes(code: str, emulation: Emulation, role: Role, runs: Sequence[Run]) -> Iterator[FlagChange]:
    """Yield changes for a finding of a rule, the one to prefer first."""
    if code == "EN001":
        yield from _larger(emulation, runs)
    elif code == "EN002":
        yield _sizes(emulation, complete_list(emulation))
        yield from _exact(emulation, runs)
    elif code in ("EN003", "EN004"):
        yield from _fewer(emulation, role)
    elif code == "EN005":
        yield from (FlagChange.of("--attention-backend", each) for each in _BACKENDS)
        yield _given(emulation, {_MODE: emulation.modes[Role.TARGET].value}, (), instead=True)
    elif code == "EN006":
        between = {size for run in runs for size in run.sizes_between(run.batch.query_len or 1)}
        yield _sizes(emulation, {*emulation.sizes, *between})
    elif code == "EN008":
        yield from _whole(emulation, runs)
    elif code == "EN009":
        for each in emulation.encoders:
            yield _given(emulation, {"encoder_cudagraph_token_budgets": [*each.budgets, each.reach]}, ())
        yield _given(emulation, {"cudagraph_mm_encoder": False}, (), instead=bool(emulation.encoders))


def _whole(emulation: Emulation, runs: Sequence[Run]) -> Iterator[FlagChange]:
    """Split only batches that have a graph in parts, or none."""
    decodes = [run.batch for run in runs if run.batch.kind is Kind.DECODE]
    flags: list[tuple[str, tuple[str, ...]]] = []
    if decodes:
        # From one token above a size on, every decode that is padded to the next has its graph of microbatches.
        tokens = 1 + max(0, *(size for size in emulation.sizes if size < decodes[0].num_tokens))
        flags.append(("--dbo-decode-token-threshold", (str(tokens),)))
    if len(decodes) < len(runs):
        tokens = 1 + max(graph.entry.num_tokens for graph in emulation.graphs)
        flags.append(("--dbo-prefill-token-threshold", (str(tokens),)))
    yield FlagChange(tuple(flags))
    most = 1 + max(graph.entry.num_tokens for graph in emulation.graphs)
    yield FlagChange(tuple((f"--dbo-{each}-token-threshold", (str(most),)) for each in ("decode", "prefill")))


def _larger(emulation: Emulation, runs: Sequence[Run]) -> Iterator[FlagChange]:
    """Cover the largest decodes: with a larger maximum, a longer list, or fewer requests at once."""
    tokens = max(run.last * (run.batch.query_len or 1) for run in runs)
    if not emulation.asked_sizes and tokens % _GRID == 0:
        yield _given(emulation, {}, ((LARGEST, (str(tokens),)),))
    yield _sizes(emulation, {*emulation.sizes, tokens})
    yield from _exact(emulation, runs)
    covered = min(run.first for run in runs) - 1
    if covered:
        yield FlagChange.of(REQUESTS, covered, instead=True)


def _exact(emulation: Emulation, runs: Sequence[Run]) -> Iterator[FlagChange]:
    """List the first and the last of each range of batches too."""
    exact = {count * (run.batch.query_len or 1) for run in runs for count in (run.first, run.last)}
    yield _sizes(emulation, {*emulation.sizes, *exact})


def _fewer(emulation: Emulation, role: Role) -> Iterator[FlagChange]:
    """List what is captured, or what decodes use."""
    if emulation.sizes:
        yield _sizes(emulation, emulation.sizes)
    uniform = {graph.entry.num_tokens for graph in emulation.graphs if graph.role is role and graph.entry.query_len}
    if uniform:
        yield _sizes(emulation, uniform)


def complete_list(emulation: Emulation) -> tuple[int, ...]:
    """Return sizes that hide no decode graph of the target, with no more FULL graphs than now where possible."""
    full = [graph.entry for graph in emulation.graphs if graph.role is Role.TARGET and graph.entry.query_len]
    result = size_list(
        decode_families(Role.TARGET, emulation),
        emulation.limits.max_num_reqs,
        graphs=len({(entry.num_tokens, entry.query_len) for entry in full}),
        wider=emulation.sizes,
        query_lens={entry.query_len for entry in full if entry.query_len},
    )
    return result.sizes


def _sizes(emulation: Emulation, sizes: Iterable[int]) -> FlagChange:
    """Return the change to a list of sizes, with its largest where the command line has one: vLLM wants both alike."""
    listed = sorted(size for size in set(sizes) if size <= emulation.limits.max_num_tokens)
    flags = [(SIZES, tuple(map(str, listed)))]
    sources = {each.source for each in emulation.settings if each.name == "max_cudagraph_capture_size"}
    if sources & {"flag", "file"} and listed:
        flags.append((LARGEST, (str(listed[-1]),)))
    return _given(emulation, {}, flags)


def _given(
    emulation: Emulation,
    parts: Mapping[str, object],
    flags: Iterable[tuple[str, tuple[str, ...]]],
    *,
    instead: bool = False,
) -> FlagChange:
    """Return a change of flags and of parts of ``--compilation-config``, which is given whole: vLLM merges no two."""
    flags = list(flags)
    present = dict(read(emulation.command).get("compilation_config") or {})
    config = {name: value for name, value in present.items() if f"--{name.replace('_', '-')}" not in dict(flags)}
    config |= parts
    if config != present:
        flags.append((_COMPILATION, (json.dumps(config),)))
    return FlagChange(tuple(flags), instead)


def applied(command: Sequence[str], change: FlagChange) -> list[str]:
    """Return the command line with the flags of a change in place of all that it says about them."""
    return appended(_without(command, {name_of(flag) for flag, _ in change.flags}), change)


def _without(command: Sequence[str], names: set[str]) -> list[str]:
    """Return a command line without some flags, however they are written, and without their values."""
    kept: list[str] = []
    left = 0
    for word in command:
        if word.startswith("-") and not word[1:2].isdigit():
            name = name_of(word)
            drops = name in names
            many = flag_table().get(name, {}).get("nargs") in ("+", "*")
            left = 0 if not drops or "=" in word else len(command) if many else 1
            kept += [] if drops else [word]
        elif left:
            left -= 1
        else:
            kept.append(word)
    return kept
