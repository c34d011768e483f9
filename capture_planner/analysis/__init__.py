"""What can be said of a finished plan: the values that the verbs of ``capture_planner`` return, and their modules."""

from typing import TYPE_CHECKING

from capture_planner.lazy import lazy_names

if TYPE_CHECKING:
    from capture_planner.analysis.coverage import Cell, Coverage
    from capture_planner.analysis.data_parallel import Agreement, Answer, Submission, Vector, agree
    from capture_planner.analysis.diff import Change
    from capture_planner.analysis.explain import Explanation, NearMiss

__all__ = [
    "Agreement",
    "Answer",
    "Cell",
    "Change",
    "Coverage",
    "Explanation",
    "NearMiss",
    "Submission",
    "Vector",
    "agree",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "coverage": ("Cell", "Coverage"),
        "data_parallel": ("Agreement", "Answer", "Submission", "Vector", "agree"),
        "diff": ("Change",),
        "explain": ("Explanation", "NearMiss"),
    },
)
