"""Random and mutated inputs that are no documents, through what reads them.

Model folders (into ``run`` and the engines), plugins, traces, prompts with their tokenizers, plans with control
characters in their texts, outputs, and what ``traffic`` reads, which may take no more time than its bytes. Every
input is made from ``--seed`` and its index alone. Only ``CapturePlannerError`` may be raised; nothing may be opened
outside of the input's folder but installed code, no program started and no connection made, which audit hooks watch;
no control character may be printed; and a model folder whose index leaves it must be refused. Exit code 1 on any
violation, each with the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import random
import re
import shutil
import site
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import _fuzz_inputs as make
import _fuzz_logs
import attrs
import safetensors.torch
import torch
from _bench import ROOT, seeded
from _fuzz_uses import BrokenLawError, Outcome, guarded, limit, memory
from fuzz_documents import options, run

from capture_planner import cli, codec
from capture_planner.codec.shipped import find_environment
from capture_planner.engines import emulate, load_engines
from capture_planner.errors import CapturePlannerError, PluginWarning
from capture_planner.planning.from_config import spec_from_config
from capture_planner.planning.planner import plan
from capture_planner.plugins.registry import load_backends
from capture_planner.records._base import replace
from capture_planner.records.environment import Environment
from capture_planner.records.model import DataType, Method, Model, Speculative
from capture_planner.records.spec import Limits, Spec
from capture_planner.report.plans import backend_support
from capture_planner_runner.models.drafters import load_drafter
from capture_planner_runner.models.huggingface import HuggingFaceModel, load_target
from capture_planner_runner.serving.workload import from_prompts, from_trace

SECONDS, SECONDS_PER_BYTE = 0.5, 10e-6
"""Most processor time that ``traffic`` may take, of its own and for each byte of a source."""

SHAPE = Model(
    name="tiny",
    num_layers=make.NUMBERS["num_hidden_layers"],
    num_heads=make.NUMBERS["num_attention_heads"],
    num_kv_heads=make.NUMBERS["num_key_value_heads"],
    head_dim=make.NUMBERS["head_dim"],
    max_model_len=make.NUMBERS["max_position_embeddings"],
    hidden_size=make.NUMBERS["hidden_size"],
    vocab_size=make.NUMBERS["vocab_size"],
    dtype=DataType.FLOAT32,
)
SPEC = Spec(model=SHAPE, limits=Limits(max_num_reqs=4, max_num_tokens=16), backend="reference")
CPU = torch.device("cpu")

PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "socket.getaddrinfo")
# Folders that pip --target filled are on the path alone.
_INSTALLED = [*site.getsitepackages(), *(each for each in sys.path if each and any(Path(each).glob("*.dist-info")))]
_CODE = tuple({os.path.realpath(str(each)) for each in (ROOT, sys.prefix, sys.base_prefix, *_INSTALLED)})
_DEVICES = ("/dev/null", "/dev/full", "/proc/self/", f"/proc/{os.getpid()}/", "/sys/")
_SYSTEM = (*_DEVICES, "/etc/localtime", "/usr/share/zoneinfo")


@attrs.define
class Watch:
    """What this process opened and started while an input was used."""

    folder: str | None = None
    seen: list[str] = attrs.field(factory=list)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an audit event."""
        if self.folder is None:
            return
        if event in PROGRAMS or (event == "pickle.find_class" and arguments[0] in ("os", "posix", "builtins")):
            self.seen.append(f"{event} {arguments!r:.100}")
        elif event == "open" and not isinstance(arguments[0], int):
            path = os.path.abspath(os.fsdecode(arguments[0]))  # noqa: PTH100 - a link is not followed
            inside = path == self.folder or path.startswith(self.folder + os.sep)
            if path.endswith((".bin", ".dat")) or not (inside or path.startswith((*_CODE, *_SYSTEM))):
                self.seen.append(f"opened {path}")


WATCH = Watch()


@attrs.define
class State:
    """What a worker keeps from input to input."""

    arguments: argparse.Namespace
    checkpoints: make.Checkpoints
    environment: Environment
    target: HuggingFaceModel
    spec: str
    plan: str


_STATE: list[State] = []


def prepare(arguments: argparse.Namespace) -> None:
    """Make a worker ready, and watch it from then on."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    environment = find_environment("cpu")
    target = load_target(None, SHAPE, device=CPU, dtype=torch.float32)
    made = codec.dumps(plan(SPEC, environment, load_backends()))
    _STATE[:] = [State(arguments, make.Checkpoints.make(), environment, target, codec.dumps(SPEC), made)]
    reader: Any = safetensors.torch
    own = reader.safe_open

    def seen(file: Any, *others: Any, **named: Any) -> Any:  # opened in Rust, where no audit hook looks
        sys.audit("open", str(file), "r", 0)
        return own(file, *others, **named)

    reader.safe_open = seen
    for index in range(20):  # what is imported or made at the first use is not an input's
        kinds = [kind for kind in KINDS if kind != "plugin"]
        with contextlib.suppress(Exception):
            _use(random.Random(index), kinds[index % len(kinds)], index, Outcome(index, "", "", 0))
    sys.addaudithook(WATCH.hook)
    limit(4096)


def check(index: int) -> Outcome:
    """Make one input, and use it."""
    arguments = _STATE[0].arguments
    rng = random.Random(f"input:{arguments.seed}:{index}")
    kind = arguments.only_kind or rng.choices([*KINDS], [weight for weight, *_ in KINDS.values()])[0]
    outcome = Outcome(index=index, kind=kind, made_by="", size=0)
    before = memory("VmRSS")
    guarded(outcome, arguments.hang, lambda: _use(rng, kind, index, outcome))
    outcome.violations += dict.fromkeys(WATCH.seen)
    outcome.rss = max(memory("VmRSS") - before, 0)
    outcome.stages = {kind: outcome.cpu}
    return outcome


def _use(rng: random.Random, kind: str, index: int, outcome: Outcome) -> None:
    top = Path(tempfile.mkdtemp(prefix="input-", dir=_STATE[0].arguments.folder))
    folder = top / "input"
    folder.mkdir()
    WATCH.seen.clear()
    _, made, use = KINDS[kind]
    try:
        source = made(rng, folder, index)
        outcome.made_by = source.made_by
        outcome.outcome = use(rng, folder, source, outcome)
    finally:
        WATCH.folder = None
        shutil.rmtree(top)


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Watch what the use of a folder opens and starts."""
    WATCH.folder = str(folder)
    try:
        yield
    finally:
        WATCH.folder = None


def _refusal(use: Callable[[], object]) -> str:
    """Use an input; return why it was refused, or nothing."""
    try:
        use()
    except CapturePlannerError as error:
        str(error).encode("utf-8", "surrogateescape")
        return re.sub(r"[^a-z ]+.*", "", str(error).rpartition(": ")[2] or "refused")[:40] or "refused"
    return ""


def _folder(rng: random.Random, folder: Path, made: make.Input, outcome: Outcome) -> str:
    state = _STATE[0]
    dtype = rng.choice((None, torch.float32))
    method = Speculative(method=rng.choice(tuple(Method)), num_tokens=1)
    with watched(folder):
        refused = _refusal(lambda: load_target(folder, SHAPE, device=CPU, dtype=dtype))
        refused_head = _refusal(lambda: load_drafter(folder, method, state.target))
        for name, flag in (("vllm", "--model"), ("sglang", "--model-path")):
            _refusal(partial(emulate, name, [flag, str(folder)], state.environment))
        _refusal(lambda: spec_from_config(folder / "config.json", "tiny"))
    if made.must_refuse and not (refused and refused_head):
        raise BrokenLawError("an index that leaves the folder, names what is absent, or a pickle is accepted")
    return f"refused: {refused}" if refused else "loaded"


def _plugin(rng: random.Random, folder: Path, made: make.Input, outcome: Outcome) -> str:
    state, (module,) = _STATE[0], made.words
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        with watched(folder), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            registry, engines = load_backends(), load_engines()
            refused = _refusal(lambda: plan(SPEC, state.environment, registry))
            for other in set(registry) - {"reference"}:
                _refusal(partial(plan, replace(SPEC, backend=other), state.environment, registry))
            backend_support(registry, [state.environment], None)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(module, None)
        importlib.invalidate_caches()
    if any(each.category is not PluginWarning for each in caught):
        raise BrokenLawError(f"another warning: {caught[0].message}")
    if "vllm" not in engines:
        raise BrokenLawError("a broken plugin took the engines with it")
    taken = any("are named 'reference'" in str(each.message) for each in caught)
    if bool(refused) != taken:
        raise BrokenLawError(f"a plugin that the spec does not use stopped it, or a taken name did not: {refused}")
    return "warned" if caught else "loaded"


def _trace(rng: random.Random, folder: Path, made: make.Input, outcome: Outcome) -> str:
    with watched(folder):
        refused = _refusal(lambda: from_trace(made.files[0], seed=0, vocab_size=32))
    return f"refused: {refused}" if refused else "loaded"


def _prompts(rng: random.Random, folder: Path, made: make.Input, outcome: Outcome) -> str:
    def use() -> None:
        requests, decode = from_prompts(made.files[0], made.files[1], max_new_tokens=4)
        for request in requests:
            decode(request.prompt)

    with watched(folder):
        refused = _refusal(use)
    return f"refused: {refused}" if refused else "loaded"


def _command(*words: str) -> tuple[int, str]:
    """Run a command in this process, as ``main`` does; return its exit code and all that it printed."""
    out, before = io.StringIO(), sys.argv
    sys.argv = ["capture-planner", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            cli.main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    text = out.getvalue()
    if code not in (0, 1, 2):
        raise BrokenLawError(f"{words[0]} ended with {code!r}")
    odd = next((char for char in text if char != "\n" and not char.isprintable()), None)
    if odd is not None:
        raise BrokenLawError(f"{words[0]} printed {odd!a}")
    return code, text


def _text(rng: random.Random, folder: Path, made: make.Input, outcome: Outcome) -> str:
    file, other = str(made.files[0]), folder / "other.yaml"
    other.write_text(_STATE[0].plan, "utf-8")
    commands = (
        *(("show", file), ("show", file, "--format", "json"), ("diff", str(other), file), ("check", file)),
        *(("explain", file, "--num-reqs", "2", "--query-len", "1"), ("explain", file, "--coverage")),
        *(("check", file, "--format", "github"), ("check", file, "--format", "sarif"), ("ranks", file)),
    )
    with watched(folder):
        codes = [_command(*words)[0] for words in rng.sample(commands, 4)]
    return f"codes {sorted(set(codes))}"


def _output(rng: random.Random, folder: Path, made: make.Input, outcome: Outcome) -> str:
    before = set(folder.iterdir())
    with watched(folder):
        code, text = _command(*made.words)
    if made.files[0].read_text("utf-8") != _STATE[0].spec:
        raise BrokenLawError("the spec was overwritten")
    left = [path.name for path in set(folder.iterdir()) - before if path.name.startswith(".")]
    if left:
        raise BrokenLawError(f"left behind: {left}")
    return f"code {code}: " + re.sub(r"/\S+|x{9,}", "...", text.strip().rpartition("\n")[2])[:60]


def _log(rng: random.Random, folder: Path, made: make.Input, outcome: Outcome) -> str:
    outcome.size = made.files[0].stat().st_size
    start = time.process_time()
    with watched(folder):
        code, text = _command("traffic", str(made.files[0]), "-o", str(folder / "traffic.yaml"), *made.words)
    if (taken := time.process_time() - start) > SECONDS + SECONDS_PER_BYTE * outcome.size:
        raise BrokenLawError(f"{outcome.size} bytes took {taken:.1f} s")
    if made.must_read and code:
        raise BrokenLawError(f"an odd line next to a good one loses the report: {text[-200:]!a}")
    reason = re.search(r"error: .*?: ([a-z ]+)", text.lower())
    return f"code {code}: {reason[1][:40] if code and reason else ''}"


KINDS: dict[str, tuple[int, Callable[[random.Random, Path, int], make.Input], Callable[..., str]]] = {
    "folder": (6, lambda rng, folder, index: make.model_folder(rng, folder, _STATE[0].checkpoints), _folder),
    "plugin": (4, make.plugin, _plugin),
    "trace": (3, make.trace, _trace),
    "prompts": (3, make.prompts, _prompts),
    "text": (2, lambda rng, folder, index: make.plan_text(rng, folder, _STATE[0].plan), _text),
    "output": (2, lambda rng, folder, index: make.output(rng, folder, _STATE[0].spec, _STATE[0].plan), _output),
    "log": (6, _fuzz_logs.log, _log),
}
"""By kind: how often of 26, what writes an input into a folder, by its index, and what uses it."""


def main() -> int:
    """Run the campaign."""
    return run(seeded(options(__doc__, [*KINDS])), prepare, check)


if __name__ == "__main__":
    sys.exit(main())
