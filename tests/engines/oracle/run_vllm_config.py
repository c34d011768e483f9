"""Compare the emulation of vLLM's flags and configuration with the engine's own code.

    PYTHONPATH=tests python tests/engines/oracle/run_vllm_config.py --wheel WHEEL --count 20000 --seed 1

Every command line goes through vLLM's argument parser, its engine configuration, its choice of attention
backends and its mode resolution, and through ours; so do the models that are known by name, which vLLM is given
as folders. Prints how many were compared and every difference; exits with 1 where there is one.

Where vLLM refuses a line that the emulation accepts, that is a difference, unless the line has flags that
``engines.generators.vllm_ignored`` lists with a reason, and vLLM accepts the line without them and then answers
as the emulation does for the whole line. Those are counted by flag.

``--rows FILE`` compares rows of an audit (``tools/audit.py --format json``) instead: ``--count`` of those that capture
graphs and whose models are known by name.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from capture_planner.codec.shipped import find_environment, shipped_environments
from capture_planner.engines.checkpoints import known
from capture_planner.engines.shell import split_variables
from capture_planner.errors import FlagError, NotEmulated
from capture_planner.modes import GraphMode
from capture_planner.records.environment import Environment
from capture_planner_vllm.emulation.engine import resolve
from capture_planner_vllm.emulation.flags import read
from capture_planner_vllm.emulation.model import read_target
from capture_planner_vllm.emulation.releases import NEWEST, following, releases
from capture_planner_vllm.emulation.tables import flag_table
from engines.generators.vllm import Case, answer_of, cases, write_models
from engines.generators.vllm_directed import at_boundaries, directed
from engines.oracle.comparison import finish, options, oracle, release_in, say, sources
from engines.oracle.vllm_refusals import excused

VALUES = ("3", "x", "0.5", "auto", "", "None", '{"a": 1}', "1k", "2K", "1.5K", "-1", "[1, 2]", "a=b", "-0.5")


def main() -> int:
    """Compare, print, and return the exit status."""
    parser = options(__doc__, "vllm")
    parser.add_argument("--wild", type=float, default=0.01, help="chance of flags that vLLM refuses")
    parser.add_argument("--lines-only", action="store_true", help="leave the single flags and the known models out")
    parser.add_argument("--models-only", action="store_true", help="compare nothing but the known models")
    parser.add_argument("--rows", type=Path, help="compare nothing but rows of an audit, as JSON")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compare lines (default: 1)")
    arguments = parser.parse_args()
    module, wheel = oracle("vllm_config"), sources(arguments)
    engine = module.VllmOracle(wheel)
    arguments.release = release_in(wheel)
    release = arguments.release if arguments.release in releases() else NEWEST
    say(f"vLLM {arguments.release} against the emulation of {release}")
    with following(release):
        if arguments.rows is not None:
            return _audited(module, engine, arguments)
        return _compare(module, engine, wheel, arguments)


def _compare(module: ModuleType, engine: Any, wheel: Path, arguments: argparse.Namespace) -> int:
    """Compare while a release is followed, and return the exit status."""
    flags, differences = (0, 0) if arguments.lines_only or arguments.models_only else _parsers(module, engine, wheel)
    say(f"{flags} single flags parsed, {differences} differences")
    outcomes: collections.Counter[str] = collections.Counter()
    ignored: collections.Counter[str] = collections.Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        special = [] if arguments.models_only else [*at_boundaries(), *(case for case, _ in directed())]
        lines = (*special, *cases(arguments.count, arguments.seed, arguments.wild))
        for outcome, flag, difference in _every(module, engine, folder, lines, arguments.jobs):
            outcomes[outcome] += 1
            differences += bool(difference)
            if difference:
                say(difference)
            elif flag:
                ignored[flag] += 1
        models, wrong = (0, 0) if arguments.lines_only else _known_models(module, engine, folder)
        differences += wrong
    counts = {
        "single flags": flags,
        "known models": models,
        "directed lines": len(special),
        "command lines": arguments.count,
        **dict(outcomes.most_common()),
    }
    seconds = time.monotonic() - start
    return finish("vllm_config", arguments, counts, differences, seconds, dict(ignored.most_common()))


Comparison = tuple[str, str, str]
"""What ours is, the ignored flags to blame for a refusal, and what differs, each maybe nothing."""
_compare_case: list[Callable[[Case], Comparison]] = []
"""What a worker compares with: it inherits the engine, which cannot be sent to it."""


def _every(module: ModuleType, engine: Any, folder: Path, lines: Sequence[Case], jobs: int) -> Iterator[Comparison]:
    """Compare every line, in order; with several ``jobs`` each process has a folder of its own."""

    def start(number: int) -> None:
        place = folder / str(number)
        write_models(place)
        _compare_case[:] = [partial(_one, module, engine, place)]

    if jobs == 1:
        start(0)
        yield from map(_compare_case[0], lines)
        return
    with multiprocessing.get_context("fork").Pool(jobs, lambda: start(os.getpid())) as pool:
        yield from pool.imap(_asked, lines, chunksize=20)


def _asked(case: Case) -> Comparison:
    return _compare_case[0](case)


def _one(module: ModuleType, engine: Any, folder: Path, case: Case) -> Comparison:
    """Give one line to both."""
    command, environment = case.command_in(folder), find_environment(case.environment)
    variables = dict(case.variables)
    theirs: Any = engine.answer(command, environment, variables)
    ours = _ours([f"{name}={value}" for name, value in case.variables] + command, environment)
    refused = isinstance(theirs, module.EngineRefusal)
    flag = ""
    if refused and not isinstance(ours, FlagError):
        flag, theirs = excused(engine, command, environment, variables, theirs)
        refused = isinstance(theirs, module.EngineRefusal)
    difference = _difference(ours, theirs, refused)
    says = f"{case.data()}{f' without {flag}' if flag else ''}\n  {difference}" if difference else ""
    return _outcome(ours), flag, says


def _ours(words: list[str], environment: Environment) -> Any:
    """Return the emulation's answer, or its error."""
    try:
        return answer_of(resolve(words, environment)[0])
    except FlagError as error:
        return error


def _audited(module: ModuleType, engine: Any, arguments: argparse.Namespace) -> int:
    """Compare rows of an audit, print each, and return the exit status."""
    rows = [row for row in json.loads(arguments.rows.read_text())["rows"] if row["engine"] == "vllm" and row["graphs"]]
    lines = {tuple(shlex.split(row["command"])): row for row in rows}
    differences = compared = 0
    with tempfile.TemporaryDirectory() as place:
        for line in random.Random(arguments.seed).sample(sorted(lines), len(lines)):
            given, (_, _, *words) = split_variables(line)
            machine = lines[line]["machine"].partition(",")[0]
            names = [
                name for name in known() if any(re.search(rf"(?<![\w./-]){name}(?![\w./-])", word) for word in words)
            ]
            # Of a draft model as of the target vLLM needs the facts.
            asked = (
                json.loads(spec)["model"]
                if "--speculative-config" in words
                and "model" in (spec := words[words.index("--speculative-config") + 1])
                else words[0]
            )
            if (
                compared == arguments.count
                or words[0] not in names
                or asked not in names
                or machine not in shipped_environments()
            ):
                continue
            compared += 1
            # It asks for a tokenizer, which the folders have not, and decides no graph.
            at = words.index("--reasoning-parser") if "--reasoning-parser" in words else len(words)
            in_folders = [*words[:at], *words[at + 2 :]]
            for name in names:
                folder = _in_folder(Path(place), name)
                in_folders = [re.sub(rf"(?<![\w./-]){name}(?![\w./-])", folder, word) for word in in_folders]
            environment = find_environment(machine)
            theirs: Any = engine.answer(in_folders, environment, given)
            ours = _ours([*(f"{name}={value}" for name, value in given.items()), *words], environment)
            refused = isinstance(theirs, module.EngineRefusal)
            by_flags = read_target(words[0]).odd is not None
            difference = _beyond(ours, theirs, refused) if by_flags else _difference(ours, theirs, refused)
            differences += bool(difference)
            say(f"{lines[line]['where']} on {machine}: {difference or 'the same'}{' by the flags' * by_flags}")
    say(f"{compared} rows of {len(lines)} compared, {differences} differences")
    return int(differences > 0)


def _in_folder(place: Path, name: str) -> str:
    """Write a known model's facts as a folder, and return it."""
    folder = place / name
    if not folder.exists():
        folder.mkdir(parents=True)
        for file, content in _files(known()[name]).items():
            (folder / file).write_text(json.dumps(content))
    return str(folder)


def _known_models(module: ModuleType, engine: Any, folder: Path) -> tuple[int, int]:
    """Give vLLM each known model's facts as a folder; return how many command lines, and how many differ."""
    compared = differences = 0
    for name in known():
        place = _in_folder(folder, name)
        for machine in ("h100", "b200"):
            environment = find_environment(machine)
            for flags in ([], ["--no-enable-chunked-prefill"], ["-tp", "8"]):
                theirs: Any = engine.answer([place, *flags], environment, {})
                ours = _ours([name, *flags], environment)
                compared += 1
                refused = isinstance(theirs, module.EngineRefusal)
                by_flags = read_target(name).odd is not None
                difference = _beyond(ours, theirs, refused) if by_flags else _difference(ours, theirs, refused)
                if difference:
                    differences += 1
                    say(f"{name} {' '.join(flags)} on {machine}\n  {difference}")
    return compared, differences


def _beyond(ours: Any, theirs: Any, refused: bool) -> str:
    """Return where the answer that flags alone decide is no bound: other limits or sizes, or a mode below vLLM's."""
    # Whether vLLM takes the line depends on the model.
    if refused or isinstance(ours, FlagError):
        return _difference(ours, theirs, refused) if isinstance(ours, FlagError) else ""
    captures = theirs["mode"] != "NONE"
    names = ("max_num_seqs", "max_num_batched_tokens", *(("sizes", "max_size") if captures else ()))
    parts = [f"{name}: ours {ours[name]}, vLLM {theirs[name]}" for name in names if ours[name] != theirs[name]]
    modes = {name: GraphMode(answer["mode"]) for name, answer in (("ours", ours), ("vLLM", theirs))}
    return "; ".join([*parts, *([f"modes: {modes}"] if modes["ours"] < modes["vLLM"] else [])])


def _files(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the files of a folder with a known model's facts, and what vLLM or Transformers wants besides them."""
    config = {**facts, "torch_dtype": "bfloat16"}
    text = config
    if "text_config" in facts:
        text = config["text_config"] = dict(facts["text_config"])
    if "rope_scaling" in text:
        # The factors of frequencies are not kept: no rule reads them.
        ones = [1.0] * (text["hidden_size"] // text["num_attention_heads"] // 2)
        unread = {"short_factor": ones, "long_factor": ones, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        text["rope_scaling"] = {**unread, **text["rope_scaling"]}
    if "num_hidden_layers" in text and "layer_types" in text:
        # Only the kinds of layers are kept: no rule reads their order.
        text["layer_types"] = list(itertools.islice(itertools.cycle(text["layer_types"]), text["num_hidden_layers"]))
    quantized = config.get("quantization_config", {})
    # ModelOpt lists layers, which no rule reads, and wrote them to a file of its own once. NVFP4 has blocks of 16.
    layers: dict[str, Any] = {
        "exclude_modules": [],
        "quantized_layers": {"backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"}},
    }
    layers["group_size"] = 16
    if "quantization" in quantized:
        del config["quantization_config"]
        quantized = {**quantized, "quantization": {**layers, **quantized["quantization"]}}
        return {"config.json": config, "hf_quant_config.json": quantized}
    if quantized.get("quant_method") == "modelopt":
        config["quantization_config"] = {**layers, **quantized}
    return {"config.json": config}


def _parsers(module: ModuleType, engine: Any, wheel: Path) -> tuple[int, int]:
    """Give every flag in every spelling values of all kinds; return how many words, and how many differ.

    Not compared: the JSON flags, of which vLLM's parser checks parts without effect on graphs, and adapters.
    """
    compared = differences = 0
    for dest, entry in flag_table().items():
        if dest in ("config", "lora_modules") or entry["kind"].startswith("object"):
            continue
        names = [*entry["names"], *entry.get("no", ()), entry["names"][0][:-2], f"{entry['names'][0]}s"]
        given = [[], ["1", "2"], *([value] for value in (*VALUES, *map(str, entry.get("choices", ()))))]
        for name in names:
            for values in given:
                forms = [[name, *values]] + ([[f"{name}={values[0]}"]] if len(values) == 1 else [])
                for words in forms:
                    compared += 1
                    ours, theirs = _reads(words), _accepts(module, engine, wheel, words)
                    if ours != theirs:
                        differences += 1
                        say(f"{words}: {'ours' if ours else 'vLLM'} only reads it")
    return compared, differences


def _reads(words: list[str]) -> bool:
    try:
        read(["some/model", *words])
    except FlagError:
        return False
    return True


def _accepts(module: ModuleType, engine: Any, wheel: Path, words: list[str]) -> bool:
    try:
        with module.stubs.installed(wheel, "vllm"), contextlib.redirect_stderr(io.StringIO()):
            engine.parse(["some/model", *words])
    except (Exception, SystemExit):
        return False
    return True


def _outcome(ours: Any) -> str:
    if isinstance(ours, NotEmulated):
        return "not emulated"
    return "refused" if isinstance(ours, FlagError) else f"{ours['runner']} {ours['mode']}"


def _difference(ours: Any, theirs: Any, refused: bool) -> str:
    """Return what differs between our answer and the engine's, or nothing."""
    if isinstance(ours, NotEmulated):
        return ""
    if isinstance(ours, FlagError):
        return "" if refused else f"ours refuses: {ours}; vLLM: {theirs}"
    if refused:
        return f"vLLM refuses: {theirs.kind} {theirs.reason[:300]}; ours: {ours}"
    parts = [f"{name}: ours {ours[name]}, vLLM {theirs[name]}" for name in ours if ours[name] != theirs[name]]
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
