"""``launch --auto`` over starts of real vLLM: what it observes, decides and gains; planted faults are put aside.

Every start is ``capture-planner launch --auto FOLDER -- python _arriving.py ...`` with the same words; the load is in a
file, which changes before the third start. Then two faults are planted, as if a former start had applied them:

- a *bad plan*: the best known one without its largest graphs, with a promise that it cannot keep. It runs in one start,
  and the next one has to put it aside;
- a *crash*: the same command ends before capture under that plan, and only under it. The same start has to put it
  aside, and to serve by itself.

Reported for each start: tokens/s, steps, inter-token latency, time to first token, graphs, what was promised and
measured, and what ``launch --auto`` said. Needs a CUDA GPU, vLLM 0.33, and this repository's distributions installed
where vLLM finds its plugins.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _arriving import CRASH_FOR
from _bench import CONSOLE, conclude, finish, parser, print_table

from capture_planner import codec
from capture_planner.measuring.workers import read_workers
from capture_planner.records._base import digest, replace
from capture_planner.records.plan import Plan
from capture_planner.records.promise import ExpectedSteps
from capture_planner_tuner.auto.decisions import graphs_of, plan_file
from capture_planner_tuner.auto.start import JournalFolder
from capture_planner_tuner.journal import STARTS, Event, JournalRecord, PromiseVerdict
from capture_planner_tuner.promises import check_promise

SCRIPT = Path(__file__).with_name("_arriving.py")
WAVE: tuple[dict[str, Any], ...] = ({"wave": [10, 250], "requests": 900},)
STEADY: tuple[dict[str, Any], ...] = ({"in_flight": 200, "requests": 400}, {"in_flight": 32, "requests": 100})
STARTS_LOADS = (WAVE, WAVE, STEADY, STEADY, STEADY)
FAULTS = ("bad", "crash")


class AutoStarts:
    """Starts of one command on one folder, which has the folder of ``--auto``, loads, results and logs."""

    def __init__(self, arguments: Any, folder: Path) -> None:
        self.auto = JournalFolder(folder / "auto")
        self._loads, self._result, self._logs = folder / "loads.json", folder / "result.json", folder
        self._words = [
            *(sys.executable, "-m", "capture_planner", "launch", "--auto", str(self.auto.path)),
            *("--tune-seconds", str(arguments.tune_seconds), "--", sys.executable, str(SCRIPT)),
            *("--shape", arguments.shape, "--k", str(arguments.k), "--rounds", str(arguments.rounds)),
            *("--loads", str(self._loads), "--result", str(self._result)),
        ]

    def start(self, loads: Sequence[Mapping[str, Any]], name: str, crash_for: str | None = None) -> dict[str, Any]:
        """Start the engine, let it serve, and return what came of it; under ``crash_for`` the command ends at once."""
        self._loads.write_text(json.dumps(list(loads)), "utf-8")
        self._result.unlink(missing_ok=True)
        environment = dict(os.environ)
        if crash_for is not None:
            environment[CRASH_FOR] = crash_for.partition(":")[2]
        log = self._logs / f"{name}.log"
        with log.open("w", encoding="utf-8") as file:
            code = subprocess.run(self._words, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
        said = [line for line in log.read_text("utf-8", "replace").splitlines() if line.startswith("auto: ")]
        served = json.loads(self._result.read_text("utf-8")) if self._result.exists() else {"loads": []}
        result = {"name": name, "exit_code": code, "said": said, "start_seconds": served.get("start_seconds")}
        result |= {"loads": served["loads"], **self._observed()}
        CONSOLE.print(f"{name}: exit code {code}", *said, sep="\n  ", markup=False, highlight=False)
        return result

    def _observed(self) -> dict[str, Any]:
        """Return the last start's plan, graphs and decisions, and its promise against its observation."""
        journal = self.auto.read().journal
        last = max((each for each in journal if each.decision in STARTS), key=lambda each: each.run)
        same = [each for each in journal if each.decision in STARTS and each.run >= last.run - 1]
        result: dict[str, Any] = {
            "run": last.run,
            "decisions": [[each.run, each.decision.value, each.plan, each.reason] for each in same],
            "plan": last.plan,
        }
        try:
            seen = read_workers(self.auto.run(last.run))
        except Exception as error:
            return result | {"observation": str(error)}
        result |= {"applied": seen.plan, "graphs": seen.num_graphs, "capture_seconds": seen.capture_seconds}
        result |= {"graph_mib": seen.graph_mib, "kv_blocks": seen.kv_blocks}
        promise = None if last.plan is None else self.auto.load_plan(last.plan).promise
        if promise is not None:
            checked = check_promise(promise, seen)
            side = checked.after
            result["promise"] = {"verdict": checked.verdict.value, "reason": checked.reason}
            if side is not None:
                figures = {"promised_ms": side.expected_ms, "measured_ms": side.measured_ms, "off": side.off}
                result["promise"] |= {**figures, "error_ms": side.error_ms, "without_ms": checked.without_ms}
        return result

    def best(self) -> Plan | None:
        """Return the plan of the last start; None: it ran by itself."""
        starts = [each for each in self.auto.read().journal if each.decision in STARTS]
        return None if not starts or starts[-1].plan is None else self.auto.load_plan(starts[-1].plan)

    def plant(self, plan: Plan, reason: str) -> str:
        """Make a plan the last one that was applied, in a start that ended well; return its digest."""
        journal = self.auto.read().journal
        last = max((each for each in journal if each.decision in STARTS), key=lambda each: each.run)
        self.auto.keep(plan)
        named = {"plan": digest(plan), "graphs": graphs_of(plan), "file": plan_file(digest(plan))}
        started = replace(last, run=last.run + 1, decision=Event.APPLY, reason=reason, tuned_on=None, **named)
        ended = JournalRecord(
            time=last.time,
            run=last.run + 1,
            decision=Event.END,
            plan=digest(plan),
            graphs=graphs_of(plan),
            captured=True,
            exit_code=0,
        )
        self.auto.append([started, ended])
        return digest(plan)

    def is_aside(self, plan: str) -> bool:
        """Whether a plan is put aside, by the journal."""
        return any(each.decision is Event.PUT_ASIDE and each.plan == plan for each in self.auto.read().journal)


def worse(plan: Plan, keep: int) -> Plan:
    """Return a plan with the ``keep`` smallest graphs of each role and mode, and a promise of half of the time."""
    roles = []
    for role in plan.roles:
        modes = {entry.mode for entry in role.entries}
        left = [
            entry
            for mode in modes
            for entry in sorted((e for e in role.entries if e.mode is mode), key=lambda e: e.num_tokens)[:keep]
        ]
        roles.append(replace(role, entries=tuple(left)))
    promise = plan.promise
    assert promise is not None, "launch --auto applies no plan without one"
    after = promise.after
    halved = ExpectedSteps(
        mean_step_ms=after.mean_step_ms / 2,
        error_ms=after.error_ms,
        rows=tuple(replace(row, milliseconds=row.milliseconds / 2) for row in after.rows),
    )
    return replace(plan, roles=tuple(roles), promise=replace(promise, after=halved))


def campaign(
    starts: AutoStarts, loads: Sequence[Sequence[Mapping[str, Any]]], faults: Collection[str], seconds: float
) -> Iterator[tuple[list[dict[str, Any]], dict[str, bool]]]:
    """Run all starts; yield after each what came so far, with the targets.

    :param loads: of the starts before faults are planted.
    :param faults: of FAULTS.
    :param seconds: no start begins that could end later; what is left out is no target.
    """
    rows: list[dict[str, Any]] = []
    targets: dict[str, bool] = {}
    last, end = 0.0, time.monotonic() + seconds

    def fits() -> bool:
        return time.monotonic() + last < end

    def run(load: Sequence[Mapping[str, Any]], name: str, crash_for: str | None = None) -> dict[str, Any]:
        nonlocal last
        began = time.monotonic()
        rows.append(starts.start(load, name, crash_for))
        last = time.monotonic() - began  # not the longest: the first start compiles
        return rows[-1]

    for number, load in enumerate(loads, 1):
        if fits():
            run(load, f"start {number}")
            targets = dict(_of_loop(rows, len(loads)))
            yield rows, targets
    best = starts.best()
    if best is None:
        yield rows, targets | {"a plan to plant faults with": False}
        return
    if "bad" in faults and time.monotonic() + 2 * last < end:
        bad = starts.plant(worse(best, 2), "planted: few graphs, and half of the time promised")
        broken = run(STEADY, "under the bad plan")
        after = run(STEADY, "after the bad plan")
        is_broken = broken.get("promise", {}).get("verdict") == PromiseVerdict.BROKEN.value
        targets["the planted bad plan breaks its promise"] = broken["plan"] == bad and is_broken
        targets["it is put aside, and the plan before runs"] = starts.is_aside(bad) and after["plan"] not in (bad, None)
        yield rows, targets
    if "crash" in faults and fits():
        crash = starts.plant(worse(best, 3), "planted: the command ends before capture under this plan")
        crashed = run(STEADY, "under the plan that crashes", crash)
        targets["the planted crash is put aside in its own start"] = starts.is_aside(crash)
        alone = crashed["exit_code"] == 0 and crashed["plan"] is None and bool(crashed["loads"])
        targets["that start serves by itself"] = alone
        yield rows, targets
        if fits():
            after = run(STEADY, "after the crash", crash)
            targets["the next one runs the plan before"] = after["plan"] not in (crash, None)
            yield rows, targets


def _of_loop(rows: Sequence[Mapping[str, Any]], number: int) -> Iterator[tuple[str, bool]]:
    """Yield the targets of the starts before faults are planted."""
    served = all(row["exit_code"] == 0 and row["loads"] for row in rows)
    yield f"{number} starts, all served ({len(rows)})", served and len(rows) == number
    if len(rows) < 2:
        return
    applied = rows[1]["plan"] is not None and rows[1].get("applied") == rows[1]["plan"]
    yield "the second start runs a plan", applied
    kept = [row["promise"] for row in rows if "promise" in row and "promised_ms" in row["promise"]]
    offs = ", ".join(f"{each['off']:+.1%}" for each in kept)
    close = bool(kept) and all(abs(each["off"]) <= 0.1 for each in kept)
    yield f"promised and measured mean step within 10 % ({offs})", close
    yield from _gains(rows)


def _gains(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Yield the target for the load that ran both without and under a plan."""
    rates = {
        row["plan"] is not None: [load["tokens_per_second"] for load in row["loads"]]
        for row in rows[:2]
        if row["loads"]
    }
    if len(rates) == 2:
        gain = min(rates[True]) / max(rates[False])
        yield f"the wave is served no slower than by itself ({gain:.2f} times)", gain >= 0.98


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    options = parser(__doc__)
    options.add_argument("--shape", default="0.6b", help="as in _arriving.py")
    options.add_argument("--k", type=int, default=3, help="speculative tokens")
    options.add_argument("--rounds", type=int, default=1, help="how often a start serves its loads")
    most = len(STARTS_LOADS)
    options.add_argument(
        "--starts", type=int, default=most, choices=range(1, most + 1), help="before faults are planted"
    )
    options.add_argument("--faults", nargs="*", default=FAULTS, choices=FAULTS, help="which are planted; default: all")
    options.add_argument("--tune-seconds", type=float, default=30.0, help="most time of tuning before a start")
    options.add_argument("--seconds", type=float, default=3600, help="no start begins that could end later")
    options.add_argument("--folder", type=Path, help="for the folder of --auto and logs; default: a temporary one")
    arguments = options.parse_args(words)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / "auto", ignore_errors=True)
        starts = AutoStarts(arguments, folder)
        loads = STARTS_LOADS[: arguments.starts]
        for rows, targets in campaign(starts, loads, arguments.faults, arguments.seconds):
            journal = [codec.to_data(each) for each in starts.auto.read().journal]
            finish(arguments, {"starts": rows, "journal": journal, "targets": targets})
    shown = (
        (
            row["name"],
            "by itself" if row["plan"] is None else row["plan"].partition(":")[2][:8],
            row.get("graphs", ""),
            row.get("promise", {}).get("verdict", ""),
            ", ".join(f"{load['tokens_per_second']:,.0f}" for load in row["loads"]),
        )
        for row in rows
    )
    print_table("starts", ("start", "runs", "graphs", "promise", "tokens/s by load"), shown)
    return conclude(arguments, {"starts": rows, "journal": journal}, targets)


if __name__ == "__main__":
    sys.exit(main())
