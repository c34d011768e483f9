"""What the emulation of SGLang answers, as the plain data in which SGLang's own functions are asked."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from capture_planner.engines.emulation import Emulation
from capture_planner.errors import FlagError
from capture_planner.modes import Role
from capture_planner.records.batch import Batch, Entry
from capture_planner.records.environment import Environment
from capture_planner_sglang.emulation.capture import gathers
from capture_planner_sglang.emulation.engine import ENGINE, resolve
from capture_planner_sglang.emulation.managers import SglangManager, ranks_bucket


def emulated(
    command: list[str], machine: Environment, asked: list[Batch], counts: Sequence[Sequence[int]] = ()
) -> dict[str, Any]:
    """Return what the emulation says, in the plain form in which the oracle answers."""
    try:
        r = resolve(command, machine)
        emulation = ENGINE.emulate(command, machine)
    except FlagError as error:
        return {"refused": str(error)}
    args = r.args
    settings = {setting.name: setting.value for setting in emulation.settings}
    speculative = args.speculative_algorithm is not None
    padding = not args.disable_cuda_graph_padding
    shared = gathers(r)[0] and bool(emulation.sizes)
    return {
        "decode": [r.decode.backend, r.decode.max_bs, r.decode.bs],
        "prefill": [r.prefill.backend, r.prefill.max_bs],
        "chunk": args.chunked_prefill_size,
        "requests": args.max_running_requests,
        "pool": settings["request_pool"],
        "page": args.page_size,
        "attention": args.attention_backend,
        "draft": [args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens]
        if speculative
        else None,
        "graphs": {
            manager.role.value: [_row(graph.entry) for graph in manager.graphs] for manager in emulation.managers
        },
        "answers": [_answer(emulation, batch) for batch in asked],
        "buckets": [ranks_bucket(emulation.sizes, row, padding=padding) for row in counts] if shared else None,
    }


def edges(random: Random, command: list[str], machine: Environment) -> tuple[list[Batch], list[list[int]]]:
    """Return batches at the edges of a command line's graphs, and numbers of requests of attention-DP ranks there.

    Drawn batches are seldom exactly as large as a graph, or half as large, where a comparison changes its answer.
    """
    try:
        managers = ENGINE.emulate(command, machine).managers
    except FlagError:
        return [], []
    batches: list[Batch] = []
    counts: list[list[int]] = []
    for manager in managers:
        assert isinstance(manager, SglangManager)
        if (decodes := manager.decodes) is not None:
            reqs = _around(random, decodes.sizes)
            batches += [Batch.decode(manager.role, count, decodes.width) for count in reqs]
            counts += [[count, 0] for count in reqs]
        if (prefills := manager.prefills) is not None:
            alone = [(1, tokens) for tokens in _around(random, prefills.sizes)]
            most = (
                [] if prefills.max_reqs is None else [(prefills.max_reqs + more, prefills.sizes[-1]) for more in (0, 1)]
            )
            longest = [] if prefills.max_seq_len is None else [(1, prefills.max_seq_len + more) for more in (0, 1)]
            batches += [
                Batch(role=manager.role, num_reqs=reqs, num_tokens=tokens, past_prompt=False)
                for reqs, tokens in (*alone, *most, *longest)
                if reqs <= tokens
            ]
    return batches, counts


def _around(random: Random, sizes: Sequence[int]) -> list[int]:
    """Return counts at the edges of one of these sizes, and of the largest."""
    size, largest = random.choice(sizes), sizes[-1]
    halves = {max(-(-each // 2) - less, 1) for each in (size, largest) for less in (0, 1)}
    return sorted({size, size + 1, largest, largest + 1, *halves})


def _row(entry: Entry) -> list[Any]:
    return [entry.mode.value, entry.num_tokens, entry.num_reqs, entry.query_len, entry.active_loras]


def _answer(emulation: Emulation, batch: Batch) -> list[Any] | str | None:
    if batch.role not in emulation.modes:
        return "no role"
    entry = emulation.dispatch(batch).entry
    return None if entry is None else _row(entry)


def shortened(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer whose graphs of one kind are one row, with their token counts as runs."""
    graphs: dict[str, list[list[Any]]] = {}
    for role, rows in answer["graphs"].items():
        kept = graphs.setdefault(role, [])
        for mode, tokens, reqs, width, loras in rows:
            kind = [mode, reqs if width is None else None, width, loras]
            if not kept or kept[-1][:4] != kind:
                kept.append([*kind, []])
            kept[-1][4].append(tokens)
    for rows in graphs.values():
        for row in rows:
            row[4] = _runs(row[4])
    backend, most, sizes = answer["decode"]
    return {**answer, "graphs": graphs, "decode": [backend, most, _runs(sizes)]}


def _runs(sizes: list[int]) -> list[list[int]]:
    """Return a list of numbers as runs of one step: ``[first, step, count]``."""
    found: list[list[int]] = []
    for size in sizes:
        if found and found[-1][2] == 1:
            found[-1][1:] = [size - found[-1][0], 2]
        elif found and size == found[-1][0] + found[-1][1] * found[-1][2]:
            found[-1][2] += 1
        else:
            found.append([size, 0, 1])
    return found


def batch_row(batch: Batch) -> list[Any]:
    """Return a batch as plain data."""
    return [batch.role.value, batch.num_reqs, batch.num_tokens, batch.query_len, batch.past_prompt, batch.active_loras]


def batch_of(row: list[Any]) -> Batch:
    """Return the batch of ``batch_row``."""
    role, reqs, tokens, width, past_prompt, loras = row
    return Batch(
        role=Role(role), num_reqs=reqs, num_tokens=tokens, query_len=width, past_prompt=past_prompt, active_loras=loras
    )
