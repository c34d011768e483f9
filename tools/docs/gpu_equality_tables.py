"""The tables of the equality campaign on a GPU: what was served, and what differs from what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from results import campaigns, mib, share, table

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


def kinds() -> str:
    """What the deployments were."""
    names = ("models", "page sizes", "pools", "chains", "drafters")
    rows = [(backend, *(_counted(result[name]) for name in names)) for backend, result in campaigns().items()]
    of_combinations: dict[str, list[str]] = {}
    for backend, result in campaigns().items():
        of_combinations.setdefault(_combinations(result), []).append(backend)
    lines = [f"- {', '.join(backends)}: {combination}" for combination, backends in of_combinations.items()]
    columns = ("backend", *names)
    more = [
        (
            backend,
            *(f"{result['from graphs'].get(f'{role} {mode}', 0):,}" for role, mode in _modes()),
            result["fused chains"],
            result["schedules of k"],
            result["poisoned"],
            result["ran ahead"],
        )
        for backend, result in campaigns().items()
    ]
    others = ("graphs of chains", "schedules of K", "poisoned", "ran ahead")
    counted = table(("backend", *(f"{role} {mode}" for role, mode in _modes()), *others), more)
    shown = table(columns, rows, text=len(columns))
    return "\n".join([*lines, "", shown, "", "Forwards from graphs, and deployments that were special:", "", counted])


def _modes() -> list[tuple[str, str]]:
    """Return the roles and modes that any backend had a forward of."""
    names = {name for result in campaigns().values() for name in result["from graphs"]}
    return sorted(((role, mode) for role, _, mode in (name.partition(" ") for name in names)), key=_by_role)


def _by_role(pair: tuple[str, str]) -> tuple[int, str]:
    return ROLES.index(pair[0]), pair[1]


def _combinations(result: Mapping[str, Any]) -> str:
    """Return the K and the modes of one campaign; which pairs are missing, where some are."""
    pairs = {tuple(each.split(" as ")[0].split(" ", 1)) for each in result["K and mode"]}
    ks, modes = sorted({k for k, _ in pairs}, key=int), sorted({mode for _, mode in pairs})
    missing = sorted(f"{k} {mode}" for k in ks for mode in modes if (k, mode) not in pairs)
    without = f"; without {', '.join(missing)}" if missing else ""
    return f"K of {', '.join(ks)}, each in {', '.join(modes)}{without}"


def _counted(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{name}: {counts[name]}" for name in sorted(counts, key=lambda name: (len(name), name)))


def kernels() -> str:
    """Return how far tokens differ from other kernels', which sum in another order."""
    names = {"plain": "plain greedy decoding", "eager": "eager steps"}
    rows = [
        (
            backend,
            dtype,
            names[name],
            each["requests"],
            each["differ"],
            each["not by a tie"],
            f"{each['widest gap']:.1e}" if each["widest gap"] else "0",
        )
        for backend, result in campaigns().items()
        for name, dtypes in result["other kernels"].items()
        for dtype, each in dtypes.items()
    ]
    columns = ("backend", "dtype", "against", "requests", "differing", "not by a tie", "widest gap")
    return table(columns, rows, text=3)


def logits() -> str:
    """Return errors of logits, and the errors of the dtype alone."""
    rows = [
        (
            backend,
            model,
            f"{each['rows']:,}",
            *(_relative(each[name]) for name in ("median", "worst", "worst of the dtype alone")),
        )
        for backend, result in campaigns().items()
        for model, each in result["logits"].items()
    ]
    columns = ("backend", "model", "rows", "median", "worst", "worst of the dtype alone")
    return table(columns, rows, text=2)


def _relative(error: float) -> str:
    """Return an error that is relative to a norm: in %, or where it is tiny as a power of ten."""
    return f"{100 * error:.2f} %" if error >= 1e-4 else f"{error:.1e}" if error else "0"


def pools() -> str:
    """Bytes of shared pools against one per role, over the deployments that were served with both."""
    rows = []
    for backend, result in campaigns().items():
        both = result["shared against dedicated pools"]
        shared, per_role = (sum(each["bytes"][pool] for each in both) for pool in ("shared", "per_role"))
        differ = sum(each["differ"] for each in both)
        rows.append(
            (
                backend,
                len(both),
                *(mib(size) for size in (shared, per_role, per_role - shared)),
                share(per_role - shared, per_role),
                differ,
            )
        )
    sizes = ("shared, MiB", "one per role, MiB", "saved, MiB", "saved")
    return table(("backend", "deployments", *sizes, "differing requests"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "gpu-equality": served,
    "gpu-deployments": kinds,
    "gpu-kernels": kernels,
    "gpu-logits": logits,
    "gpu-equality-pools": pools,
}
