"""The tables of the equality campaign on a GPU: what was served, and what differs from what."""

from __future__ import annotations

from collections.abc import Callable

from results import campaigns, share, table

ROLES = ("target", "draft_prefill", "draft_decode")


def served() -> str:
    """What each backend served, and how many requests differ from the same kernels without a graph."""
    columns = (
        "backend",
        "deployments",
        "steps",
        "forwards",
        "from graphs",
        "graphs",
        "requests",
        "tokens",
        "drafts kept",
        "differing",
    )
    rows = [
        (
            backend,
            result["deployments"],
            *(f"{result[name]:,}" for name in ("steps", "forwards")),
            share(sum(result["from graphs"].values()), result["forwards"]),
            *(f"{result[name]:,}" for name in ("graphs", "requests", "tokens", "accepted")),
            result["differ from the same kernels"],
        )
        for backend, result in campaigns().items()
    ]
    return "\n".join([table(columns, rows), *_faults()])


def _faults() -> list[str]:
    """Return what a campaign found wrong, and which were short of steps."""
    lines = []
    for backend, result in campaigns().items():
        lines += [f"- {backend}: {fault}" for fault in result["faults"]]
        lines += [f"- {backend}: {result['short of steps']}"] if "short of steps" in result else []
    return ["", *lines] if lines else ["", "No campaign found a fault, and none was short of its steps."]


def _modes() -> list[tuple[str, str]]:
    """Return the roles and modes that any backend had a forward of."""
    names = {name for result in campaigns().values() for name in result["from graphs"]}
    return sorted(((role, mode) for role, _, mode in (name.partition(" ") for name in names)), key=_by_role)


def _by_role(pair: tuple[str, str]) -> tuple[int, str]:
    return ROLES.index(pair[0]), pair[1]


PARTS: dict[str, Callable[[], str]] = {"gpu-equality": served}
