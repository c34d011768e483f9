"""Why data-parallel ranks of an engine ran what they ran, by the vectors that an observation has of them."""

from __future__ import annotations

from capture_planner.analysis.data_parallel import ranks_text, shape_text
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Entry
from capture_planner.records.observation import ObservedVector
from capture_planner.records.text import counted


def explain_share(role: Role, vector: ObservedVector, rank: int, entry: Entry | None) -> str:
    """Explain in a sentence why a rank ran what all ran, and which other ranks are the cause.

    :param entry: the graph that all replayed; None: all ran eager.
    """
    batch = vector.batch(role, rank)
    prefix = "idle; " if batch is None else ""
    if entry is None:
        return prefix + _eager(role, vector, rank)
    causes = []
    uniform = None if batch is None else batch.uniform_query_len
    others = [other for other in range(vector.num_ranks) if vector.num_reqs[other] and other != rank]
    if uniform is not None and entry.query_len is None:
        mixed = [other for other in others if vector.query_len[other] != uniform]
        if mixed:
            verb = "has" if len(mixed) == 1 else "have"
            causes.append(f"{ranks_text(mixed)} {verb} no decodes of {counted(uniform, 'token')}")
    most = max(vector.num_tokens)
    if vector.num_tokens[rank] < most:
        causes.append(f"rank {vector.num_tokens.index(most)} has {counted(most, 'token')}")
    return prefix + ("; ".join(causes) or "the graph of its own batch")


def _eager(role: Role, vector: ObservedVector, rank: int) -> str:
    lacking = [other for other in range(vector.num_ranks) if vector.modes[other] is GraphMode.NONE]
    if rank in lacking:
        alone = "this rank has no graph"
        others = [other for other in lacking if other != rank]
        return f"all ran eager: {alone}" + (
            f", and neither {'has' if len(others) == 1 else 'have'} {ranks_text(others)}" if others else ""
        )
    if lacking:
        first = vector.batch(role, lacking[0])
        shape = "" if first is None else f" for {shape_text(first)}"
        verb = "has" if len(lacking) == 1 else "have"
        return f"all ran eager: {ranks_text(lacking)} {verb} no graph{shape if len(lacking) == 1 else ''}"
    lengths = {length for length, reqs in zip(vector.query_len, vector.num_reqs, strict=True) if reqs}
    length = lengths.pop() if len(lengths) == 1 else None
    kind = "mixed" if length is None else f"decodes of {counted(length, 'token')}"
    return f"all ran eager: each has a graph by itself, and together they have {max(vector.num_tokens)} tokens, {kind}"
