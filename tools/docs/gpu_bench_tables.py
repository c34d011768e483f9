"""The tables of the GPU bench.

A figure that is missing in the newest file is shown as *not measured*; older files are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from results import NO_VALUE, NOT_MEASURED, bench, campaigns, ms, of, percent, reports, singular, table, times, us

FIGURES = {
    "decode": "decode step by bare graphs",
    "preparation": "preparation",
    "chain": "draft chain",
    "throughput": "throughput",
    "capture": "capture",
    "pools": "pools",
}
# Where it was measured -------------------------------------------------------------------------


def machine() -> str:
    """Where, when and with what, of the bench and of the campaign."""
    lines: list[tuple[list[str], str]] = []
    # A file may have results of several backends, and is named once.
    for file in (bench(), *{c["file"]["name"]: c["file"] for c in campaigns().values()}.values()):
        where, hardware = file["provenance"], file["provenance"]["hardware"]
        facts = f"{hardware.get('gpu', 'no GPU')}, {where['date'][:10]}, {_versions(where['packages'])}"
        if not lines or facts != lines[-1][1]:
            lines.append(([], facts))
        # Without its date: ``-2`` begins the year.
        lines[-1][0].append(f"[{file['name'].partition('-2')[0]}](../../benchmarks/results/{file['name']})")
    return "\n".join(f"- {', '.join(links)}: {facts}." for links, facts in lines)


def _versions(packages: Mapping[str, str]) -> str:
    shown = ("torch", "triton", "transformers", "flash-attn-4", "flashinfer-python")
    return ", ".join(f"{name} {packages[name]}" for name in shown if name in packages)


# Targets ---------------------------------------------------------------------------------------


def targets() -> str:
    """Each target with what each backend reached."""
    measured = reports()
    backends = sorted({backend for backend, _ in measured})
    rows_of_targets: dict[tuple[int, str], dict[str, Any]] = {}
    reached: dict[tuple[int, str, str], dict[str, Any]] = {}
    for (backend, k), report in measured.items():
        for target in report.get("targets", ()):
            rows_of_targets.setdefault((k, target["what"]), target)
            reached[k, target["what"], backend] = target
    rows = []
    for (k, subject), target in sorted(rows_of_targets.items(), key=_order):
        limit = f"at {'most' if target['at_most'] else 'least'} {target['wanted']:g} {target['unit']}".strip()
        cells = []
        for backend in backends:
            mine = reached.get((k, subject, backend))
            # A figure that was measured, without this target: it is one of other backends.
            other = NO_VALUE if measured.get((backend, k), {}).get(target["figure"]) else NOT_MEASURED
            cells.append(other if mine is None else _verdict(mine))
        rows.append((str(k), singular(subject), limit, *cells))
    number_met = sum(target["holds"] for target in reached.values())
    lines = [f"{number_met} of the {len(reached)} targets that were measured are met.", ""]
    lines += [table(("K", "target", "wanted", *backends), rows, text=3), *_absences(measured)]
    return "\n".join(lines)


def _order(item: tuple[tuple[int, str], dict[str, Any]]) -> int:
    return list(FIGURES).index(item[1]["figure"])


def _verdict(target: dict[str, Any]) -> str:
    value = times(target["reached"])
    return value if target["holds"] else f"**{value}, missed by {_missed_by(target)}**"


def _missed_by(target: dict[str, Any]) -> str:
    return percent(target["missed_by"])


def _absences(measured: dict[tuple[str, int], dict[str, Any]]) -> list[str]:
    """Return a sentence for each figure that is not there, and for each plan that has none."""
    ks, backends = sorted({k for _, k in measured}), sorted({backend for backend, _ in measured})
    lines = []
    for backend in backends:
        for k in ks:
            report = measured.get((backend, k))
            if report is None:
                lines.append(f"- {backend}, K={k}: not in this run.")
                continue
            if "error" in report:
                lines.append(f"- {backend}, K={k}: {report['error']}")
            lines += [
                f"- {backend}, K={k}, {a['figure']}: {a.get('message') or a['says']}" for a in report.get("absent", ())
            ]
    return ["", *lines] if lines else []


# Figures ---------------------------------------------------------------------------------------


def decode() -> str:
    """A decode step against its graphs alone and eager."""
    columns = ("backend", "requests", "step, ms", "eager, ms", "host, us", "step / bare")
    rows = [
        (
            backend,
            row["num_reqs"],
            *(ms(row[name]) for name in ("step", "eager")),
            us(row["host"]),
            times(row["overhead"]),
        )
        for backend, figure in of("decode", 0)
        for row in figure
    ]
    return table(columns, rows)


PARTS: dict[str, Callable[[], str]] = {"gpu-machine": machine, "gpu-targets": targets, "gpu-decode": decode}
