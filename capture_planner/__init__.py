"""capture-planner: which CUDA graphs a serving engine captures, which batch each serves, and why.

A ``Spec`` says what is wanted, an ``Environment`` and the backends what is possible, a ``Plan``
what was decided; a ``Dispatcher`` answers for a plan. Importing this imports no torch.

The verbs live in the modules of their name: ``planner.plan``, ``lint.lint``, ``coverage.coverage``,
``explain.explain``, ``compare.compare``.
"""

from capture_planner.codec import dumps, load_environment, load_plan, load_spec, loads
from capture_planner.dispatch import Dispatch, Dispatcher
from capture_planner.entry import Batch, Entry
from capture_planner.environment import Environment
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
from capture_planner.plan import Decision, Plan, Waiver
from capture_planner.registry import Registry, load
from capture_planner.spec import Spec

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
    "dumps",
    "load",
    "load_environment",
    "load_plan",
    "load_spec",
    "loads",
]
