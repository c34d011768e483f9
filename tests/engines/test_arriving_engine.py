"""The benchmark of vLLM under arriving requests: plans that take turns in one engine."""

import sys
from pathlib import Path
from types import SimpleNamespace

import _arriving_worker
import pytest
from _arriving_rounds import merged_plan
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from capture_planner import codec
from capture_planner.records._base import replace
from capture_planner.records.plan import Plan
from capture_planner_vllm import vllm_plugin
from capture_planner_vllm.inside import hooks, seam, splits
from support.vllm_module import MANAGERS, capture, config_for, manager_for, vllm_modules

PLAN = codec.load_plan(Path(__file__).parents[2] / "plans" / "locked" / "qwen3-8b-eagle3.h100.yaml")


PARTS = st.tuples(*(st.lists(st.sampled_from(role.entries[:12]), unique=True, max_size=6) for role in PLAN.roles))
"""Some graphs of each role, of its largest ones."""


def part_of(parts):
    """PLAN with these graphs alone."""
    roles = zip(PLAN.roles, parts, strict=True)
    return replace(
        PLAN, roles=tuple(evolve(role, entries=tuple(entries), waivers=(), lazy=()) for role, entries in roles)
    )


@pytest.fixture(scope="module")
def modules():
    """A process of vLLM with the plugin."""
    with pytest.MonkeyPatch.context() as patch, vllm_modules() as made:
        patch.setattr(seam, "_callbacks", {})
        patch.setattr(sys, "meta_path", list(sys.meta_path))
        patch.setattr(hooks, "decisions", {})
        for name in (vllm_plugin.APPLY, vllm_plugin.OBSERVE, vllm_plugin.PROFILE):
            patch.delenv(name, raising=False)
        patch.setenv(vllm_plugin.PLAN, "unused")
        hooks.apply_to_managers(made[MANAGERS])
        yield made


def started(modules, file, patch):
    """The tracks of an engine that runs the plan of a file: their roles, managers and captured graphs."""
    patch.setenv(vllm_plugin.PLAN, str(file))
    patch.setattr(splits.FULL_GRAPHS, "tokens", None)
    plan = codec.load_plan(file)
    config = config_for(modules, plan)
    hooks.set_sizes(plan, config)
    tracks = []
    for role in plan.planned:
        manager = manager_for(modules, config, plan, role)
        capture(manager)
        captured = [desc for descs in manager._capture_descs.values() for desc in descs]
        tracks.append(SimpleNamespace(role=role, manager=manager, keys=dict.fromkeys(captured, 0)))
    return tracks


def tables(tracks):
    """What engines dispatch by, and up to where they bound the splits of attention."""
    managers = [track.manager for track in tracks]
    return [(each._candidates, each._capture_descs) for each in managers], splits.FULL_GRAPHS.tokens


@given(st.tuples(PARTS, PARTS))
def test_merged_plan_has_each_graph_once(parts):
    plans = [part_of(each) for each in parts]
    merged = merged_plan(plans)
    assert codec.loads(codec.dumps(merged), Plan) == merged
    for role in merged.roles:
        every = [entry for plan in plans for entry in plan.role(role.role).entries]
        assert len(set(role.entries)) == len(role.entries)
        assert set(role.entries) == set(every)


@given(parts=st.tuples(PARTS, PARTS), turns=st.lists(st.integers(0, 1), min_size=1, max_size=4))
def test_engine_dispatches_as_one_that_runs_the_plan_alone(parts, turns, modules, tmp_path_factory):
    """After each turn: by the same tables, with the same bound on attention's splits."""
    plans = [part_of(each) for each in parts]
    folder = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        for name, plan in (("0", plans[0]), ("1", plans[1]), ("merged", merged_plan(plans))):
            (folder / name).write_text(codec.dumps(plan), "utf-8")
        alone = [tables(started(modules, folder / str(turn), patch)) for turn in (0, 1)]
        tracks = started(modules, folder / "merged", patch)
        patch.setattr(_arriving_worker, "OBSERVERS", [SimpleNamespace(_tracks=tracks)])
        for turn in turns:
            graphs = _arriving_worker.dispatch_by(str(folder / str(turn)))
            assert tables(tracks) == alone[turn]
            captured = (sum(map(len, descs.values())) for _, descs in alone[turn][0])
            assert graphs == dict(zip((track.role.value for track in tracks), captured, strict=True))


def test_graph_that_was_not_captured_is_an_error(modules, tmp_path, monkeypatch):
    less = replace(PLAN, roles=tuple(evolve(role, entries=role.entries[1:]) for role in PLAN.roles))
    for name, plan in (("all", PLAN), ("less", less)):
        (tmp_path / name).write_text(codec.dumps(plan), "utf-8")
    tracks = started(modules, tmp_path / "less", monkeypatch)
    monkeypatch.setattr(_arriving_worker, "OBSERVERS", [SimpleNamespace(_tracks=tracks)])
    with pytest.raises(RuntimeError, match="target: not captured"):
        _arriving_worker.dispatch_by(str(tmp_path / "all"))
