"""The tests of each module that is mutated, in the order in which they run: quick and lethal first."""

from __future__ import annotations

from pathlib import Path

from _bench import ROOT

_LOCKED = "test_locked_plans.py::test_a_locked_plan_is_what_its_spec_gives_to_the_byte"
_PLANNED = ("planning/test_planner.py", _LOCKED)
_POLICIES = ("planning/sizing/test_policies.py", "property/test_regressions.py", "planning/test_planner.py")
_BUDGET = ("planning/sizing/test_budget.py", *_PLANNED)
_MODES = ("planning/test_resolve.py", "property/test_law6_resolution.py", "planning/test_planner.py")
_PLANS = (
    "planning/test_planner.py",
    _LOCKED,
    "property/test_law1_coverage.py",
    "property/test_law2_shape_algebra.py",
    "property/test_law4_reachability.py",
    "planning/test_state_pool.py",
)
_MEASURED = (
    "property/test_law13_whole_plans.py",
    "property/test_law13_measured.py",
    "property/test_law13_many_kinds.py",
    "planning/measured/test_measured_schedule.py",
)
_PROGRAMS = ("property/test_law13_whole_plans.py", "property/test_law13_measured.py")
_PADDED = (
    "runner/test_fields.py",
    "runner/test_padding.py",
    "runner/test_guards.py",
    "property/test_law9_inert_padding.py",
    "property/test_law10_frozen.py",
)
_PARTS = "conformance/test_suite_parts.py"
_BACKENDS = "gallery/test_gallery_backends.py::test_it_is_caught_in_its_case"
_RUNNERS = "gallery/test_gallery_runners.py::test_it_is_caught_in_its_case"
_CASES = (
    _BACKENDS,
    "conformance/test_scene.py",
    _RUNNERS,
    "conformance/test_capture_attack.py",
    "conformance/test_causes.py",
    "conformance/test_conformance.py",
)
TESTS: dict[str, tuple[str, ...]] = {
    "planning/sizing/minimax": ("planning/sizing/test_minimax.py", "planning/sizing/test_budget.py", *_POLICIES),
    "planning/sizing/policies": (*_POLICIES, _LOCKED),
    "planning/sizing/budget": ("planning/test_price.py", *_BUDGET),
    "planning/sizing/engine_lists": ("planning/sizing/test_engine_lists.py", "planning/sizing/test_policies.py"),
    "planning/sizing/ladder": _BUDGET,
    "planning/sizing/program": ("planning/sizing/test_program.py", *_PROGRAMS),
    "modes": ("test_modes.py", *_MODES),
    "planning/resolve": ("planning/test_groups.py", *_MODES),
    "planning/costs": ("planning/test_costs.py", *_MEASURED, "tuner/test_tuning.py"),
    "planning/measured/allocation": ("planning/measured/test_subsets.py", *_PROGRAMS),
    "planning/measured/bounds": ("planning/measured/test_bounds.py", *_MEASURED),
    "planning/measured/choice": (
        "planning/measured/test_choice.py",
        "planning/measured/test_judging.py",
        *_MEASURED,
        "tuner/test_tuning.py",
    ),
    "planning/measured/first_use": ("planning/measured/test_first_use.py",),
    "planning/measured/schedule": (
        "planning/measured/test_draft_lengths.py",
        "planning/measured/test_schedule_times.py",
        "planning/measured/test_measured_schedule.py",
    ),
    "planning/measured/search": (
        "planning/measured/test_budgeted.py",
        "planning/measured/test_coverage.py",
        "planning/measured/test_preferring.py",
        *_MEASURED,
        *_BUDGET,
    ),
    "planning/measured/steps": (
        "planning/measured/test_steps.py",
        "planning/measured/test_judging.py",
        "planning/measured/test_step_times.py",
        *_MEASURED,
        "tuner/test_tuning.py",
    ),
    "planning/measured/teams": ("planning/measured/test_smoothing.py", "planning/measured/test_demand.py", *_MEASURED),
    "planning/planner": (
        "planning/test_price.py",
        "cli/test_explain.py::test_explain_a_decode_of_varying_lengths",
        *_PLANS,
        "property/test_law6_resolution.py",
    ),
    "planning/role": ("planning/measured/test_first_use.py", *_PLANS),
    "planning/from_config": ("cli/test_init.py",),
    "records/batch_space": ("records/test_batch_space_parts.py", "records/test_batch_space.py", *_PLANS[:3]),
    "dispatch/dispatcher": (
        "dispatch/test_dispatcher.py",
        "property/test_regressions.py",
        "property/test_law3_next_fit.py",
        "property/test_law1_coverage.py",
    ),
    "execution/fields": _PADDED,
    "execution/fused": ("runner/test_fused_padding.py",),
    "execution/guards": ("runner/test_guards.py", "property/test_law10_frozen.py", *_PADDED),
    "execution/padding": _PADDED,
    "conformance/audits": ("conformance/test_attacks.py", "conformance/test_conformance.py"),
    "conformance/memory": (_PARTS, "conformance/test_causes.py", *_CASES),
    "conformance/minimize": (
        "conformance/test_attacks.py",
        "conformance/test_causes.py",
        "conformance/test_minimize.py",
        *_CASES,
    ),
    "conformance/scene_batch": ("conformance/test_scene_batch.py", *_CASES),
    "conformance/shapes": (
        "conformance/test_shapes.py",
        "conformance/test_causes.py",
        "conformance/test_scene.py",
        "conformance/test_conformance.py",
    ),
    "conformance/stage": (_PARTS, "conformance/test_causes.py", *_CASES),
    "conformance/steps": (
        "conformance/test_forward_checks.py",
        "conformance/test_scene_batch.py",
        "conformance/test_served_rows.py",
        *_CASES,
    ),
    "conformance/tampering": ("conformance/test_attacks.py", "conformance/test_conformance.py", *_CASES),
    "conformance/watch": ("conformance/test_watch.py", "conformance/test_capture_attack.py", _RUNNERS, *_CASES),
}


def source_of(module: str, root: Path = ROOT) -> Path:
    """Return the file of a module: ``conformance/NAME`` of the conformance suite, else of the core or the runner."""
    distribution, _, name = module.partition("/")
    if distribution == "conformance":
        return root / "conformance" / "src" / "capture_planner_conformance" / f"{name}.py"
    core = root / "capture_planner" / f"{module}.py"
    return core if core.exists() else root / "runner" / "src" / "capture_planner_runner" / f"{module}.py"
