"""SGLang under requests that keep arriving, without a drafter: by itself, under a list by hand, and tuned.

As vllm_arriving.py: the first engine is observed, ``capture-planner tune`` makes a plan of that one observation, and
the three serve a wave of requests and a fixed number of them by turns. The model has the shape of Qwen3-0.6B and random
weights. Prompts have no graphs (``--cuda-graph-backend-prefill disabled``): in SGLang their sizes are flags, and the
plan's decodes are what is compared. A step is counted as the scheduler counts it; its mean time is that of the load by
the steps of the target. A wave goes by seconds.

Engines start one after another. Needs a CUDA GPU, SGLang 0.5.23, and the plugin *installed*, as SGLang's scheduler
finds it by its entry point. On a host without network, bring the wheels of ``python tools/build.py`` (the core,
``engines/sglang``, ``backends/triton`` and ``backends/flash_attention``) with those of cattrs, ruamel.yaml, attrs and
pluggy, then::

    python -m pip install --no-deps --no-index --target plugin wheels/*.whl
    export PYTHONPATH=$PWD/plugin:$PYTHONPATH

SGLang's models import a kernel for SM100 that is written in NVIDIA's CUTLASS DSL, and its EAGLE worker imports FlashMLA
for latent attention. Where one is not installed, a stand-in (``_standins.py``) lets them import it, and stops a start
that would run a kernel of it; the first line of the output says so.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _arriving_rounds import EXPERT, ITSELF, TUNED, Group, Rig, command_line, run, without_drafter
from _bench import CONSOLE, ROOT
from _model_configs import SHAPES, write_config
from _standins import LIBRARIES, write_standins

from capture_planner import codec, load_backends, load_environment
from capture_planner.modes import GraphMode
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner.records.spec import Policy, Roles, Sizes

WORKER = Path(__file__).with_name("_sglang_arriving_worker.py")
NAME = "sglang-0.6b-0"
BACKENDS = {"triton": "triton", "fa3": "flash_attention"}
"""Our name of each of SGLang's attention backends."""


def words_of(folder: Path, attention: str, tokens: int) -> list[str]:
    """Return SGLang's own words, the same with a plan and without; ``folder`` has the model.

    :param tokens: of the KV cache: given, so that three engines have the same on one GPU.
    """
    words = {
        "model-path": folder / "small",
        "load-format": "dummy",
        "random-seed": 0,
        "attention-backend": attention,
        "sampling-backend": "pytorch",
        "context-length": 4096,
        "max-running-requests": 256,
        "chunked-prefill-size": 8192,
        "max-prefill-tokens": 8192,
        "mem-fraction-static": 0.25,
        "log-level": "info",
        "cuda-graph-backend-prefill": "disabled",
        "tp-size": 1,
        "max-total-tokens": tokens,
    }
    listed = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return [*listed, "--skip-tokenizer-init", "--disable-radix-cache"]


def libraries(folder: Path) -> dict[str, str]:
    """Return what the children import by each name; for those that are absent, put stand-ins on their PYTHONPATH."""
    absent = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if absent:
        paths = [os.environ.get("PYTHONPATH"), str(write_standins(folder / "standins", absent))]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {name: "absent, replaced" if name in absent else "installed" for name in LIBRARIES}


def decodes_of_expert(file: Path, backend: str) -> Plan:
    """Return the plan of such a list with its decodes alone, without a drafter, for one of our backends."""
    spec = without_drafter(codec.load_spec(file))
    sizes = Sizes(policy=Policy.EXPLICIT, num_reqs=spec.sizes.num_reqs)
    spec = replace(spec, mode=GraphMode.FULL_DECODE_ONLY, sizes=sizes, backend=backend, roles=Roles())
    return make_plan(spec, load_environment(ROOT / "plans" / "environments" / "h200.yaml"), load_backends())


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit code 1 where a target is missed."""
    options = command_line(__doc__)
    options.add_argument("--attention", choices=tuple(BACKENDS), default="triton")
    options.add_argument("--tokens", type=int, default=100_000, help="of each engine's KV cache")
    options.add_argument("--wave-seconds", type=float, default=6.0, help="period of the wave")
    arguments = options.parse_args(words)
    scale, expert, attention = arguments.scale, arguments.expert, arguments.attention
    group = Group(
        name=NAME,
        loads=(
            {"wave": [10, 250], "seconds": arguments.wave_seconds, "requests": round(900 * scale)},
            {"in_flight": 200, "requests": round(400 * scale)},
            {"in_flight": 32, "requests": round(100 * scale)},
        ),
        columns=(ITSELF, EXPERT, TUNED),
    )

    def rig_in(folder: Path) -> Rig:
        write_config(folder / "small", SHAPES["0.6b"][0])
        CONSOLE.print(libraries(folder))

        def engine(group: Group, place: Path) -> Mapping[str, Any]:
            return {"words": words_of(folder, attention, arguments.tokens)}

        return Rig(
            worker=WORKER,
            arguments=engine,
            expert=None if expert is None else lambda group: decodes_of_expert(expert, BACKENDS[attention]),
            together=False,
        )

    return run(arguments, [group], rig_in)


if __name__ == "__main__":
    sys.exit(main())
