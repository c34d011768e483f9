"""The real SGLang on a GPU: does it run, and what does a plan change? JSON lines, written as they come.

    python benchmarks/sglang_in_process.py --steps try --output FOLDER
    python benchmarks/sglang_in_process.py --steps compare --attention fa3 --output FOLDER

``try`` starts SGLang step by step: with graphs, under a plan, then both with an EAGLE-3 drafter (K = 3), observed, and
with FlashAttention 3. A step that includes one that failed is not started, and none is once SGLang has failed before
the weights of its model were loaded. ``compare`` takes SGLang by itself and under a plan in turns, without and with
speculation, and measures tokens/s, time per output token, graphs, seconds and memory of the capture at 8, 64, 128 and
256 requests. The model has the shape of Qwen3-0.6B and random weights; acceptance is simulated. Each start is a
process of its own with a time limit; where one fails, the last lines of its log are in its result, and the next one
runs. FOLDER gets the JSON lines and the observations; logs are in the folder of ``--work``. A first start compiles
kernels with nvcc (7 to 9 s each).

SGLang's models import a kernel for SM100 that is written in NVIDIA's CUTLASS DSL, and its EAGLE worker imports FlashMLA
for latent attention. Where one is not installed, a stand-in lets them import it, and stops a start that would run a
kernel of it; the first line of the output says so.

SGLang 0.5.23 is importable, and the plugin is *installed*, as SGLang's scheduler finds it by its entry point. On a host
without network, bring the wheels of ``python tools/build.py`` (the core, ``engines/sglang``, ``backends/triton`` and
``backends/flash_attention``) with those of cattrs, ruamel.yaml, attrs and pluggy, then::

    python -m pip install --no-deps --no-index --target plugin wheels/*.whl
    export PYTHONPATH=$PWD/plugin:$PYTHONPATH
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from _model_configs import CONFIGS
from _standins import LIBRARIES, write_standins

ROOT = Path(__file__).resolve().parent.parent
LOADS = (8, 64, 128, 256)
MOST = max(LOADS)
PROMPT, OUTPUT = 128, 128
BACKENDS = {"triton": "triton", "fa3": "flash_attention"}
"""Our name of each of SGLang's attention backends."""

MODELS: Mapping[str, Mapping[str, Any]] = {
    "target": CONFIGS["small"] | {"dtype": "bfloat16"},
    "drafter": CONFIGS["small-drafter"] | {"dtype": "bfloat16"},
}

_CAPTURE = r"Capture (?P<name>[\w ]+?) \w+ graph "
_CAPTURED = re.compile(_CAPTURE + r"end\..*?elapsed=(?P<seconds>[\d.]+) s, mem usage=(?P<gib>-?[\d.]+) GB")
_LOADED = "Load weight end"
_SIZES = re.compile(_CAPTURE + r"(?:begin|end)\..*?\bbs=\[(?P<sizes>[\d, ]*)\]")


def spec_text(drafts: int, attention: str, graphs: int, tensor: int = 1) -> str:
    """Return the spec of the plan: decodes alone have graphs, ``graphs`` sizes for a role, half for draft decodes."""
    lines = [
        "version: 1",
        "model: {name: Qwen3-0.6B-shape, num_layers: 28, num_heads: 16, num_kv_heads: 8, head_dim: 128,",
        "        hidden_size: 1024, vocab_size: 151936, max_model_len: 40960}",
        f"limits: {{max_num_reqs: {MOST}, max_num_tokens: 8192}}",
        "mode: FULL_DECODE_ONLY",
        f"backend: {BACKENDS[attention]}",
        f"sizes: {{policy: minimax, graphs: {graphs}}}",
        f"parallel: {{tensor: {tensor}}}",
    ]
    if drafts:
        lines.append(f"speculative: {{method: eagle3, num_tokens: {drafts}, model: {{vocab_size: 32000}}}}")
        lines.append(f"roles: {{draft_decode: {{sizes: {{policy: minimax, graphs: {max(graphs // 2, 1)}}}}}}}")
    return "\n".join(lines) + "\n"


def write_plan(folder: Path, drafts: int, attention: str, graphs: int, environment: str, tensor: int = 1) -> Path:
    """Plan, and return the file."""
    from capture_planner import codec, load_backends, load_environment, plan

    spec, path = folder / f"spec-{drafts}-{attention}.yaml", folder / f"plan-{drafts}-{attention}.yaml"
    spec.write_text(spec_text(drafts, attention, graphs, tensor), encoding="utf-8")
    machine = load_environment(ROOT / "plans" / "environments" / f"{environment}.yaml")
    path.write_text(codec.dumps(plan(codec.load_spec(spec), machine, load_backends())), encoding="utf-8")
    return path


def command(folder: Path, drafts: int, attention: str, tensor: int = 1) -> list[str]:
    """Return SGLang's own words, the same with a plan and without."""
    words = {
        "model-path": folder / "target",
        "load-format": "dummy",
        "random-seed": 0,
        "attention-backend": attention,
        "sampling-backend": "pytorch",
        "context-length": 4096,
        "max-running-requests": MOST,
        "chunked-prefill-size": 8192,
        "max-prefill-tokens": 8192,
        "mem-fraction-static": 0.6,
        "log-level": "info",
        "cuda-graph-backend-prefill": "disabled",
        "tp-size": tensor,
    }
    if drafts:
        words |= {
            "speculative-algorithm": "EAGLE3",
            "speculative-draft-model-path": folder / "drafter",
            "speculative-num-steps": drafts,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": drafts + 1,
        }
    listed = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return [*listed, "--skip-tokenizer-init", "--disable-radix-cache"]


def generate(engine: Any, prompts: list[list[int]], output: int) -> tuple[float, int]:
    """Return the seconds and the generated tokens of all prompts together."""
    started = time.perf_counter()
    parameters = {"max_new_tokens": output, "temperature": 0, "ignore_eos": True}
    answers = engine.generate(input_ids=prompts, sampling_params=parameters)
    return time.perf_counter() - started, sum(answer["meta_info"]["completion_tokens"] for answer in answers)


def measure(options: Mapping[str, Any], result: Path) -> None:
    """Start SGLang in this process and its children, and write what was measured after each load."""
    import sglang  # type: ignore[import-not-found, unused-ignore]
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found, unused-ignore]

    words = list(options["command"])
    if options["plan"]:
        from capture_planner import load_plan
        from capture_planner_sglang.launch import launch

        words += launch(load_plan(options["plan"]), words).arguments
    started = time.perf_counter()
    engine = sglang.Engine(server_args=prepare_server_args(words))
    measured: dict[str, Any] = {"start_s": round(time.perf_counter() - started, 1), "words": words, "loads": {}}
    result.write_text(json.dumps(measured), encoding="utf-8")
    draw = random.Random(1)
    prompts = [[draw.randrange(1000) for _ in range(PROMPT)] for _ in range(max(options["loads"]))]
    generate(engine, prompts[:2], 16)  # the first steps compile kernels
    for load in options["loads"]:
        generate(engine, prompts[:load], 16)
        rounds = [generate(engine, prompts[:load], options["output"]) for _ in range(options["rounds"])]
        per_s = [tokens / seconds for seconds, tokens in rounds]
        measured["loads"][load] = {
            "tokens_per_s": [round(each) for each in per_s],
            "median_tokens_per_s": round(statistics.median(per_s)),
            "ms_per_output_token": round(load / statistics.median(per_s) * 1e3, 3),
        }
        result.write_text(json.dumps(measured), encoding="utf-8")
    engine.shutdown()


def captures(log: str) -> dict[str, Any]:
    """Return what SGLang's own log says of each capture: sizes, seconds, GiB."""
    found: dict[str, Any] = {}
    for match in _SIZES.finditer(log):
        sizes = [int(size) for size in match["sizes"].split(",") if size.strip()]
        found.setdefault(match["name"], {})["sizes"] = sizes
    for match in _CAPTURED.finditer(log):
        row = found.setdefault(match["name"], {})
        row |= {"seconds": float(match["seconds"]), "gib": float(match["gib"])}
    return found


def observed_steps(path: Path) -> dict[str, Any]:
    """Return, by role, the steps that ran, and how many of them without a graph; or why the file cannot be read."""
    from capture_planner.codec import load_observation
    from capture_planner.errors import CapturePlannerError

    try:
        roles = load_observation(path).roles
    except CapturePlannerError as error:
        return {"error": str(error)}
    return {
        role.role.value: {
            "graphs": len(role.graphs),
            "steps": role.steps,
            "eager": sum(each.steps for each in role.batches if each.graph is None),
        }
        for role in roles
    }


def run(name: str, options: Mapping[str, Any], folder: Path, output: Path, limit: float) -> dict[str, Any]:
    """Run one start in a process group of its own, and return its JSON line."""
    log_path, result = folder / f"{name}.log", folder / f"{name}.result.json"
    result.unlink(missing_ok=True)
    variables = {key: value for key, value in os.environ.items() if not key.startswith("CAPTURE_PLANNER_")}
    if options["drafts"]:
        variables["SGLANG_SIMULATE_ACC_LEN"] = str(1 + options["drafts"] / 2)
    if options["plan"]:
        variables["CAPTURE_PLANNER_PLAN"] = str(options["plan"])
    if options["observe"]:
        variables |= {"CAPTURE_PLANNER_OBSERVE": str(folder / name), "CAPTURE_PLANNER_OBSERVE_SECONDS": "5"}
    else:
        variables["CAPTURE_PLANNER_STRICT"] = "1"
    child = [sys.executable, __file__, "--child", json.dumps(options, default=str), "--result", str(result)]
    started = time.perf_counter()
    with log_path.open("wb") as log:
        process = subprocess.Popen(child, stdout=log, stderr=log, env=variables, start_new_session=True)
        try:
            code: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit:.0f} s"
        # SGLang's processes outlive a parent that fails.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = log_path.read_text("utf-8", errors="replace")
    line: dict[str, Any] = {"step": name, "ok": code == 0, "wall_s": round(time.perf_counter() - started, 1)}
    line |= {key: options[key] for key in ("drafts", "attention", "observe")} | {"plan": bool(options["plan"])}
    if result.exists():
        line |= json.loads(result.read_text("utf-8"))
    line["captures"] = captures(text)
    line["plugin"] = [each[-300:] for each in text.splitlines() if "capture_planner" in each][:20]
    for path in sorted((folder / name).glob("*.yaml")):
        line["observed"] = {"bytes": path.stat().st_size, "steps": observed_steps(path)}
        line.setdefault("workers", {})[path.name] = line["observed"]["steps"]
        shutil.copy(path, output / f"{name}.yaml" if options.get("tensor", 1) == 1 else output / f"{name}.{path.name}")
    if code != 0:
        line |= {"error": code, "weights_loaded": _LOADED in text, "log": text.splitlines()[-30:]}
    return line


def blocker(step: Mapping[str, Any], lines: list[dict[str, Any]]) -> str | None:
    """Return why a step would fail as an earlier one did: the start that failed is part of its own.

    A start that ran out of time is no reason: the kernels that it compiled are there now.
    """
    for line in lines:
        if "weights_loaded" not in line or isinstance(line["error"], str):
            continue
        if not line["weights_loaded"]:
            return f"{line['step']} failed before the weights were loaded, as every start would"
        if line["attention"] == step["attention"] and line["drafts"] <= step["drafts"] and not line["plan"]:
            return f"{line['step']} failed, which is part of this step"
    return None


def libraries(folder: Path) -> dict[str, str]:
    """Return what the children import by each name; for those that are absent, put stand-ins on their PYTHONPATH."""
    absent = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if absent:
        paths = [os.environ.get("PYTHONPATH"), str(write_standins(folder / "standins", absent))]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {name: "absent, replaced" if name in absent else "installed" for name in LIBRARIES}


def trials(folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Yield the steps of ``try``: name, options, time limit; the first of a kind compiles kernels."""
    small: dict[str, Any] = {"loads": (1, 16), "rounds": 1, "output": 32}
    for name, drafts, attention, planned, limit in (
        ("graphs-triton", 0, "triton", False, 240),
        ("plan-triton", 0, "triton", True, 120),
        ("eagle3-triton", 3, "triton", False, 180),
        ("plan-eagle3-triton", 3, "triton", True, 120),
        ("observed-eagle3-triton", 3, "triton", True, 120),
        ("graphs-fa3", 0, "fa3", False, 120),
        ("plan-eagle3-fa3", 3, "fa3", True, 120),
        ("eagle3-fa3", 3, "fa3", False, 120),
    ):
        measures = {**small, "observe": name.startswith("observed")}
        yield name, start(folder, arguments, drafts, attention, planned=planned, **measures), limit


def comparisons(folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Yield the starts of ``compare``: SGLang by itself and under a plan in turns, then observed."""
    loads: dict[str, Any] = {"loads": LOADS, "rounds": arguments.rounds, "output": OUTPUT}
    for turn in range(arguments.turns):
        for drafts in arguments.drafts:
            for planned in (False, True):
                name = f"{'plan' if planned else 'default'}-K{drafts}-{arguments.attention}-{turn}"
                yield name, start(folder, arguments, drafts, arguments.attention, planned=planned, **loads), 120
    for drafts in arguments.drafts:
        options = start(folder, arguments, drafts, arguments.attention, planned=True, observe=True, **loads)
        yield f"observed-K{drafts}-{arguments.attention}", options, 120


def start(
    folder: Path,
    arguments: argparse.Namespace,
    drafts: int,
    attention: str,
    *,
    planned: bool = False,
    observe: bool = False,
    **measures: Any,
) -> dict[str, Any]:
    """Return the options of one start."""
    machine, tensor = arguments.environment, arguments.tensor
    plan = write_plan(folder, drafts, attention, arguments.graphs, machine, tensor) if planned else None
    words = command(folder, drafts, attention, tensor)
    common = {"drafts": drafts, "attention": attention, "plan": plan, "observe": observe, "tensor": tensor}
    return common | {"command": words, **measures}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", choices=("try", "compare"), default="try")
    parser.add_argument("--only", help="run only the steps whose name contains this")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir(), "sglang-bench"), help="logs and models"
    )
    parser.add_argument("--attention", choices=tuple(BACKENDS), default="triton", help="compare: attention backend")
    parser.add_argument("--drafts", type=int, nargs="*", default=[0, 3], help="compare: K of each comparison")
    parser.add_argument("--turns", type=int, default=1, help="compare: how often both are started")
    parser.add_argument("--rounds", type=int, default=3, help="compare: how often each load is run")
    parser.add_argument("--graphs", type=int, default=16, help="sizes of the plan for each role")
    parser.add_argument("--environment", default="h200", help="the plan's machine, of plans/environments")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks, a GPU each")
    parser.add_argument("--seconds", type=float, default=570, help="no step starts that could end later than this")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure(arguments.child, arguments.result)
        return
    folder: Path = arguments.work
    folder.mkdir(parents=True, exist_ok=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, config in MODELS.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    end = time.monotonic() + arguments.seconds
    plugins = [point.value for point in metadata.entry_points(group="sglang.srt.plugins")]
    lines: list[dict[str, Any]] = []
    steps = trials if arguments.steps == "try" else comparisons
    with (arguments.output / f"{arguments.steps}.jsonl").open("a", encoding="utf-8") as written:

        def write(line: dict[str, Any]) -> None:
            lines.append(line)
            written.write(json.dumps(line, default=str) + "\n")
            written.flush()
            sys.stdout.write(f"{json.dumps({k: v for k, v in line.items() if k != 'words'}, default=str)}\n")
            sys.stdout.flush()

        write({"step": "installed", "ok": bool(plugins), "plugins": plugins, "libraries": libraries(folder)})
        for name, options, limit in steps(folder, arguments):
            if arguments.only and arguments.only not in name:
                continue
            left = end - time.monotonic()
            reason = blocker(options, lines) or (f"{left:.0f} s are left" if left < limit / 2 else None)
            if reason:
                write({"step": name, "ok": False, "error": f"not started: {reason}"})
            else:
                write(run(name, options, folder, arguments.output, min(limit, left)))


if __name__ == "__main__":
    main()
