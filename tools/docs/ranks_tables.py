"""The counts of the newest campaign over vectors of data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

from results import files

ROWS = {
    "all ranks replay FULL": "FULL",
    "all ranks replay PIECEWISE": "PIECEWISE",
    "all run eager, because a rank lacks the graph": "NONE: rank",
    "all take the next graph, because a rank lost one": "took the next entry, one being lost",
    "all idle": "NONE: idle",
    "some idle": "with idle ranks",
    "ranks whose own K differs from the joint K": "with ranks whose own K differs",
    "with active LoRA adapters": "with LoRA",
    "would diverge if each rank dispatched alone": "apart, if each rank dispatched alone",
}


def vectors() -> str:
    """Return the counts of the newest campaign."""
    result = files("ranks-*.json")[-1]
    counts, plans, total = result["counts"], result["plans"], result["vectors"]
    summary = (
        f"{total:,} vectors over {plans['all']} plans, {plans['shipped']} of them shipped; "
        f"{result['answers']:,} answers of single ranks; {len(result['violations'])} violations; "
        f"seed {result['seed']}, {result['provenance']['date'][:10]}."
    )
    shares = "; ".join(f"{counts[key] / total:.1%} {name}" for name, key in ROWS.items())
    return f"{summary} {shares}."


PARTS: dict[str, Callable[[], str]] = {"ranks": vectors}
