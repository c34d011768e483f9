"""Command lines that people run: how each is answered, and how long the command takes with its start.

FILE has a JSON object a line: ``engine``, ``command``, the line as it was published, and, where known, ``id``,
``environment`` and ``files``, a text by name for the files that the line names. Each line is given to
``capture-planner engine`` in quotes, in a process of its own; seconds are the processor's, its start included. Results
have no command and no file.

outcome          the command
answered         answers, and assumes nothing of the line or the model
assumed          answers, and says first what the answer rests on
older release    names flags that the release has no more, and what they are called now
unset variable   names a variable that the line does not set
not emulated     names what the engine takes and the emulation does not follow
refused          says why the engine would stop
failed           ends otherwise
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from _bench import CONSOLE, finish, parser, table

SIGNS = {
    "older release": ("was the last release", "the line is for release"),
    "unset variable": ("the line does not set",),
    "not emulated": ("not emulated", "is for a device", "does not read it"),
}
"""What messages have in them, by outcome."""
PROGRAM = "from capture_planner_command import main; main()"
MACHINE = "no --environment given"


def main() -> int:
    options = parser(__doc__)
    options.add_argument("file", type=Path, help="JSON lines of commands")
    options.add_argument("--only", nargs="*", default=[], help="ids of the lines to try")
    options.add_argument("--show", action="store_true", help="print what each command says")
    options.add_argument("--repeat", type=int, default=1, help="runs of each command; the fastest counts")
    arguments = options.parse_args()
    rows = [json.loads(line) for line in arguments.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [row for row in rows if not arguments.only or row.get("id") in arguments.only]
    results = []
    for number, row in enumerate(rows, 1):
        result = {"id": row.get("id", str(number)), "engine": row["engine"], **tried(row, arguments.repeat)}
        says = result.pop("says")
        results.append(result)
        if arguments.show:
            CONSOLE.print(f"\n{result['id']} {result['outcome']}", style="bold")
            CONSOLE.print("\n".join(says), markup=False, highlight=False)
    outcomes = Counter(result["outcome"] for result in results)
    seconds = [result["seconds"] for result in results]
    shown = table("command lines", "line", "engine", "outcome", "graphs", "seconds")
    for result in results:
        graphs = "" if result["graphs"] is None else str(result["graphs"])
        shown.add_row(result["id"], result["engine"], result["outcome"], graphs, f"{result['seconds']:.2f}")
    CONSOLE.print(shown)
    CONSOLE.print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    CONSOLE.print(f"median {statistics.median(seconds):.2f} s, slowest {max(seconds):.2f} s, with the start")
    finish(arguments, {"outcomes": dict(outcomes), "median_seconds": statistics.median(seconds), "lines": results})
    return int(bool(outcomes["failed"]))


def tried(row: dict[str, Any], repeat: int) -> dict[str, Any]:
    """Return what the command makes of a line: its outcome, its graphs, its assumptions and its seconds."""
    words = [sys.executable, "-c", PROGRAM, "engine", row["engine"], row["command"], "--format", "json"]
    words += ["--environment", row["environment"]] if row.get("environment") else []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in row.get("files", {}).items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        seconds = []
        for _ in range(repeat):
            start = children_seconds()
            ran = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=60, check=False)
            seconds.append(children_seconds() - start)
    result = {"outcome": "failed", "graphs": None, "assumptions": 0, "seconds": round(min(seconds), 3)}
    if ran.returncode == 0:
        answer = json.loads(ran.stdout)
        rests = [each for each in answer["assumptions"] if MACHINE not in each]
        result |= {"outcome": "assumed" if rests else "answered", "graphs": len(answer["graphs"])}
        result |= {"assumptions": len(rests)}
        says = [*(f"assumption: {each}" for each in rests), f"modes: {answer['mode']}", *ran.stderr.splitlines()]
    elif ran.returncode == 1 and ran.stderr.startswith("error: "):
        says = ran.stderr.splitlines()
        found = (name for name, signs in SIGNS.items() if any(sign in ran.stderr for sign in signs))
        result["outcome"] = next(found, "refused")
    else:
        says = [f"exit code {ran.returncode}", *ran.stderr.splitlines()[-3:]]
    return {**result, "says": says}


def children_seconds() -> float:
    """Return the processor's seconds of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
