"""Compare the emulation of vLLM's flags and configuration with the engine's own code.

    python benchmarks/oracle_vllm_config.py --wheel WHEEL --count 20000 --seed 1

Every command line goes through vLLM's argument parser, its engine
configuration, its choice of attention backends and its mode resolution, and through ours; so do the models that
are known by name, which vLLM is given as folders. Prints how many were compared and every difference; exits 1
where there is one.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from _oracle import ended, options, oracle, say, sources

from capture_planner.codec.shipped import find_environment
from capture_planner.engines.checkpoints import known
from capture_planner.errors import FlagError, NotEmulated
from capture_planner_vllm import resolve
from capture_planner_vllm.flags import read, table
from engines.generators.vllm import answer_of, cases, write_models
from engines.generators.vllm_directed import directed

VALUES = ("3", "x", "0.5", "auto", "", "None", '{"a": 1}', "1k", "2K", "1.5K", "-1", "[1, 2]", "a=b", "-0.5")


def main() -> int:
    """Compare, print, and return the exit status."""
    made = options(__doc__, "vllm")
    made.add_argument(
        "--wild", type=float, default=0.01, help="how readily flags are drawn that vLLM refuses"
    )
    made.add_argument("--lines-only", action="store_true", help="leave the single flags out")
    arguments = made.parse_args()
    module, wheel = oracle("vllm_config"), sources(arguments)
    engine = module.VllmOracle(wheel)
    flags, differences = (0, 0) if arguments.lines_only else _parsers(module, engine, wheel)
    say(f"{flags} single flags parsed, {differences} differences")
    outcomes: collections.Counter[str] = collections.Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_models(folder)
        special = [case for case, _ in directed()]
        for case in (*special, *cases(arguments.count, arguments.seed, arguments.wild)):
            command, environment = case.command_in(folder), find_environment(case.environment)
            theirs: Any = engine.answer(command, environment, dict(case.variables))
            words = [f"{name}={value}" for name, value in case.variables] + command
            try:
                ours: Any = answer_of(resolve(words, environment)[0])
            except FlagError as error:
                ours = error
            found = _difference(ours, theirs, isinstance(theirs, module.Refused))
            outcomes[_outcome(ours)] += 1
            if found:
                differences += 1
                say(f"{case.data()}\n  {found}")
        models, wrong = _known_models(module, engine, folder)
        differences += wrong
    counts = {
        "single flags": flags,
        "known models": models,
        "directed lines": len(special),
        "command lines": arguments.count,
        **dict(outcomes.most_common()),
    }
    return ended(arguments, counts, differences, time.monotonic() - start)


def _known_models(module: ModuleType, engine: Any, folder: Path) -> tuple[int, int]:
    """Give vLLM each known model's facts as a folder; return how many command lines, and how many differ."""
    compared = differences = 0
    for name, facts in known().items():
        config = dict(facts)
        if "rope_scaling" in config:
            # The factors of a long rope are not kept: no rule reads them, but Transformers wants them.
            ones = [1.0] * (config["hidden_size"] // config["num_attention_heads"] // 2)
            config["rope_scaling"] = {**config["rope_scaling"], "short_factor": ones, "long_factor": ones}
        place = folder / name
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
        for machine in ("h100", "b200"):
            environment = find_environment(machine)
            for flags in ([], ["--no-enable-chunked-prefill"], ["-tp", "8"]):
                theirs: Any = engine.answer([str(place), *flags], environment, {})
                try:
                    ours: Any = answer_of(resolve([name, *flags], environment)[0])
                except FlagError as error:
                    ours = error
                compared += 1
                found = _difference(ours, theirs, isinstance(theirs, module.Refused))
                if found:
                    differences += 1
                    say(f"{name} {' '.join(flags)} on {machine}\n  {found}")
    return compared, differences


def _parsers(module: ModuleType, engine: Any, wheel: Path) -> tuple[int, int]:
    """Give every flag in every spelling values of all kinds; return how many words, and how many differ.

    Left out are what vLLM checks inside JSON of flags that have no bearing on graphs, and in adapters.
    """
    compared = differences = 0
    for dest, entry in table().items():
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
