"""Record vLLM's answers from its released wheel; FOLDER has the unpacked package, the wheel, or both.

    PYTHONPATH=tests python tests/engines/oracle/record_vllm.py FOLDER

Writes ``flags.json`` (the flags by name and kind) and ``names.json`` (the names of JSON fields, backends and
models) of engines/vllm, and ``golden/vllm_config.json``: command lines with the answers of the engine's own code.
Of an older release than the newest that is followed, only the difference is written, to ``releases.json``.
Where vLLM refuses a line over flags that the emulation ignores, its answer without them is recorded too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from capture_planner_vllm.emulation import tables
from capture_planner_vllm.emulation.releases import NEWEST, differences, following, releases
from capture_planner_vllm.emulation.tables import flag_table
from engines.oracle.comparison import release_in, sources
from support.files import module_at

HERE = Path(__file__).parent
FLAGS = HERE.parents[2] / "engines" / "vllm" / "src" / "capture_planner_vllm" / "emulation" / "flags.json"
NAMES, RELEASES = FLAGS.with_name("names.json"), FLAGS.with_name("releases.json")
GOLDEN = HERE.parent / "golden" / "vllm_config.json"
KINDS = {
    "str": "text",
    "loads": "json",
    "human_readable_int": "count",
    "human_readable_int_or_auto": "length",
    "parse_dataclass": "object",
    "union_dict_and_str": "text",
    "parse_reasoning_parser": "text",
    "<lambda>": "text",
}


def _kind(function: Any) -> str:
    if function is None:
        return "text"
    name = function.__qualname__.rpartition(".")[2]
    if name in ("_optional_type", "_parse_type"):
        inner = _kind(function.__closure__[0].cell_contents)
        return f"{inner}?" if name == "_optional_type" else inner
    return KINDS.get(name, name)


def _record(action: argparse.Action) -> dict[str, Any]:
    positive = getattr(action, "negative_option_strings", None)
    entry: dict[str, Any] = {"names": list(action.option_strings)}
    shape = type(action).__name__
    if positive is not None:
        everything = [*action.container._option_string_actions] if hasattr(action, "container") else []
        mine = [name for name in everything if action.container._option_string_actions[name] is action]
        entry["names"] = [name for name in mine if name not in positive]
        entry["no"] = [name for name in mine if name in positive]
        entry["kind"] = "switch"
        return entry
    if shape == "BooleanOptionalAction":
        # Before 0.33 a switch has one negative name, Python's own.
        entry["no"] = [name for name in entry["names"] if name.startswith("--no-")]
        entry["names"] = [name for name in entry["names"] if name not in entry["no"]]
        entry["kind"] = "switch"
        return entry
    if shape == "_StoreTrueAction":
        entry["kind"] = "on"
        return entry
    entry["kind"] = _kind(action.type)
    if shape == "_AppendAction":
        entry["append"] = True
    if action.nargs is not None:
        entry["nargs"] = action.nargs
    if action.choices:
        entry["choices"] = [choice for choice in action.choices if choice is not None]
        if action.type is not None and "<lambda>" in action.type.__qualname__:
            entry["kind"] = "name"
    return entry


def flags_of(oracle: Any) -> dict[str, Any]:
    """Return the names and kinds of all flags of ``vllm serve``."""
    actions = oracle.serve._actions
    return {each.dest: _record(each) for each in actions if each.option_strings and each.dest != "help"}


def write_rows(file: Path, rows: dict[str, Any]) -> None:
    """Write a JSON object, one of its fields to a line."""
    lines = [f'"{name}": {json.dumps(value)}' for name, value in rows.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.stdout.write(f"{file.name}: {len(lines)} rows\n")


def _quantization() -> dict[str, list[str]]:
    """Return the methods of quantization, with the least capability and the dtypes of each."""
    import inspect

    import vllm.model_executor.layers.quantization as quantization

    methods = list(quantization.QUANTIZATION_METHODS)
    capabilities, dtypes = [], []
    for name in methods:
        kind = quantization.get_quantization_config(name)
        capabilities.append(str(kind.get_min_capability()))
        bound = inspect.getattr_static(kind, "get_supported_act_dtypes")
        alone = isinstance(bound, classmethod | staticmethod)
        supported = kind.get_supported_act_dtypes(*([] if alone else [object.__new__(kind)]))
        dtypes.append(" ".join(str(dtype).removeprefix("torch.") for dtype in supported))
    return {
        "quantization": methods,
        "quantization_capability": capabilities,
        "quantization_dtypes": dtypes,
        "deprecated_quantization": list(quantization.DEPRECATED_QUANTIZATION_METHODS),
    }


def names_of(wheel: Path) -> dict[str, list[str]]:
    """Return the names that JSON flags and settings may hold: fields, methods, backends, architectures."""
    import dataclasses
    from typing import get_args

    from vllm.config import AttentionConfig, CompilationConfig, SpeculativeConfig, cache, speculative, vllm
    from vllm.config.compilation import PassConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.model_executor.models import registry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def fields(kind: Any) -> list[str]:
        return [field.name for field in dataclasses.fields(kind) if field.init]

    return {
        "compilation_config": fields(CompilationConfig),
        "pass_config": fields(PassConfig),
        "attention_config": fields(AttentionConfig),
        "speculative_config": fields(SpeculativeConfig),
        "attention_ops": list(CompilationConfig._attention_ops),
        "backends": list(AttentionBackendEnum.__members__),
        "methods": [name for part in get_args(speculative.SpeculativeMethod) for name in _flat(part)],
        "mtp_types": list(get_args(speculative.MTPModelTypes)),
        "breakable_architectures": sorted(vllm.DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES),
        "drafts": sorted(registry._SPECULATIVE_DECODING_MODELS),
        "connectors": list(KVConnectorFactory._registry),
        "cache_dtypes": list(get_args(cache.CacheDType)),
        **_quantization(),
        **module_at(HERE / "vllm_architectures.py").architectures(wheel),
    }


def record_older(release: str, newer: str, flags: dict[str, Any], names: dict[str, list[str]]) -> None:
    """Write what an older release has otherwise than ``newer``; the rules that it lacks stay as they are."""
    with following(newer):
        newer_flags, newer_names = flag_table(), tables.names()
    negatives = (
        "--no-" if all(name.startswith("--no-") for each in flags.values() for name in each.get("no", ())) else ""
    )
    differing = {
        dest: flags.get(dest)
        for dest in (newer_flags | flags)
        if flags.get(dest) != tables.with_negatives(newer_flags.get(dest) or {}, negatives)
    }
    changes = {
        kind: {
            "without": [name for name in newer_names[kind] if name not in present],
            "with": [name for name in present if name not in newer_names[kind]],
        }
        for kind, present in names.items()
        if present != newer_names[kind]
    }
    rows = dict(differences())
    lacks = rows.get(release, {}).get("lacks", {})
    rows[release] = {"lacks": lacks, "negatives": negatives, "flags": differing, "names": changes}
    write_releases(dict(sorted(rows.items(), key=lambda row: _number(row[0]), reverse=True)))


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def write_releases(rows: dict[str, Any]) -> None:
    """Write ``releases.json``, each rule, flag and list of names on a line of its own."""
    releases_ = []
    for release, content in rows.items():
        parts = [f'  "negatives": {json.dumps(content["negatives"])}']
        for kind in ("lacks", "flags", "names"):
            lines = ",\n".join(f'   "{name}": {json.dumps(value)}' for name, value in content[kind].items())
            parts.append(f'  "{kind}": {{\n{lines}\n  }}')
        releases_.append(f' "{release}": {{\n' + ",\n".join(parts) + "\n }")
    RELEASES.write_text("{\n" + ",\n".join(releases_) + "\n}\n")
    sys.stdout.write(f"{RELEASES.name}: {', '.join(rows)}\n")


def _flat(part: Any) -> list[str]:
    from typing import get_args

    return [part] if isinstance(part, str) else [name for inner in get_args(part) for name in _flat(inner)]


def record_configurations(module: Any, oracle: Any, file: Path, count: int, seed: int, *, older: bool = False) -> None:
    """Write ``count`` command lines with the engine's answers; ``older``: those that the newest answers otherwise."""
    from capture_planner.codec.shipped import find_environment
    from engines.generators import vllm
    from engines.oracle.vllm_refusals import excused

    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        vllm.write_models(Path(folder))
        for case in vllm.cases(count, seed, wild=0.01):
            command, environment = case.command_in(Path(folder)), find_environment(case.environment)
            variables = dict(case.variables)
            answer = oracle.answer(command, environment, variables)
            if isinstance(answer, module.EngineRefusal):
                flags, without = excused(oracle, command, environment, variables, answer)
                answer = {"refused": answer.kind} | ({"ignored": flags, "without": without} if flags else {})
            if not older or _differs(vllm, case, command, environment, answer):
                cases.append({**case.data(), "answer": answer})
    file.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    file.write_text(f"[\n{lines}\n]\n")
    refused = sum("refused" in case["answer"] for case in cases)
    sys.stdout.write(f"{file.name}: {len(cases)} command lines, {refused} refused\n")


def _differs(vllm: Any, case: Any, command: list[str], environment: Any, answer: dict[str, Any]) -> bool:
    """Say whether the emulation of the newest release answers a line otherwise."""
    from capture_planner.errors import FlagError
    from capture_planner_vllm.emulation.engine import resolve

    try:
        ours = vllm.answer_of(resolve([f"{n}={v}" for n, v in case.variables] + command, environment)[0])
    except FlagError:
        return "refused" not in answer
    answer = answer.get("without", answer)
    return any(ours[name] != answer.get(name) for name in ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, metavar="FOLDER")
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=33)
    parser.add_argument("--flags-only", action="store_true")
    parser.set_defaults(package="vllm")
    options = parser.parse_args()
    options.wheel = sources(options)
    module = module_at(HERE / "vllm_config.py")
    oracle = module.VllmOracle(options.wheel)
    flags = flags_of(oracle)
    with module.stubs.installed(options.wheel, "vllm"):
        release, names = release_in(options.wheel), names_of(options.wheel)
    if release != NEWEST:
        newer = min((each for each in releases() if _number(each) > _number(release)), key=_number)
        record_older(release, newer, flags, names)
        if not options.flags_only:
            file = GOLDEN.with_name(f"vllm_config-{release}.json")
            record_configurations(module, oracle, file, options.count, options.seed, older=True)
        return
    write_rows(FLAGS, flags)
    write_rows(NAMES, names)
    if not options.flags_only:
        record_configurations(module, oracle, GOLDEN, options.count, options.seed)


if __name__ == "__main__":
    main()
