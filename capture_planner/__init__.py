"""capture-planner: which CUDA graphs a serving engine captures, which batch each serves, and why.

A ``Spec`` says what is wanted, an ``Environment`` and the backends what is possible, a ``Plan``
what was decided; a ``Dispatcher`` answers for a plan. Importing this imports no torch.

``plan`` makes a plan, ``lint`` checks it, ``explain`` says what serves a batch, ``diff`` what changes.
"""

from capture_planner.analysis.diff import diff as diff
from capture_planner.analysis.explain import explain
from capture_planner.analysis.lint import lint
from capture_planner.codec import dumps, load_environment, load_plan, load_spec, loads
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
