"""capture-planner: which CUDA graphs a serving engine captures, which batch each serves, and why.

A ``Spec`` describes what is wanted, an ``Environment`` and the backends what is possible, a ``Plan``
what was decided. A ``Dispatcher`` finds the graph for a batch. Importing this imports no torch::

    from capture_planner import Batch, Role, explain, lint, load_environment, load_spec, plan

    planned = plan(load_spec("spec.yaml"), load_environment("h100"))
    findings = lint(planned)
    explanation = explain(planned, Batch.decode(Role.TARGET, num_reqs=100, query_len=4))

``load_environment`` takes the name of a shipped machine or a file, ``plan`` the installed backends unless it is given
others. ``plan`` makes a plan, ``lint`` checks it, ``explain`` tells why a batch gets its graph, and ``diff``
lists what changes between two plans.
"""

from typing import TYPE_CHECKING

from capture_planner.lazy import lazy_names

# For type checkers; at run time a name is imported by ``_HOMES`` when it is first used.
if TYPE_CHECKING:
    from capture_planner.analysis.diff import diff
    from capture_planner.analysis.explain import explain
    from capture_planner.analysis.lint import lint
    from capture_planner.codec import dumps, load_plan, load_spec, loads
    from capture_planner.codec.shipped import load_environment
    from capture_planner.dispatch.dispatcher import Dispatch, Dispatcher
    from capture_planner.errors import (
        BackendError,
        CapturePlannerError,
        DispatchError,
        InvalidDocument,
        InvalidValue,
        PlanningError,
        Problem,
    )
    from capture_planner.modes import GraphMode, GraphSupport, Reason, Role
    from capture_planner.planning.planner import plan
    from capture_planner.plugins.registry import Registry, load_backends
    from capture_planner.records.batch import Batch, Entry
    from capture_planner.records.environment import Environment
    from capture_planner.records.plan import Decision, Plan, Waiver
    from capture_planner.records.spec import Spec

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "Batch",
    "CapturePlannerError",
    "Decision",
    "Dispatch",
    "DispatchError",
    "Dispatcher",
    "Entry",
    "Environment",
    "GraphMode",
    "GraphSupport",
    "InvalidDocument",
    "InvalidValue",
    "Plan",
    "PlanningError",
    "Problem",
    "Reason",
    "Registry",
    "Role",
    "Spec",
    "Waiver",
    "diff",
    "dumps",
    "explain",
    "lint",
    "load_backends",
    "load_environment",
    "load_plan",
    "load_spec",
    "loads",
    "plan",
]

_HOMES = {
    "analysis.diff": ("diff",),
    "analysis.explain": ("explain",),
    "analysis.lint": ("lint",),
    "codec": ("dumps", "load_plan", "load_spec", "loads"),
    "codec.shipped": ("load_environment",),
    "dispatch.dispatcher": ("Dispatch", "Dispatcher"),
    "errors": (
        "BackendError",
        "CapturePlannerError",
        "DispatchError",
        "InvalidDocument",
        "InvalidValue",
        "PlanningError",
        "Problem",
    ),
    "modes": ("GraphMode", "GraphSupport", "Reason", "Role"),
    "planning.planner": ("plan",),
    "plugins.registry": ("Registry", "load_backends"),
    "records.batch": ("Batch", "Entry"),
    "records.environment": ("Environment",),
    "records.plan": ("Decision", "Plan", "Waiver"),
    "records.spec": ("Spec",),
}
"""The module of each public name: imported when a name is first used, as the help of the program needs none of them."""

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
