"""The tests of each module that is mutated, in the order in which they run: quick and lethal first."""

from __future__ import annotations

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
    "planning/test_measured_schedule.py",
)
_PROGRAMS = ("property/test_law13_whole_plans.py", "property/test_law13_measured.py")
_PADDED = (
    "runtime/test_fields.py",
    "runtime/test_padding.py",
    "runtime/test_guards.py",
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
    "planning/sizing/budget": _BUDGET,
    "planning/sizing/engine_lists": ("planning/sizing/test_engine_lists.py", "planning/sizing/test_policies.py"),
    "planning/sizing/ladder": _BUDGET,
    "planning/sizing/subsets": ("planning/sizing/test_subsets.py",),
    "planning/sizing/program": ("planning/sizing/test_program.py", *_PROGRAMS),
    "planning/sizing/allocation": _PROGRAMS,
    "planning/sizing/worst": _PROGRAMS,
    "planning/sizing/smoothing": ("planning/sizing/test_smoothing.py",),
    "modes": ("test_modes.py", *_MODES),
    "planning/resolve": _MODES,
    "planning/answers": _MEASURED,
    "planning/bounds": ("planning/test_bounds.py", *_MEASURED),
    "planning/budgeted": ("planning/test_budgeted.py", *_MEASURED, *_BUDGET),
    "planning/costs": ("planning/test_costs.py", *_MEASURED, "engines/test_tuning.py"),
    "planning/coverage": ("planning/test_coverage.py", *_MEASURED),
    "planning/demand": ("planning/test_demand.py", *_MEASURED),
    "planning/draft_lengths": ("planning/test_draft_lengths.py", "planning/test_measured_schedule.py"),
    "planning/first_use": ("planning/test_first_use.py",),
    "planning/groups": ("planning/test_groups.py", *_BUDGET),
    "planning/judging": ("planning/test_judging.py", *_MEASURED),
    "planning/measured": (
        "planning/test_measured.py",
        "planning/test_judging.py",
        *_MEASURED,
        "engines/test_tuning.py",
    ),
    "planning/measured_schedule": ("planning/test_schedule_times.py", "planning/test_measured_schedule.py"),
    "planning/planner": (
        "planning/test_price.py",
        "cli/test_explain.py::test_explain_a_decode_of_varying_lengths",
        *_PLANS,
        "property/test_law6_resolution.py",
    ),
    "planning/price": ("planning/test_price.py",),
    "planning/role": ("planning/test_first_use.py", *_PLANS),
    "planning/steps": ("planning/test_steps.py", *_MEASURED, "engines/test_tuning.py"),
    "planning/waivers": _PLANS,
    "planning/from_config": ("cli/test_init.py",),
    "records/batch_space": ("records/test_batch_space_parts.py", "records/test_batch_space.py", *_PLANS[:3]),
    "dispatch/dispatcher": (
        "dispatch/test_dispatcher.py",
        "property/test_regressions.py",
        "property/test_law3_next_fit.py",
        "property/test_law1_coverage.py",
    ),
    "runtime/execution/fields": _PADDED,
    "runtime/execution/fused": ("runtime/test_fused_padding.py",),
    "runtime/execution/guards": ("runtime/test_guards.py", "property/test_law10_frozen.py", *_PADDED),
    "runtime/execution/padding": _PADDED,
    "conformance/adapter_rows": ("conformance/test_attacks.py", "gallery/test_gallery_adapters.py", *_CASES),
    "conformance/audit": ("conformance/test_attacks.py", "conformance/test_conformance.py"),
    "conformance/canaries": (_PARTS, *_CASES),
    "conformance/causes": ("conformance/test_attacks.py", "conformance/test_causes.py", *_CASES),
    "conformance/capture_attack": ("conformance/test_capture_attack.py", _RUNNERS, *_CASES),
    "conformance/classification": _CASES,
    "conformance/declaration_checks": (
        "conformance/test_pytest_plugin.py::test_a_declaration_of_which_no_plan_is_made_is_found_alone",
        "conformance/test_conformance.py",
        _BACKENDS,
    ),
    "conformance/forward_checks": ("conformance/test_forward_checks.py", *_CASES),
    "conformance/garbage": (_PARTS, *_CASES),
    "conformance/private": (_PARTS, "conformance/test_causes.py", *_CASES),
    "conformance/rank_agreement": ("conformance/test_rank_agreement.py", "gallery/test_gallery_plans.py"),
    "conformance/reference_dispatch": (
        "dispatch/test_dispatcher.py::test_drafter_ignores_loras",
        "property/test_law3_next_fit.py",
        "property/test_law1_coverage.py",
        "gallery/test_gallery_plans.py",
        _RUNNERS,
    ),
    "conformance/scene_batch": ("conformance/test_scene_batch.py", *_CASES),
    "conformance/served_rows": ("conformance/test_served_rows.py", *_CASES),
    "conformance/shapes": (
        "conformance/test_shapes.py",
        "conformance/test_causes.py",
        "conformance/test_scene.py",
        "conformance/test_conformance.py",
    ),
    "conformance/steps": ("conformance/test_scene_batch.py", *_CASES),
    "conformance/tampering": ("conformance/test_attacks.py", "conformance/test_conformance.py", *_CASES),
    "conformance/watch": ("conformance/test_watch.py", *_CASES),
    "conformance/widening": (_PARTS, "conformance/test_causes.py", *_CASES),
}
