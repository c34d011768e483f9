"""The tables of the GPU bench.

A figure that is missing in the newest file is shown as *not measured*; older files are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from results import (
    MIBI,
    NO_VALUE,
    NOT_MEASURED,
    bench,
    campaigns,
    mib,
    ms,
    of,
    percent,
    reports,
    scaled,
    share,
    singular,
    table,
    times,
    us,
)

FIGURES = {
    "decode": "decode step by bare graphs",
    "preparation": "preparation",
    "chain": "draft chain",
    "throughput": "throughput",
    "capture": "capture",
    "pools": "pools",
}
BOUNDS = {
    "decode": "by the work of a step outside its graphs: [Decode step](#decode-step), column *host*",
    "preparation": "by the runner's own work on values, dispatch and padding. The backend's share is the column "
    "*backend* under [Preparation](#preparation)",
    "chain": "by the GPU's work: [The draft chain](#the-draft-chain)",
    "throughput": "by the GPU's work: [Throughput](#throughput) has the limit set by bare replays",
    "capture": "by the runner's overhead over a bare loop: [Capture](#capture)",
}


# Where it was measured -------------------------------------------------------------------------


def machine() -> str:
    """Where, when and with what."""
    measured = bench()
    where, hardware = measured["provenance"], measured["provenance"]["hardware"]
    facts: dict[str, str] = next((r["facts"] for r in reports().values() if "facts" in r), {})
    named = {
        "GPU": hardware.get("gpu", "unknown"),
        "driver": facts.get("driver", "unknown"),
        "CUDA of torch": hardware.get("cuda", "unknown"),
        "host": f"{hardware['cpu']}, {hardware['cores']} cores, {where['system']}",
        "Python": where["python"],
        "packages": _versions(where["packages"]),
    }
    sources = [measured, *{c["file"]["name"]: c["file"] for c in campaigns().values()}.values()]
    lines = [table(("part", "version"), named.items(), text=2), ""]
    lines.append(table(("result", "date (UTC)", "command"), map(_source, sources), text=3))
    for file in sources[1:]:
        gpu, packages = file["provenance"]["hardware"].get("gpu"), file["provenance"]["packages"]
        if gpu != hardware.get("gpu") or packages != where["packages"]:
            lines += [
                "",
                f"`{file['name']}` was measured with other versions or on another GPU: {gpu}, {_versions(packages)}.",
            ]
    return "\n".join(lines)


def _versions(packages: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.items())


def _source(file: dict[str, Any]) -> tuple[str, str, str]:
    link = f"[{file['name']}](../../benchmarks/results/{file['name']})"
    date = datetime.fromisoformat(file["provenance"]["date"])
    return link, f"{date:%Y-%m-%d %H:%M}", f"`{file['provenance']['command']}`"


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
    return f"{value}, met" if target["holds"] else f"**{value}, missed by {_missed_by(target)}**"


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
            lines += [f"- {backend}, K={k}, {a['figure']}: {a['says']}" for a in report.get("absent", ())]
    return ["", *lines] if lines else []


def missed() -> str:
    """Return each missed target, by how much it is missed, and its bound."""
    by_reason: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for (backend, _), report in reports().items():
        for target in report.get("targets", ()):
            if not target["holds"]:
                by_reason.setdefault(target["figure"], []).append((backend, target))
    lines = []
    for figure in FIGURES:
        if figure in by_reason:
            each = [
                f"{backend}, {singular(target['what'])}: missed by {_missed_by(target)}"
                for backend, target in by_reason[figure]
            ]
            lines += [f"- **{FIGURES[figure]}**, bounded {BOUNDS[figure]}.", *(f"  - {one}" for one in each)]
    return "\n".join(lines) or "No measured target is missed."


# Figures ---------------------------------------------------------------------------------------


def decode() -> str:
    """A decode step against its graphs alone and eager."""
    columns = ("backend", "requests", "step, ms", "bare, ms", "eager, ms", "host, us", "step / bare")
    rows = [
        (
            backend,
            row["num_reqs"],
            *(ms(row[name]) for name in ("step", "bare", "eager")),
            us(row["host"]),
            times(row["overhead"]),
            times(row["gain"]),
        )
        for backend, figure in of("decode", 0)
        for row in figure
    ]
    return table((*columns, "eager / bare"), rows)


def preparation() -> str:
    """Host time of a preparation: without a drafter, then of all roles."""
    columns = ("requests", "step", "anew", "backend", "stock plan", "step / stock")
    parts = []
    for k in sorted({k for _, k in reports()}):
        rows = [
            (
                backend,
                row["role"],
                row["num_reqs"],
                *(us(row[name]) for name in ("step", "stage", "prepare", "stock")),
                times(row["of_stock"]),
            )
            for backend, figure in of("preparation", k)
            for row in figure
        ]
        parts += [f"K={k}, microseconds of the host:", "", table(("backend", "role", *columns), rows, 2), ""]
    return "\n".join(parts).rstrip()


def preparation_whole() -> str:
    """Host time of all forwards of a step with a drafter, by as many stock calls."""
    rows = []
    for k in sorted({k for _, k in reports()} - {0}):
        forwards = {"target": 1, "draft_prefill": 1, "draft_decode": k - 1}
        for backend, figure in of("preparation", k):
            for num_reqs in sorted({row["num_reqs"] for row in figure}):
                matching = [row for row in figure if row["num_reqs"] == num_reqs and row["stock"] is not None]
                if len(matching) == len(forwards):
                    ours, stock = (sum(r[n] * forwards[r["role"]] for r in matching) for n in ("step", "stock"))
                    rows.append((backend, k, num_reqs, us(ours), us(stock), times(ours / stock)))
    return table(("backend", "K", "requests", "all forwards", "stock plans", "ratio"), rows)


def chain() -> str:
    """The draft decodes of a step."""
    columns = ("requests", "decodes", "one graph", "single steps", "eager", "one step", "host")
    rows = [
        (
            backend,
            row["num_reqs"],
            row["steps"],
            *(us(row[name]) for name in ("fused", "single", "eager")),
            us(row["single"] / row["steps"]),
            us(row.get("host")),
            times(row["over_single"]),
            times(row["over_eager"]),
        )
        for backend, figure in of("chain")
        for row in figure
    ]
    return table(("backend", *columns, "single / one graph", "eager / best"), rows)


def bound() -> str:
    """What one single step of a draft chain takes the GPU, and what it takes the host."""
    rows = [row for _, figure in of("chain") for row in figure]
    if not rows:
        return "No draft chain was measured."
    says = f"One single step takes the GPU {_range(row['single'] / row['steps'] for row in rows)}"
    known = [row for row in rows if row.get("host") is not None]
    if not known:
        return f"{says}. What it takes the host is not in this run; a profile had about 50 us."
    slow = sum(row["host"] >= row["single"] / row["steps"] for row in known)
    hides = (
        "so it hides behind the step before"
        if not slow
        else f"in {slow} of {len(known)} cases more than the GPU, which then waits for it in a run"
    )
    return f"{says}, and the host {_range(row['host'] for row in known)}: {hides}."


def _range(seconds: Iterable[float]) -> str:
    """Return the least and the most of some times."""
    times = list(seconds)
    least, most = us(min(times)), us(max(times))
    return f"{least} us" if least == most else f"{least} to {most} us"


def throughput() -> str:
    """Return tokens per second, compared with transformers and with bare replays."""
    rows, says = [], set()
    bare = {(backend, row["num_reqs"]): row["bare"] for backend, figure in of("decode", 0) for row in figure}
    for backend, throughput in of("throughput"):
        step = bare.get((backend, throughput["num_requests"]))
        most = None if step is None else throughput["num_requests"] / step
        ours = throughput["tokens_per_second"]
        rows.append(
            (
                backend,
                f"{throughput['num_requests']} of {throughput['prompt_tokens']} + {throughput['output_tokens']}",
                *(scaled(value, 1, 0) for value in (ours, throughput["other"])),
                times(throughput["gain"]),
                scaled(most, 1, 0),
                NO_VALUE if most is None else share(ours, most),
            )
        )
        says.add(throughput["other_says"])
    columns = ("backend", "requests", "tokens/s", "transformers", "ratio", "bare replays", "share of these")
    return "\n".join([f"Compared with: {'; '.join(sorted(says))}.", "", table(columns, rows, 2)])


def capture() -> str:
    """Return seconds and bytes of a capture, compared with a bare loop."""
    columns = ("graphs", "first, s", "again, s", "bare loop, s", "again / bare")
    memory = ("MiB per graph", "bare, MiB per graph", "MiB / bare", "driver, MiB")
    rows = []
    for (backend, k), report in reports().items():
        row = report.get("capture")
        if row is None:
            continue
        each = [
            None if cost is None else (cost["pool"] + cost["driver"]) / row["graphs"]
            for cost in (row["ours"], row["bare"])
        ]
        bare = row["bare"]
        rows.append(
            (
                backend,
                k,
                row["graphs"],
                *(scaled(s, 1, 2) for s in (row["first_seconds"], row["ours"]["seconds"])),
                scaled(None if bare is None else bare["seconds"], 1, 2),
                times(row["of_seconds"]),
                *(scaled(size, 1 / MIBI, 2) for size in each),
                times(row["of_memory"]),
                mib(row["ours"]["driver"]),
            )
        )
    return table(("backend", "K", *columns, *memory), rows)


def pools() -> str:
    """One pool for all roles against one each."""
    rows = [
        (
            backend,
            *(mib(row[name]) for name in ("shared", "per_role", "saved")),
            share(row["saved"], row["per_role"]),
            row["requests"],
            len(row["differing"]),
        )
        for backend, row in of("pools")
    ]
    columns = ("backend", "shared, MiB", "one per role, MiB", "saved, MiB", "saved", "requests", "differing")
    return table(columns, rows)


PARTS: dict[str, Callable[[], str]] = {
    "gpu-machine": machine,
    "gpu-targets": targets,
    "gpu-missed": missed,
    "gpu-decode": decode,
    "gpu-preparation": preparation,
    "gpu-preparation-whole": preparation_whole,
    "gpu-chain": chain,
    "gpu-chain-bound": bound,
    "gpu-throughput": throughput,
    "gpu-capture": capture,
    "gpu-pools": pools,
}
