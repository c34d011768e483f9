"""Frozen values that files and calls carry: specs, environments, plans, batches, declarations of backends.

An invalid value cannot be made: constructors raise ``InvalidValue`` with the path of each wrong field.
"""

from capture_planner.records._base import digest, replace
from capture_planner.records.backend import (
    COMMON_FIELDS,
    Attention,
    Axis,
    Backend,
    Bound,
    Fill,
    Lifetime,
    MetadataField,
    PaddingContract,
    Support,
    Where,
    Workspace,
)
from capture_planner.records.batch import Batch, Entry, Kind, Rejection
from capture_planner.records.capture import CapturePolicy, CaptureTiming
from capture_planner.records.environment import Device, DeviceKind, Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import DataType, DraftModel, Latent, Method, Model, ScheduleSource, Speculative
from capture_planner.records.observation import (
    BatchCount,
    DispatchRun,
    DraftPass,
    EagerCost,
    Observation,
    ObservedGraph,
    ObservedRole,
)
from capture_planner.records.plan import Decision, Forecast, GroupPlan, Plan, RolePlan, Waiver
from capture_planner.records.spec import (
    Budget,
    GroupSpec,
    KindGraphs,
    Limits,
    Lora,
    Parallel,
    Piecewise,
    Policy,
    Roles,
    RoleSpec,
    Sizes,
    Spec,
)

__all__ = [
    "COMMON_FIELDS",
    "Attention",
    "Axis",
    "Backend",
    "Batch",
    "BatchCount",
    "Bound",
    "Budget",
    "CapturePolicy",
    "CaptureTiming",
    "DataType",
    "Decision",
    "Device",
    "DeviceKind",
    "DispatchRun",
    "DraftModel",
    "DraftPass",
    "EagerCost",
    "Entry",
    "Environment",
    "Fill",
    "Forecast",
    "GroupPlan",
    "GroupSpec",
    "Kind",
    "KindGraphs",
    "Latent",
    "Lifetime",
    "Limits",
    "Lora",
    "Measurements",
    "MetadataField",
    "Method",
    "Model",
    "Observation",
    "ObservedGraph",
    "ObservedRole",
    "PaddingContract",
    "Parallel",
    "Piecewise",
    "Plan",
    "Policy",
    "Rejection",
    "RolePlan",
    "RoleSpec",
    "Roles",
    "ScheduleSource",
    "Sizes",
    "Spec",
    "Speculative",
    "Support",
    "Waiver",
    "Where",
    "Workspace",
    "digest",
    "replace",
]
