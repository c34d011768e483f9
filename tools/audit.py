"""Audit folders of public configurations: what their servers capture, what may run eager, and what a load reaches.

``python tools/audit.py FOLDER... -o audit.html`` writes one page. The folders are clones that the user fetched: recipes
of vLLM's site, InferenceX, Dynamo, srt-slurm, or manifests and scripts of any kind. A row of the page is one server.

*Allowed* is a decode within the server's limits; *reached* is one that the load has, which the configuration or
``--concurrency`` states, spread evenly over workers and data-parallel ranks. Machine, release, facts about the model
and load are columns, with what is assumed of them. A worker of prefills runs no decodes and a worker of decodes no
prompts. A line of an older release is read with the names of today, and each changed name is said.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import attrs
import click
import yaml

from capture_planner import codec
from capture_planner.codec.shipped import DEFAULT_ENVIRONMENT, find_environment, shipped_environments
from capture_planner.engines import Emulation, Engine, emulate_line, find_engine
from capture_planner.engines.command_line import read_command, servers
from capture_planner.engines.deployments import BatchAnswer, walk
from capture_planner.engines.engine import OTHER_DEVICE
from capture_planner.engines.load import EngineLoad
from capture_planner.engines.shell import ShellCommand
from capture_planner.engines.verdict import is_eager, is_eager_for_any_model, ranges
from capture_planner.engines.yaml_files import FASTEST
from capture_planner.errors import CapturePlannerError, FlagError, NotEmulated
from capture_planner.modes import GraphMode, Role
from capture_planner.records.batch import Kind
from capture_planner.records.environment import Environment
from capture_planner.records.text import counted
from capture_planner.report.page import page
from capture_planner.report.writing import Grid, Part, Report, Section, TonedText, noted, percent

ENGINES = ("vllm", "sglang", "tensorrt-llm")
"""The engines whose releases are emulated."""
SUFFIXES = (".yaml", ".yml", ".sh", ".bash")
NAMED = re.compile(r"\b(?:vllm|sglang|trtllm|modelSpec|model_id)\b", re.IGNORECASE)
"""A file without one of these starts no server."""
OMNI = re.compile(r"--omni\b|vllm[-_]omni|\bdiffusion", re.IGNORECASE)
"""vLLM-Omni is another program behind the same command."""
# Whole words, as letters of a hash may read like one. The first group is of AMD.
_DEVICE = re.compile(
    r"(?<![a-z0-9])(?:(mi\d{3}x?)|(g?b\d{3}|h\d{2,3}|gb10|a100|a10|l40s?|rtx-?[a-z0-9-]+))(?![a-z0-9])"
)
ANALYSED, REFUSED, NOT_EMULATED, OTHER = "analysed", "refused by the release", "not emulated", "another program"
OUTCOMES = (ANALYSED, REFUSED, NOT_EMULATED, OTHER)


@attrs.frozen(kw_only=True)
class StatedLoad:
    """The load of one server, as its configuration states it."""

    requests: int | None = None
    """Of all workers together, at most; None: not stated."""
    workers: int = 1
    source: str = ""

    def on_rank(self, ranks: int) -> int | None:
        """Return the most requests of one rank, spread evenly."""
        return None if self.requests is None else math.ceil(self.requests / (self.workers * ranks))

    def text(self, ranks: int) -> str:
        """Say it: ``384 a rank (6144 in all, 1 worker of 16 ranks)``."""
        if self.requests is None:
            return "not stated"
        spread = f"{counted(self.workers, 'worker')} of {counted(ranks, 'rank')}"
        return f"{self.on_rank(ranks)} a rank ({self.requests} in all, {spread}; {self.source})"


@attrs.frozen(kw_only=True)
class AuditRow:
    """One server of a configuration."""

    where: str
    engine: str
    release: str
    machine: str
    command: str
    outcome: str
    reason: str = ""
    model_facts: str = ""
    work: str = ""
    load: str = ""
    load_known: bool = False
    read_as: tuple[str, ...] = ()
    mode: str = ""
    graphs: int = 0
    by_flags: bool = False
    allowed: str = ""
    """Decodes within the limits that have no graph, of a server that captures some and is no worker of prefills."""
    reached: str = ""
    """Those of them that the load reaches."""
    listed: int = 0
    """Sizes of the engine's list."""
    sizes: int = 0
    """Sizes of the target's decode graphs."""
    unreached: int = 0
    """Those of them that the load does not reach, or that no allowed batch uses."""


def audit_file(path: Path, root: Path, machine: str | None, concurrency: int | None) -> list[AuditRow]:
    """Return a row for each server that a file starts."""
    if NAMED.search(path.read_text("utf-8", errors="replace")) is None:
        return []
    try:
        found = servers(str(path), [find_engine(name) for name in ENGINES])
    except CapturePlannerError as error:
        text = _line(error)
        row = AuditRow(where=_where(path, root), engine="", release="", machine="", command="", outcome="", reason=text)
        return [row]
    data = _yaml(path)
    return [_row(path, root, data, engine, command, machine, concurrency) for engine, command in found]


def _row(
    path: Path,
    root: Path,
    data: Mapping[str, Any],
    engine: Engine,
    command: ShellCommand,
    machine: str | None,
    concurrency: int | None,
) -> AuditRow:
    named = f"{path.relative_to(root)} {_at(data, 'resources', 'gpu_type') or ''}".lower()
    device, says = _machine(named, data, machine)
    if device not in shipped_environments():
        # The engine then answers by the flags alone, or refuses.
        command = attrs.evolve(command, variables={**command.variables, OTHER_DEVICE: device})
    work = _work(command)
    image = engine.history.release_of_image(command.image)
    row = AuditRow(
        where=f"{_where(path, root)}:{command.line}{f'#{command.component}' if command.component else ''}",
        engine=engine.name,
        release=f"{engine.version}, stated {image or command.image or 'none'}",
        machine=says,
        command=_shown(engine, command),
        outcome=OTHER,
        work=work,
    )
    # Before anything is read: its flags would be refused as unknown.
    if OMNI.search(row.command):
        return attrs.evolve(row, reason="vLLM-Omni, or a model that diffuses")
    command, served = _by_served_name(command)
    environment = find_environment(device if device in shipped_environments() else machine or DEFAULT_ENVIRONMENT)
    emulation, command, changes = _emulated(engine, command, environment)
    if isinstance(emulation, CapturePlannerError):
        outcome = NOT_EMULATED if isinstance(emulation, NotEmulated) else REFUSED
        return attrs.evolve(row, outcome=outcome, reason=_line(emulation), read_as=(*served, *changes))
    ranks = _ranks(emulation)
    load = _load(path, data, command, work, concurrency)
    return attrs.evolve(
        _answered(attrs.evolve(row, command=_shown(engine, command)), emulation, load.on_rank(ranks)),
        load=load.text(ranks),
        load_known=load.requests is not None,
        read_as=(*served, *changes),
        model_facts=_facts(emulation),
    )


Repair = tuple[ShellCommand, tuple[str, ...]]
"""A command that another release takes, and what was changed, in words."""


def _emulated(
    engine: Engine, command: ShellCommand, environment: Environment
) -> tuple[Emulation | CapturePlannerError, ShellCommand, tuple[str, ...]]:
    """Emulate a command, of another release with the names of this one; or return the error."""
    changes: tuple[str, ...] = ()
    # Each turn takes old names or one flag out of the command, so that this ends.
    while True:
        try:
            return emulate_line(engine.name, read_command(engine, command), environment), command, changes
        except CapturePlannerError as error:
            repaired, says = _renewed(engine, command)
            if not says:
                repaired, says = _without_new_values(engine, command, error)
            if not says:
                return error, command, changes
            command, changes = repaired, (*changes, *says)


def _renewed(engine: Engine, command: ShellCommand) -> Repair:
    """Return a command with the names of today for what older releases had."""
    words, changes = engine.history.renewed(command.words)
    given: dict[str, str] = {}
    for name, value in command.variables.items():
        own, says = engine.history.renewed([f"{name}={value}"])
        changes += says
        words += own if says else ()
        given |= {} if says else {name: value}
    return attrs.evolve(command, words=words, variables=given), changes


def _without_new_values(engine: Engine, command: ShellCommand, error: CapturePlannerError) -> Repair:
    """Leave out a flag that decides nothing about graphs, and whose value this release does not know."""
    problems = error.problems if isinstance(error, FlagError) else []
    flags = [str(each.path[0]) for each in problems if each.path and "invalid choice" in each.message]
    left = list(command.words)
    # One at a time, as the next error names what else there is. ``--flag=value`` is one word, and its error stays.
    if not flags or flags[0] in engine.flags or flags[0] not in left:
        return command, ()
    at = left.index(flags[0])
    says = f"{flags[0]} {left[at + 1]} left out, which {engine.version} does not know and which decides no graph"
    del left[at : at + 2]
    return attrs.evolve(command, words=tuple(left)), (says,)


def _by_served_name(command: ShellCommand) -> tuple[ShellCommand, tuple[str, ...]]:
    """Return a command with the public name that a folder of its container is served under, and the change."""
    words = list(command.words)
    flagged = re.search(r"--served-model-name[= ]([\w.-]+/[\w.-]+)", " ".join(words))
    # The model stands near the front. A dot in the last five letters is that of a file's ending.
    folders = [
        at for at, word in enumerate(words[:8]) if word.startswith("/") and "." not in word.rpartition("/")[2][-5:]
    ]
    if flagged is None or not folders:
        return command, ()
    folder, words[folders[0]] = words[folders[0]], flagged[1]
    return attrs.evolve(command, words=tuple(words)), (f"{folder} as {flagged[1]}, its served name",)


def _answered(row: AuditRow, emulation: Emulation, most: int | None) -> AuditRow:
    """Return a row with what the engine answers, and what a load of so many requests reaches."""
    answers = walk(emulation)
    load = EngineLoad(name="", most=most)

    def happens(one: BatchAnswer) -> bool:
        kind = one.batch.kind
        idle = row.work == ("decode" if kind is Kind.MIXED else "prefill")
        return not idle and load.reaches(kind, one.batch.num_reqs)

    eager = is_eager_for_any_model if emulation.by_flags else is_eager
    # A server that captures nothing was meant to, and one of prefills has no decodes.
    judged = answers if emulation.graphs and row.work != "prefill" else ()
    lacking = [one for one in judged if one.batch.kind is Kind.DECODE and eager(one)]
    modes = {graph.entry.mode for graph in emulation.graphs if graph.role is Role.TARGET}
    # Where there are both, the piecewise graphs are those of mixed batches.
    decodes = GraphMode.FULL if GraphMode.FULL in modes else GraphMode.PIECEWISE
    sizes = {
        graph.entry.num_tokens
        for graph in emulation.graphs
        if graph.role is Role.TARGET and graph.entry.mode is decodes and not graph.prompts_only
    }
    # Mixed batches are asked for too: a size that they alone come to counts as used.
    used = {
        one.answer.entry.num_tokens
        for one in answers
        if one.batch.role is Role.TARGET
        and one.answer.entry is not None
        and one.answer.entry.mode is decodes
        and happens(one)
    }
    return attrs.evolve(
        row,
        outcome=ANALYSED,
        mode=emulation.modes[Role.TARGET].value,
        graphs=len(emulation.graphs),
        by_flags=bool(emulation.by_flags),
        allowed=_decodes(lacking, None),
        reached=_decodes([one for one in lacking if happens(one)], most),
        listed=len(emulation.sizes),
        sizes=len(sizes),
        unreached=len(sizes - used),
    )


def _decodes(answers: Sequence[BatchAnswer], most: int | None) -> str:
    """Write decodes by role: ``target: 513 to 1024``, in requests, up to those of a load."""
    texts = []
    for role in dict.fromkeys(one.batch.role for one in answers):
        ends = ranges(one for one in answers if one.batch.role is role)
        capped = [(first, last if most is None else min(last, most)) for first, last in ends]
        words = [f"{first}" if first == last else f"{first} to {last}" for first, last in capped]
        texts.append(f"{role.value}: {', '.join(words[:3])}{' ...' if len(words) > 3 else ''}")
    return "; ".join(texts)


def _ranks(emulation: Emulation) -> int:
    """Return the ranks of a worker that have batches of their own."""
    settings = {each.name: each.value for each in emulation.settings}
    own = settings.get("tensor_parallel_size", 1) if settings.get("enable_attention_dp") else 1
    return max(emulation.parallel.data, own)


def _facts(emulation: Emulation) -> str:
    if emulation.by_flags:
        return f"by the flags alone: {emulation.by_flags}"
    stated = [f"{each.value} ({each.source})" for each in emulation.settings if each.name == "model_facts"]
    return "; ".join([*stated, *emulation.assumptions]) or "none needed"


def _machine(named: str, data: Mapping[str, Any], machine: str | None) -> tuple[str, str]:
    """Return the machine's name, or that of a device which is not NVIDIA's, and where it comes from."""
    # The last is the most exact: the file's own ``gpu_type`` stands behind the path, and a folder before its files.
    for other, device in reversed(_DEVICE.findall(named.replace("_", "-"))):
        if other or device in shipped_environments():
            return other or device, f"{other or device}, stated"
    verified = [str(each) for each in _at(data, "meta", "hardware") or () if str(each) in shipped_environments()]
    if machine is None and verified:
        return verified[0], f"{verified[0]}, the first that the recipe lists"
    return machine or DEFAULT_ENVIRONMENT, f"{machine or DEFAULT_ENVIRONMENT}, assumed"


def _work(command: ShellCommand) -> str:
    """Return what a worker runs: ``prefill``, ``decode``, or both where it says neither."""
    text = f"{command.component} {' '.join(command.words)}".lower()
    # In vLLM's ``--kv-transfer-config``, a producer of KV caches is a worker of prefills.
    for work, sign in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        name = command.component.lower()
        given = rf"--disaggregation-mode[= ]{work}\b|--is-{work}-worker|\"{sign}\""
        # An aggregated worker runs both, whatever else its name has.
        if (work in name and not name.startswith("agg")) or re.search(given, text):
            return work
    return "both"


def _load(path: Path, data: Mapping[str, Any], command: ShellCommand, work: str, concurrency: int | None) -> StatedLoad:
    """Return the load that a recipe of srt-slurm or Dynamo states, or else the one of the command line."""
    # A recipe of srt-slurm with variants has what they share under ``base``.
    base = data.get("base", data)
    bench = _at(base, "benchmark") or {}
    listed = bench.get("concurrencies") or _at(bench, "env", "CONC")
    kind = {"decode": "decode_workers", "prefill": "prefill_workers"}.get(work, "agg_workers")
    workers = _at(base, "resources", kind) or 1
    named = re.search(r"-c(?:onc)?(\d+)(?:-|$)", path.stem) if bench else None
    # A list of numbers, or a text of them as ``4x48``.
    numbers = [int(each) for each in re.findall(r"\d+", json.dumps(listed))] if listed else []
    if numbers:
        return StatedLoad(requests=max(numbers), workers=workers, source="its benchmark, at most")
    if named:
        return StatedLoad(requests=int(named[1]), workers=workers, source="its name")
    stated = _perf(path)
    if stated is not None:
        return StatedLoad(requests=stated, workers=_replicas(data, command.component), source="its perf.yaml")
    return StatedLoad(requests=concurrency, source="--concurrency")


@cache
def _perf(path: Path) -> int | None:
    """Return the concurrency of the nearest ``perf.yaml``, as Dynamo's recipes have it."""
    # Next to the manifest, or in ``perf`` of the model's folder, which is two above.
    for folder in list(path.parents)[:4]:
        for each in (folder / "perf.yaml", folder / "perf" / "perf.yaml"):
            text = each.read_text("utf-8") if path.name.startswith("deploy") and each.is_file() else ""
            found = re.search(r"name: CONCURRENCY\w*\s+value: ['\"]?(\d+)", text)
            if found:
                return int(found[1])
    return None


def _replicas(data: Mapping[str, Any], component: str) -> int:
    """Return how many workers a component of Dynamo's graph has."""
    named = _at(data, "spec", "services") or {each.get("name"): each for each in _at(data, "spec", "components") or ()}
    return int(_at(named, component, "replicas") or 1)


def _at(data: Any, *keys: str) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def _yaml(path: Path) -> Mapping[str, Any]:
    """Return the last mapping of a YAML file; empty for another file."""
    try:
        found = list(yaml.load_all(path.read_text("utf-8"), FASTEST)) if path.suffix in (".yaml", ".yml") else []
    except yaml.YAMLError:
        return {}
    # In Dynamo's manifests the graph comes last, behind the ConfigMaps of its workers.
    return next((each for each in reversed(found) if isinstance(each, Mapping)), {})


def _shown(engine: Engine, command: ShellCommand) -> str:
    """Write a server's command, with the variables that graphs can depend on."""
    given = [f"{name}={value}" for name, value in command.variables.items() if name in engine.flags]
    return shlex.join([*given, *engine.programs[0].split(), *command.words])


def _where(path: Path, root: Path) -> str:
    return str(path.relative_to(root.parent))


def _line(error: CapturePlannerError) -> str:
    return str(error).split("\n", 1)[0]


# The page -----------------------------------------------------------------------------------------


def audit_report(rows: Sequence[AuditRow], files: Mapping[str, int]) -> Report:
    """Return the page about all folders."""
    sections = [_summary(rows, files)]
    for title, name, some, columns in (
        ("Decodes that may run eager", "eager", [row for row in rows if row.allowed], EAGER),
        ("Sizes captured and never reached", "sizes", [row for row in rows if row.unreached and row.load_known], SIZES),
        ("Refused, not emulated, or another program", "refused", [r for r in rows if r.outcome != ANALYSED], REASONS),
        ("All servers that are analysed", "all", [row for row in rows if row.outcome == ANALYSED], EVERY),
    ):
        sections.append(Section(name=name, title=title, parts=[_grid(some, columns)]))
    return Report(kind="audit", title="Audit of public configurations", sections=tuple(sections))


Column = Callable[[AuditRow], str]
_ASSUMED: Mapping[str, Column] = {
    "machine": lambda row: row.machine,
    "release": lambda row: "; ".join([f"{row.engine} {row.release}", *(f"read {each}" for each in row.read_as)]),
    "model facts": lambda row: row.model_facts,
    "load": lambda row: f"{row.load}; {'prompts and decodes' if row.work == 'both' else f'{row.work} worker'}",
}
_REACHED: Column = lambda row: (row.reached or "none") if row.load_known else "load not stated"  # noqa: E731
EAGER: Mapping[str, Column] = {
    "server": lambda row: row.where,
    "allowed": lambda row: row.allowed,
    "reached": _REACHED,
    **_ASSUMED,
    "command": lambda row: row.command,
}
SIZES: Mapping[str, Column] = {
    "server": lambda row: row.where,
    "listed": lambda row: str(row.listed),
    "captured": lambda row: str(row.sizes),
    "reached": lambda row: str(row.sizes - row.unreached),
    **_ASSUMED,
    "command": lambda row: row.command,
}
REASONS: Mapping[str, Column] = {
    "server": lambda row: row.where,
    "outcome": lambda row: row.outcome,
    "reason": lambda row: row.reason,
    "release": _ASSUMED["release"],
    "machine": _ASSUMED["machine"],
    "command": lambda row: row.command,
}
EVERY: Mapping[str, Column] = {
    "server": lambda row: row.where,
    "mode": lambda row: f"at most {row.mode}" if row.by_flags else row.mode,
    "graphs": lambda row: str(row.graphs),
    "allowed": lambda row: row.allowed or ("none" if row.graphs else "all: no graphs"),
    "reached": _REACHED,
    **_ASSUMED,
    "command": lambda row: row.command,
}


def _grid(rows: Iterable[AuditRow], columns: Mapping[str, Column]) -> Grid:
    cells = (
        (TonedText(say(row), "verbatim") if name == "command" else say(row) for name, say in columns.items())
        for row in rows
    )
    return Grid.of(tuple(columns), cells)


def _summary(rows: Sequence[AuditRow], files: Mapping[str, int]) -> Section:
    """Return the counts, a row for each folder."""
    parts: list[Part] = [
        "Allowed is a decode within a server's limits; reached is one that the stated load has, spread evenly over "
        "workers and ranks. What is only allowed costs nothing at that load.",
        Grid.of(("folder", *_COUNTS), ((name, *_counts(rows, name, count)) for name, count in files.items()), text=1),
    ]
    # Without the flag in front, servers with one reason count together.
    reasons = Counter(re.sub(r"^\S*: ", "", row.reason)[:110] for row in rows if row.outcome in (REFUSED, NOT_EMULATED))
    parts += [
        "",
        TonedText("Reasons", "strong"),
        Grid.of(("reason", "servers"), ((text, str(n)) for text, n in reasons.most_common(25)), text=1),
    ]
    unread = [f"{row.where}: {row.reason}" for row in rows if not row.outcome]
    return Section(name="summary", title="Summary", parts=[*parts, *noted(*unread)])


_COUNTS = (
    *("files", "servers", "of an emulated engine", "analysed", *OUTCOMES[1:], "capture graphs", "allow eager decodes"),
    *("of these reached", "of these load not stated", "sizes listed, median", "captured for decodes, median"),
    "of these reached, median",
)


def _counts(rows: Sequence[AuditRow], folder: str, files: int) -> Iterator[str]:
    # A row without outcome is a file that could not be read; the summary names it.
    own = [row for row in rows if row.where.startswith(f"{folder}/") and row.outcome]
    outcomes = Counter(row.outcome for row in own)
    emulated = len(own) - outcomes[OTHER]
    graphs = [row for row in own if row.graphs and row.work != "prefill"]
    allowed = [row for row in graphs if row.allowed]
    loaded = [row for row in graphs if row.load_known and row.sizes]
    yield from map(str, (files, len(own), emulated))
    yield f"{outcomes[ANALYSED]} ({percent(outcomes[ANALYSED] / emulated)})" if emulated else "0"
    yield from (str(outcomes[each]) for each in OUTCOMES[1:])
    yield from map(str, (len(graphs), len(allowed), sum(bool(row.reached) and row.load_known for row in allowed)))
    yield str(sum(not row.load_known for row in allowed))
    yield str(statistics.median(row.listed for row in loaded)) if loaded else ""
    yield str(statistics.median(row.sizes for row in loaded)) if loaded else ""
    yield str(statistics.median(row.sizes - row.unreached for row in loaded)) if loaded else ""


def markdown(report: Report) -> str:
    """Return a report as Markdown."""
    lines = [f"# {report.title}"]
    for section in report.sections:
        lines += ["", f"## {section.title}"]
        for part in section.parts:
            if isinstance(part, str):
                lines += ["", part]
                continue
            rows = [[_escaped(str(cell), tone=isinstance(cell, TonedText)) for cell in row] for row in part.rows]
            lines += ["", *(f"| {' | '.join(cells)} |" for cells in (part.columns, ["---"] * len(part.columns), *rows))]
    return "\n".join(lines) + "\n"


def _escaped(text: str, *, tone: bool) -> str:
    # A bar ends a cell even between backquotes; ``<`` begins a tag only outside of them.
    plain = " ".join(text.split()).replace("|", "\\|")
    return f"`{plain}`" if tone and plain else plain.replace("<", "&lt;")


# The command line ---------------------------------------------------------------------------------


def files_in(folder: Path) -> list[Path]:
    """Return the files of a folder that could describe a server, by name."""
    inside = (path for path in folder.rglob("*") if path.suffix in SUFFIXES or path.name.startswith("Dockerfile"))
    return sorted(path for path in inside if path.is_file() and ".git" not in path.parts)


def audit(
    folders: Sequence[Path],
    machine: str | None = None,
    concurrency: int | None = None,
    jobs: int = 1,
    limit: int | None = None,
) -> tuple[list[AuditRow], dict[str, int]]:
    """Return a row for each server in the folders, and how many files each folder has."""
    rows: list[AuditRow] = []
    counts: dict[str, int] = {}
    for folder in (each.resolve() for each in folders):
        files = files_in(folder)[:limit]
        counts[folder.name] = len(files)
        one = partial(audit_file, root=folder, machine=machine, concurrency=concurrency)
        with ProcessPoolExecutor(jobs) if jobs > 1 else _InProcess() as pool:
            # A few files at a time: fewer messages, and still no process that has much more left than the others.
            results = pool.map(one, files, chunksize=4)
            with click.progressbar(results, length=len(files), label=folder.name, file=sys.stderr) as shown:
                rows += [row for found in shown for row in found]
    return rows, counts


class _InProcess:
    """What a pool does, here."""

    def __enter__(self) -> _InProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(
        self, one: Callable[[Path], list[AuditRow]], files: Iterable[Path], chunksize: int
    ) -> Iterator[list[AuditRow]]:
        return map(one, files)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--machine", help="The machine of what states none.", choices=[*shipped_environments()])
    parser.add_argument("--concurrency", type=int, help="Requests at once of what states none.")
    parser.add_argument("--jobs", type=int, default=1, help="Processes; one by default.")
    parser.add_argument("--limit", type=int, help="Files of each folder, at most.")
    parser.add_argument("--format", choices=("markdown", "html", "json"), help="By default as the file's name says.")
    parser.add_argument("-o", "--output", type=Path, help="Where to write; else to standard output.")
    options = parser.parse_args(arguments)
    rows, counts = audit(options.folders, options.machine, options.concurrency, options.jobs, options.limit)
    form = options.format or {".html": "html", ".json": "json"}.get(getattr(options.output, "suffix", ""), "markdown")
    if form == "json":
        text = json.dumps({"files": counts, "rows": [attrs.asdict(row) for row in rows]}, indent=1) + "\n"
    else:
        report = audit_report(rows, counts)
        text = page(report) if form == "html" else markdown(report)
    if options.output is None:
        sys.stdout.write(text)
    else:
        codec.write(options.output, text)


if __name__ == "__main__":
    main()
