"""Launches of a tiny deployment: its spec, a backend that counts what is reserved, and finished reports."""

from contextlib import contextmanager
from functools import cache
from typing import Any

from capture_planner.planning.planner import plan
from capture_planner.plugins.registry import RegisteredBackend, Registry
from capture_planner.records._base import replace
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.model import DataType, Method, Model, Speculative
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner_reference import Reference
from capture_planner_runner.launch.launch import launch
from capture_planner_runner.launch.request import RunRequest
from capture_planner_runner.serving.workload import Request, generated

MODEL = Model(
    name="tiny",
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_model_len=48,
    hidden_size=16,
    vocab_size=20,
    dtype=DataType.FLOAT64,
)
SPEC = Spec(
    model=MODEL,
    limits=Limits(max_num_reqs=3, max_num_tokens=12),
    backend="reference",
    sizes=Sizes(policy=Policy.EXPLICIT, num_tokens=(4, 12), num_reqs=(1, 3)),
    speculative=Speculative(method=Method.EAGLE, num_tokens=2),
)
HERE = Environment(name="cpu", device=Device(kind=DeviceKind.CPU, name="x86-64", memory=1 << 30))
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "vocab_size": 20,
    "max_position_embeddings": 48,
}
SCHEDULE = ((1, 1, 4), (2, 2, 1), (3, 3, 0))
"""From four drafts to none, as the batch grows."""


class CountingReference(Reference):
    """The reference backend; it counts what is reserved, on trial with one page or to run, and not yet
    released.
    """

    def __init__(self):
        self.reserved = self.trials = self.held = 0

    def reserve(self, reservation):
        """Count, and let a subclass change the executor."""
        self.reserved += 1
        self.trials += all(len(cache.keys) == 2 for cache in reservation.caches.values())
        self.held += 1
        executor = super().reserve(reservation)
        release = executor.release

        def released():
            self.held -= 1
            release()

        executor.release = released  # type: ignore[method-assign]
        self.change(executor, reservation)
        return executor

    def change(self, executor, reservation):
        """Leave it as it is."""


class ProgressRecord:
    """Progress that is kept, and stopped by Ctrl-C after so many parts of one task."""

    def __init__(self, stop=None, after=0):
        self.totals, self.done, self._stop, self._after = {}, [], stop, after

    @contextmanager
    def __call__(self, task, total):
        """Begin a task."""
        self.totals[task] = total

        def advance(name):
            self.done.append((task, name))
            if task == self._stop and sum(name == task for name, _ in self.done) == self._after:
                raise KeyboardInterrupt

        yield advance


def registry_of(*backends):
    """A registry of these backends, of one distribution."""
    return Registry(RegisteredBackend(backend=b, distribution="of-a-test", version="1.2") for b in backends)


def requests_of(vocab_size, count=7, output_tokens=(3, 12)):
    """Requests that come faster than they are served, so that places and tokens run out."""
    return generated(count, seed=5, rate=40, prompt_tokens=(1, 14), output_tokens=output_tokens, vocab_size=vocab_size)


def started(spec=SPEC, backend=None, workload=requests_of, shown=None, environment=HERE, **choices):
    """Plan a spec for this machine and launch it."""
    registry = registry_of(backend or CountingReference())
    made = plan(spec, environment, registry)
    return launch(made, registry, workload, RunRequest(**{"page_size": 4} | choices), shown or ProgressRecord())


@cache
def served(drafter="random", schedule=SCHEDULE, **choices):
    """One launch, for tests that look at the same report."""
    speculative = Speculative(method=Method.EAGLE, num_tokens=4, schedule=schedule)
    return started(replace(SPEC, speculative=speculative), drafter=drafter, **choices)


def one_request(**changes):
    """A workload of one request."""
    request: dict[str, Any] = {"name": "r", "arrival": 0.0, "prompt": (1,) * 5, "max_new_tokens": 5} | changes
    return lambda vocab_size: [Request(**request)]
