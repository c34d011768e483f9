"""Memory on a GPU: the ledger of a capture against what the device itself reports.

On a device that nobody else uses: what another process takes meanwhile is taken for a driver's.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from capture_planner import load_backends
from capture_planner.modes import Chain, GraphMode, Pool, Role
from capture_planner.planning.planner import plan as make_plan
from capture_planner.records.model import DataType, Method, Model, Speculative
from capture_planner.records.spec import Limits, Policy, Sizes, Spec
from capture_planner_runner.graphs.graph import Grapher
from capture_planner_runner.host import this_environment
from capture_planner_runner.ledger.rows import Accounts, GraphCapture
from capture_planner_runner.models.drafters import choose_drafter
from capture_planner_runner.models.huggingface import load_target
from capture_planner_runner.runner import Runner
from capture_planner_runner.serving.states import PageFormat

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MEBI = 1 << 20
WITHIN = 0.05
SLACK = 1 << 16


@pytest.fixture(scope="module")
def grapher() -> Iterator[Grapher]:
    """CUDA graphs; the stream that is current is put back."""
    from capture_planner_runner.graphs.cuda import CudaGraphs

    stream = torch.cuda.current_stream()
    yield CudaGraphs(torch.device("cuda:0"))
    torch.cuda.set_stream(stream)


def spec_of(pool: Pool, chain: Chain = Chain.FUSED) -> Spec:
    """Return a deployment with every kind of graph, whose intermediates take some MiB."""
    return Spec(
        model=Model(
            name="small",
            num_layers=2,
            num_heads=8,
            num_kv_heads=2,
            head_dim=64,
            hidden_size=512,
            vocab_size=8192,
            max_model_len=256,
            dtype=DataType.FLOAT32,
        ),
        limits=Limits(max_num_reqs=16, max_num_tokens=512),
        mode=GraphMode.FULL_AND_PIECEWISE,
        backend="triton" if "triton" in load_backends() else "reference",
        speculative=Speculative(method=Method.EAGLE, num_tokens=3, chain=chain),
        sizes=Sizes(policy=Policy.POWERS_OF_TWO),
        pool=pool,
    )


@contextmanager
def runner_of(spec: Spec, grapher: Grapher, device: str = "cuda:0") -> Iterator[Runner]:
    """Put a runner together; leaving gives its memory back."""
    registry = load_backends()
    plan = make_plan(spec, this_environment("here"), registry)
    assert plan.speculative is not None
    where = torch.device(device)
    target = load_target(None, plan.model, device=where, dtype=torch.float32, seed=1)
    drafter = choose_drafter("random", plan.speculative, target, num_states=16, length=260, seed=2)
    runner = Runner(
        plan, target, drafter, registry, grapher, pages=PageFormat(page_size=16, num_pages=257), device=where
    )
    with runner:
        yield runner
    del runner, target, drafter
    gc.collect()


def pools_of(runner: Runner) -> dict[Role, int]:
    """Return the bytes of each role's pool; roles that share one have the same."""
    return {name: role.graphs.pool.memory for name, role in runner.roles.items() if role.graphs.pool is not None}


def check_pools(runner: Runner, pool: Pool) -> None:
    """What the entries took is what their pools hold."""
    taken: Counter[Role] = Counter()
    for graph in runner.session.captured:
        taken[graph.role] += graph.memory
    held = pools_of(runner)
    if pool is Pool.PER_ROLE:
        assert dict(taken) == held
    else:
        assert {taken.total()} == set(held.values())


def written(captured: list[GraphCapture]) -> str:
    """Write the accounts, for whoever reads a failure."""
    return f"{Accounts.of(captured)}, readings {[graph.readings for graph in captured]}"


@pytest.mark.parametrize("pool", list(Pool))
@pytest.mark.parametrize("chain", list(Chain))
def test_ledger_reconciles_with_the_device(grapher: Grapher, pool: Pool, chain: Chain) -> None:
    """By graph and by role it is what pools hold; in all, what the device lost, within 5 %."""
    with runner_of(spec_of(pool, chain), grapher) as runner:
        first = grapher.reading()
        runner.capture()
        last = grapher.reading()
        captured = runner.session.captured
        accounts = Accounts.of(captured)
        assert first is not None
        assert last is not None
        assert accounts is not None
        check_pools(runner, pool)
        assert accounts.apart <= WITHIN, written(captured)
        lost = last.used - first.used
        assert abs(lost - accounts.explained) <= WITHIN * abs(lost), written(captured)
        held = set(pools_of(runner).values()) if pool is Pool.SHARED else pools_of(runner).values()
        assert accounts.graphs == sum(held) > 0
        assert accounts.graphs + accounts.driver == sum(graph.memory + graph.driver for graph in captured)
        assert 0 <= accounts.driver < lost, written(captured)
        assert all(graph.alone > 0 for graph in captured)


def test_ledger_includes_dropped_graphs(grapher: Grapher) -> None:
    """What they leave in the pool is counted, and the rest still reconciles."""
    with runner_of(spec_of(Pool.SHARED), grapher) as runner:
        runner.capture()
        (needed,) = set(pools_of(runner).values())
    with runner_of(spec_of(Pool.SHARED), grapher) as runner:
        runner.capture(memory=needed // 2)
        captured = runner.session.captured
        accounts = Accounts.of(captured)
        assert accounts is not None
        check_pools(runner, Pool.SHARED)
        assert {graph.waiver is None for graph in captured} == {True, False}, written(captured)
        assert accounts.apart <= WITHIN, written(captured)


def test_graph_memory_is_the_peak_of_its_live_tensors(grapher: Grapher) -> None:
    """Alone it is that, and what torch keeps for random numbers; its pool grows by segments, and by none
    for a smaller graph.
    """
    source = torch.zeros(8 * MEBI, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)

    def forward(size: int) -> None:
        one = source[:size] + 1
        two = one + 1
        del one
        target[:size].copy_(two + 1)

    forward(8 * MEBI)
    pool = grapher.pool()
    large = grapher.capture(lambda: forward(8 * MEBI), pool)
    assert 16 * MEBI <= large.alone <= 16 * MEBI + SLACK
    assert large.memory == pool.memory >= large.alone
    small = grapher.capture(lambda: forward(2 * MEBI), pool)
    assert small.memory == 0
    assert 4 * MEBI <= small.alone <= 4 * MEBI + SLACK
    for graph in (large, small):
        target.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert (target[: 2 * MEBI] == 3).all()


def test_pool_accepts_a_graph_after_it_refused_one(grapher: Grapher) -> None:
    """And what was refused is given back."""
    source = torch.zeros(32 * MEBI, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)

    def forward(size: int) -> None:
        target[:size].copy_(source[:size] + 1)

    forward(32 * MEBI)
    pool, before = grapher.pool(24 * MEBI), grapher.reading()
    with pytest.raises(torch.OutOfMemoryError):
        grapher.capture(lambda: forward(32 * MEBI), pool)
    after = grapher.reading()
    assert before is not None
    assert after is not None
    assert pool.memory == 0
    assert after.held <= before.held + 2 * MEBI
    graph = grapher.capture(lambda: forward(8 * MEBI), pool)
    graph.replay()
    torch.cuda.synchronize()
    assert pool.memory <= 24 * MEBI
    assert (target[: 8 * MEBI] == 1).all()


class Garbage:
    """An object in a cycle; when it is freed it notes whether a capture is open then."""

    def __init__(self, freed: list[bool]) -> None:
        self.itself, self.freed = self, freed

    def __del__(self) -> None:
        self.freed.append(torch.cuda.is_current_stream_capturing())


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """Collect garbage whenever it may be: after each new object."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.usefixtures("eager_collector")
def test_nothing_is_collected_while_a_capture_is_open(grapher: Grapher, breaks: bool) -> None:
    """Not on its way out either: a graph that is freed then stays with the driver, and an event is lost."""
    out, freed = torch.zeros(8, device="cuda"), list[bool]()

    def forward() -> None:
        out.add_(1)
        for _ in range(100):
            Garbage(freed)
        if breaks:
            raise ValueError("this forward breaks")

    with pytest.raises(ValueError, match="breaks") if breaks else contextlib.nullcontext():
        grapher.capture(forward, grapher.pool())
    gc.collect()
    assert freed == [False] * 100
    assert not torch.cuda.is_current_stream_capturing()


@pytest.mark.usefixtures("eager_collector")
def test_what_outlives_a_capture_is_counted_and_named(grapher: Grapher) -> None:
    """In pieces: nothing of a healthy forward or of frames that an exception keeps, and the tensor of an object."""
    pool, out, errors = grapher.pool(), torch.zeros(1024, device="cuda"), []

    class Backend:
        workspace: torch.Tensor | None = None

    backend = Backend()

    def forward(*, breaks: bool, keeps: bool) -> None:
        rows = out + 1
        grapher.split(lambda read, written: written.copy_(read), (rows,), (out,))
        late = rows * 2
        if breaks:
            try:
                raise ImportError("an optional module is missing")
            except ImportError as error:
                errors.append(error)
        if keeps:
            backend.workspace = late
        out.add_(late)

    for breaks, keeps, size in ((False, False, 0), (True, False, 0), (True, True, out.nbytes), (False, False, 0)):
        # Garbage of before must not hide what is new, whenever it is freed.
        cycle = [torch.zeros(1 << 20, device="cuda")]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        left = grapher.capture(lambda breaks=breaks, keeps=keeps: forward(breaks=breaks, keeps=keeps), pool).leftover
        assert (left.size, left.holders) == (size, ("Backend.workspace",) if keeps else ())
