"""How to fix the findings of ``check`` with vLLM's flags."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from capture_planner.engines.deployments import Run
from capture_planner.engines.emulation import Emulation, EncoderGraphs
from capture_planner.engines.engine import Fixes, FlagChange, adding, appended, without_flags
from capture_planner.modes import Role
from capture_planner.records.batch import Kind
from capture_planner.records.batch_space import decode_families
from capture_planner_vllm.emulation.flags import name_of, read
from capture_planner_vllm.emulation.size_list import size_list
from capture_planner_vllm.emulation.tables import flag_table

SIZES, LARGEST, REQUESTS = "--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--max-num-seqs"
_MODE, _COMPILATION = "cudagraph_mode", "--compilation-config"
_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
_THRESHOLDS = ("--dbo-decode-token-threshold", "--dbo-prefill-token-threshold")
_GRID = 16
"""vLLM's own sizes above 256 are multiples of it, and the largest one is rounded down to one."""

_LOWERED = {
    "deepep": "name another --all2all-backend, such as deepep_low_latency",
    "kv-connector": "remove the KV connector's layerwise transfer",
    "pooling": "nothing to do: no flag gives such a model more",
    "encoder-decoder": "nothing to do: no flag gives such a model more",
    "stock-compile": "leave -cc.mode at VLLM_COMPILE",
    "compilation": "leave -cc.mode at VLLM_COMPILE",
    "schedule-v1": "unset VLLM_USE_V2_MODEL_RUNNER: model runner V2 captures schedules",
}
"""What to do about a mode that one of vLLM's rules lowers, by the rule."""


class VllmFixes(Fixes):
    """Fixes by ``--cudagraph-capture-sizes`` and its like; sizes are tokens."""

    general: ClassVar = {
        "EN001": "raise --max-cudagraph-capture-size to the largest decode (requests times 1 + K), or list it "
        "in --cudagraph-capture-sizes",
        "EN002": "give multiples of every query length: capture-planner export --to vllm writes such a list",
        "EN003": "list in --cudagraph-capture-sizes only sizes that a batch of the schedule needs",
        "EN004": "give --cudagraph-capture-sizes that are multiples of 1 + K",
        "EN005": "name a backend that supports it with --attention-backend, or request the mode that is left "
        "with -cc.cudagraph_mode",
        "EN006": "add sizes between to --cudagraph-capture-sizes",
        "EN007": "name a folder with the config.json of the model, or fetch that with --download",
        "EN008": "leave --enable-dbo out, or move --dbo-decode-token-threshold to one above a capture size",
        "EN009": "leave cudagraph_mm_encoder out of --compilation-config",
    }

    def changes(self, code: str, emulation: Emulation, role: Role, runs: Sequence[Run]) -> Iterator[FlagChange]:
        if code == "EN001":
            yield from _larger(emulation, role, runs)
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
            yield FlagChange(tuple(_thresholds(emulation, runs)))
            yield FlagChange(tuple((flag, (_above(emulation),)) for flag in _THRESHOLDS))
        elif code == "EN009":
            for each in emulation.encoders:
                yield _given(emulation, {"encoder_cudagraph_token_budgets": [*each.budgets, each.reach]}, ())
            yield _given(emulation, {"cudagraph_mm_encoder": False}, (), instead=bool(emulation.encoders))

    def applied(self, command: Sequence[str], change: FlagChange) -> list[str]:
        return appended(self.without(command, (flag for flag, _ in change.flags)), change)

    def without(self, command: Sequence[str], flags: Iterable[str]) -> list[str]:
        """Return a command line without some flags, however they are written, and without their values."""
        names = {name_of(flag) for flag in flags}
        return [*without_flags(command, lambda flag: _values(name) if (name := name_of(flag)) in names else None)]

    def advice(self, code: str, emulation: Emulation, role: Role, about: Any) -> str:
        if code == "EN001":
            return self._uncovered(emulation, about)
        if code == "EN002":
            return self._missed(emulation, role)
        if code == "EN003":
            return self._unreached(role)
        if code == "EN004":
            return self._dropped(emulation, about)
        if code == "EN005":
            return _LOWERED.get(about.rule, "")
        if code == "EN006":
            width = about[0].batch.query_len or 1
            return adding(about[0].sizes_between(width), "--cudagraph-capture-sizes")
        if code == "EN008":
            return self._split(emulation, about)
        return self._encoder(about) if code == "EN009" else ""

    def _uncovered(self, emulation: Emulation, runs: Sequence[Run]) -> str:
        tokens = max(run.last * (run.batch.query_len or 1) for run in runs)
        if emulation.asked_sizes:
            return f"{adding([tokens], SIZES)}; {LARGEST}, where it is given, has to be the same"
        if tokens % _GRID == 0:
            return f"raise --max-cudagraph-capture-size to {tokens}"
        # vLLM captures no graph of more than max_num_seqs requests, so a rounded size would be dropped.
        return f"give --cudagraph-capture-sizes {' '.join(map(str, (*emulation.sizes, tokens)))}"

    def _missed(self, emulation: Emulation, role: Role) -> str:
        modes = emulation.modes
        if not modes[role].is_separate:
            return ""
        if role is Role.DRAFT_PREFILL and modes[role] is modes[Role.TARGET]:
            return "the list of sizes that fixes the target fixes this too"
        if role is not Role.TARGET:
            return ""
        sizes = " ".join(map(str, complete_list(emulation)))
        return f"give --cudagraph-capture-sizes {sizes}; with these, no batch misses a graph"

    def _unreached(self, role: Role) -> str:
        if role.is_drafter:
            return f"nothing to do: {role} uses the target's sizes"
        return (
            "nothing to do: each of --cudagraph-capture-sizes is captured for every query length of the "
            "schedule and every number of adapters, and some batch needs one of them"
        )

    def _dropped(self, emulation: Emulation, sizes: Sequence[int]) -> str:
        limit, most = emulation.limits.max_num_tokens, max(sizes)
        return f"remove them, or raise --max-num-batched-tokens from {limit} to {most}" if most > limit else ""

    def _encoder(self, encoder: EncoderGraphs) -> str:
        return f"give -cc.encoder_cudagraph_token_budgets={[*encoder.budgets, encoder.reach]}".replace(" [", "[")

    def _split(self, emulation: Emulation, runs: Sequence[Run]) -> str:
        says = [f"give {flag} {tokens}" for flag, (tokens,) in _thresholds(emulation, runs)]
        mixed = not all(run.batch.kind is Kind.DECODE for run in runs)
        return " and ".join(says) + (", where their graphs are worth more than overlap" if mixed else "")


def _thresholds(emulation: Emulation, runs: Sequence[Run]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the flags that split only batches which have a graph in parts, or none."""
    decodes = [run.batch for run in runs if run.batch.kind is Kind.DECODE]
    if decodes:
        # From one token above a size on, every decode that is padded to the next has its graph of microbatches.
        tokens = 1 + max((size for size in emulation.sizes if size < decodes[0].num_tokens), default=0)
        yield _THRESHOLDS[0], (str(tokens),)
    if len(decodes) < len(runs):
        yield _THRESHOLDS[1], (_above(emulation),)


def _above(emulation: Emulation) -> str:
    """Return one token more than the largest graph."""
    return str(1 + max(graph.entry.num_tokens for graph in emulation.graphs))


def _larger(emulation: Emulation, role: Role, runs: Sequence[Run]) -> Iterator[FlagChange]:
    """Cover the largest decodes: with a larger maximum, a longer list, or fewer requests at once."""
    tokens = max(run.last * (run.batch.query_len or 1) for run in runs)
    # Another maximum is rounded down to the grid, and the largest decode stays without a graph.
    if not emulation.asked_sizes and tokens % _GRID == 0:
        yield _given(emulation, {}, ((LARGEST, (str(tokens),)),))
    yield _sizes(emulation, {*emulation.sizes, tokens})
    yield from _exact(emulation, runs)
    if role.is_drafter and not any(graph.role is Role.TARGET for graph in emulation.graphs):
        # A drafter's graphs are captured only where the target has one, for which its own sizes may be too small.
        least = min((each.query_len for each in decode_families(Role.TARGET, emulation)), default=1)
        yield _sizes(emulation, {*emulation.sizes, tokens, least})
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


def _values(name: str) -> float:
    """Return the most words that a flag takes as its values."""
    entry = flag_table().get(name, {})
    if entry.get("kind") in ("switch", "on"):
        return 0
    return math.inf if entry.get("nargs") in ("+", "*") else 1
