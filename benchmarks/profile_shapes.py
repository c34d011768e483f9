"""Profiles of three shapes on this machine's GPU, as they ship in plans/profiles: random weights, bfloat16.

Qwen3-0.6B with an EAGLE-3 head and K = 3, Qwen3-8B, and Qwen3-30B-A3B, a mixture of 128 experts. Each is measured by
``capture-planner profile`` in a process of its own: one that takes too long is interrupted, and writes what it has;
one that breaks costs none of the others. A profile is written as soon as it is measured. With ``--captures`` a plan of
other sizes is captured then, in a process of its own, and its memory and time are compared with what the profile
predicts for it (``captures.DEVICE.json``).

Needs a CUDA GPU with 80 GB of free memory for the mixture of experts; ``--moe-layers`` takes fewer of its 48 layers,
which the model's name in the profile says.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

import attrs
from _bench import CONSOLE, RESULTS, ROOT, parser, provenance
from _model_configs import CONFIGS, mixture

from capture_planner import codec
from capture_planner.errors import CapturePlannerError
from capture_planner.measuring.fits import predict
from capture_planner.modes import GraphMode
from capture_planner.records._base import replace
from capture_planner.records.model import DataType, DraftModel, Method, Model, Speculative
from capture_planner.records.spec import Limits, Policy, Sizes, Spec

LENGTH = 4096
CAPTURED = 12
"""Sizes of each ladder of the plan that is captured."""

GRACE = 30.0
"""Seconds that an interrupted process has to write what it measured."""


@attrs.frozen(kw_only=True)
class ProfiledShape:
    """A model that is profiled: its configuration, and its spec."""

    name: str
    config: dict[str, Any]
    spec: Spec


def profiled_shapes(backend: str, moe_layers: int) -> tuple[ProfiledShape, ...]:
    """Return the three shapes."""
    eagle = Speculative(method=Method.EAGLE3, num_tokens=3, model=DraftModel(vocab_size=32000))
    moe = mixture(moe_layers)
    cut = "" if moe_layers == 48 else f" {moe_layers} of 48 layers"
    shapes = (
        ("qwen3-0.6b-eagle3", "Qwen/Qwen3-0.6B", CONFIGS["small"], eagle),
        ("qwen3-8b", "Qwen/Qwen3-8B", CONFIGS["large"], None),
        ("qwen3-30b-a3b", f"Qwen/Qwen3-30B-A3B{cut}", moe, None),
    )
    return tuple(
        ProfiledShape(name=name, config=config, spec=_spec(model, config, speculative, backend))
        for name, model, config, speculative in shapes
    )


def _spec(name: str, config: dict[str, Any], speculative: Speculative | None, backend: str) -> Spec:
    model = Model(
        name=name,
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_model_len=LENGTH,
        dtype=DataType.BFLOAT16,
    )
    return Spec(
        model=model,
        limits=Limits(max_num_reqs=256, max_num_tokens=8192),
        mode=GraphMode.FULL_AND_PIECEWISE,
        backend=backend,
        speculative=speculative,
    )


def measure(shape: ProfiledShape, folder: Path, output: Path, *, seconds: float, timeout: float) -> int:
    """Profile one shape into ``output``, a file; return the command's exit code, -9 where it had to be killed."""
    config, spec = folder / shape.name, folder / f"{shape.name}.yaml"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(shape.config), encoding="utf-8")
    codec.write(spec, codec.dumps(shape.spec))
    words = ["profile", str(spec), "--model", str(config), "--seconds", f"{seconds:g}", "-o", str(output)]
    process = subprocess.Popen([sys.executable, "-m", "capture_planner.cli", *words], cwd=ROOT)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def compare(shape: ProfiledShape, folder: Path, profile: Path, timeout: float) -> dict[str, Any]:
    """Capture a plan of other sizes than the profile's; return what its capture took, and what was predicted.

    Raises ``subprocess.SubprocessError`` where a command fails or takes too long.
    """
    names = ("captured.yaml", "machine.yaml", "plan.yaml", "bench.json")
    spec, machine, plan, record = (folder / f"{shape.name}-{name}" for name in names)
    sizes = Sizes(policy=Policy.MINIMAX, graphs=CAPTURED)
    codec.write(spec, codec.dumps(replace(shape.spec, sizes=sizes)))
    words = ["bench", str(plan), "--model", str(folder / shape.name), "--only", "capture", "--quick"]
    commands = (["environment", "-o", str(machine)], ["plan", str(spec), "-e", str(machine), "-o", str(plan)])
    for command in (*commands, [*words, "--output", str(record)]):
        subprocess.run([sys.executable, "-m", "capture_planner.cli", *command], cwd=ROOT, timeout=timeout, check=True)
    predicted = predict(codec.load_profile(profile), codec.load_plan(plan))
    figure = json.loads(record.read_text(encoding="utf-8"))["capture"]
    # What the driver took for the first capture it keeps for others; a start is a first capture.
    captured = (figure["ours"]["pool"] + figure["first_driver"]) / (1 << 20)
    # Profiles leave compiling out, and a start that finds the kernels in the cache does not compile.
    seconds = figure["first_seconds"] - figure["first_compiled"]
    return {
        "graphs": figure["graphs"],
        "memory_mib": captured,
        "driver_mib": figure["first_driver"] / (1 << 20),
        "predicted_mib": predicted.memory_mib,
        "memory_off": predicted.memory_mib / captured - 1,
        "seconds": seconds,
        "compiling_seconds": figure["first_compiled"],
        "warm_seconds": figure["ours"]["seconds"],
        "predicted_seconds": predicted.seconds,
        "seconds_off": predicted.seconds / seconds - 1,
    }


def main() -> int:
    """Profile the shapes, one after the other; 1 where one is not there in the end."""
    arguments = parser(__doc__)
    arguments.add_argument("--backend", default="triton", help="attention backend of every role (default: triton)")
    arguments.add_argument("--only", nargs="+", help="names of the shapes to profile; default: all three")
    arguments.add_argument("--seconds", type=float, default=40.0, help="time for measuring each (default: 40)")
    arguments.add_argument("--timeout", type=float, default=90.0, help="after which one is interrupted (default: 90)")
    arguments.add_argument("--moe-layers", type=int, default=48, help="layers of the mixture of experts (default: 48)")
    arguments.add_argument("--device", default="h200", help="the end of the names of the files (default: h200)")
    arguments.add_argument("--captures", action="store_true", help="compare predicted with captured memory and time")
    options = arguments.parse_args()
    target: Path = (options.output or RESULTS).resolve()
    target.mkdir(parents=True, exist_ok=True)
    failed, captures = [], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for shape in profiled_shapes(options.backend, options.moe_layers):
            if options.only and shape.name not in options.only:
                continue
            output = target / f"{shape.name}.{options.device}.yaml"
            CONSOLE.rule(shape.name)
            started = monotonic()
            code = measure(shape, Path(folder), output, seconds=options.seconds, timeout=options.timeout)
            done = output.is_file()
            CONSOLE.print(f"{shape.name}: exit code {code} after {monotonic() - started:.0f} s, {output.name}: {done}")
            failed += [] if done else [shape.name]
            if done and options.captures:
                try:
                    captures[shape.name] = compare(shape, Path(folder), output, options.timeout)
                except (subprocess.SubprocessError, CapturePlannerError, OSError) as error:
                    captures[shape.name] = {"error": str(error)}
                CONSOLE.print(shape.name, captures[shape.name])
                report = {"provenance": provenance(), "results": captures}
                (target / f"captures.{options.device}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    CONSOLE.print(f"not profiled: {', '.join(failed)}" if failed else "all profiled")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
