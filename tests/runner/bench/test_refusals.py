"""What a bench rejects before a model is loaded, and what an interruption keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from capture_planner.errors import BackendError, RunError  # noqa: E402
from capture_planner.plugins import registry  # noqa: E402
from capture_planner.records._base import replace  # noqa: E402
from capture_planner_runner.bench import Bench, measure  # noqa: E402
from capture_planner_runner.bench.measure import QUICK_LOAD, default_load, page_needs  # noqa: E402
from capture_planner_runner.bench.record import FIGURES  # noqa: E402
from capture_planner_runner.bench.rig import QUICK, REQUESTS, served_sizes  # noqa: E402
from capture_planner_runner.bench.throughput import Load  # noqa: E402
from support.tiny import MOST, planned, quiet, rigged  # noqa: E402

PLANS = {k: planned(k) for k in (0, 2, 4)}


# Numbers of requests and lengths.


@given(st.sampled_from([0, 2]), st.none() | st.sets(st.integers(1, 300), min_size=1))
def test_sizes_are_those_stated_or_rejected(k: int, stated: set[int] | None) -> None:
    """Only default sizes are cut to the plan's limit."""
    wanted = None if stated is None else tuple(sorted(stated))
    if stated is not None and max(stated) > MOST:
        with pytest.raises(RunError, match=f"--requests names {max(stated)}, but the plan is for at most {MOST} req"):
            served_sizes(PLANS[k], wanted)
    else:
        assert served_sizes(PLANS[k], wanted) == (wanted or tuple(sorted({min(n, MOST) for n in REQUESTS})))


def test_sizes_without_a_graph_are_rejected() -> None:
    """Where it was stated: a plan with graphs for 1 and 2 requests serves no decode of 3 by one."""
    plan = planned(0)
    target = plan.roles[0]
    few = replace(target, entries=tuple(entry for entry in target.entries if entry.num_tokens <= 2))
    plan = replace(plan, roles=(few, *plan.roles[1:]))
    assert served_sizes(plan, None) == (1,)
    with pytest.raises(RunError, match="serves a decode of 3 requests"):
        served_sizes(plan, (1, 3))
    with pytest.raises(RunError, match="serves a decode of 3, 4 requests"):
        served_sizes(plan, (1, 3, 4))


@given(st.integers(2, 300), st.integers(1, 500), st.integers(1, 500), st.sets(st.sampled_from(["prompt", "output"])))
def test_load_shortens_only_lengths_that_were_not_stated(
    longest: int, prompt: int, output: int, stated: set[str]
) -> None:
    """To at least a token each; stated lengths are kept, or rejected by name."""
    load = Load(requests=3, prompt=prompt, output=output, stated=frozenset(stated))
    least = sum(n if name in stated else 1 for name, n in (("prompt", prompt), ("output", output)))
    if least > longest:
        with pytest.raises(RunError, match="too long for a model of") as refused:
            load.within(longest)
        assert all((f"--{name}-tokens" in str(refused.value)) == (name in stated) for name in ("prompt", "output"))
    else:
        found = load.within(longest)
        assert min(found.prompt, found.output) >= 1
        assert found.prompt + found.output <= longest
        assert found == load or prompt + output > longest
        assert all(getattr(found, name) == getattr(load, name) for name in stated)


@given(st.none() | st.integers(1, 99), st.none() | st.integers(1, 99), st.booleans())
def test_default_load_marks_stated_lengths(prompt: int | None, output: int | None, quick: bool) -> None:
    """The rest is the default's."""
    load = default_load(quick=quick, prompt_tokens=prompt, output_tokens=output)
    base = QUICK_LOAD if quick else Load()
    assert (load.prompt, load.output) == (prompt or base.prompt, output or base.output)
    assert load.stated == {n for n, given in (("prompt", prompt), ("output", output)) if given is not None}


# Pages.


@pytest.mark.thorough
@settings(max_examples=3)
@given(st.sampled_from([0, 2, 4]), st.sampled_from(["decode", "preparation", "chain", "throughput", "pools"]))
def test_figures_run_with_the_pages_that_they_need(k: int, figure: str) -> None:
    """With one page fewer, the bench is rejected."""
    plan, load = PLANS[k], Load(requests=2, prompt=9, output=5)
    least = max((number for _, number in page_needs(plan, QUICK, (1, MOST), load, (figure,), 8)), default=1)
    bench = Bench(quick=True, load=load, only=(figure,), page_size=8, pages=least)
    assert measure(plan, registry.load_backends(), bench, quiet).failed == ()
    if least > 1:
        with pytest.raises(RunError, match=rf"{figure}.* needs {least} pages of 8 tokens, but --pages is"):
            measure(plan, registry.load_backends(), attrs.evolve(bench, pages=least - 1), quiet)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    "chosen",
    [{"pages": 1}, {"requests": (300,)}, {"load": Load(prompt=95, output=2, stated=frozenset({"prompt", "output"}))}],
)
def test_measure_rejects_bad_choices_before_a_model_is_loaded(chosen: Any) -> None:
    """It can be known from the plan."""
    with pytest.raises(RunError):
        measure(PLANS[2], registry.load_backends(), Bench(quick=True, **chosen), quiet)


# Interruptions.


@pytest.mark.thorough
@given(st.permutations(FIGURES).flatmap(lambda names: st.tuples(st.just(names), st.integers(0, len(names) - 1))))
@settings(max_examples=3)
def test_interruption_keeps_earlier_figures(case: tuple[list[str], int]) -> None:
    """Whichever are measured and wherever it comes: the others are absent, and nothing broke."""
    names, count = case
    only = tuple(name for name in FIGURES if name in names[: count + 1])
    stopped = only[count // 2]

    @contextmanager
    def stopping(task: str, total: int) -> Iterator[Callable[[str], None]]:
        def advance(now: str) -> None:
            if task == stopped:
                raise KeyboardInterrupt

        yield advance

    bench = Bench(quick=True, requests=(1,), load=Load(requests=1, prompt=3, output=3), only=only, page_size=8)
    report = measure(PLANS[4], registry.load_backends(), bench, stopping)
    place = only.index(stopped)
    assert report.interrupted
    assert report.failed == ()
    assert all(getattr(report, name) for name in only[:place])
    assert not any(getattr(report, name) for name in only[place:])
    assert [absent.figure for absent in report.absent] == list(only[place:])
    assert {absent.says for absent in report.absent} == {"interrupted before it was measured"}


def test_error_in_the_clean_up_after_an_interruption_is_an_interruption() -> None:
    """No figure broke, and no other one is begun."""
    rig = rigged(PLANS[0])

    def cleaning() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise BackendError("it cannot be released")

    with pytest.raises(KeyboardInterrupt), rig.trying("decode"):
        cleaning()
    assert rig.absent == []
