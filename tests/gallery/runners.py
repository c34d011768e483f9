"""Mutants of the runner and of dispatch: each has one public bug, under a backend that is healthy."""

from __future__ import annotations

from gallery.core import Mutant
from gallery.coupled_rows import COUPLED_RUNNERS
from gallery.drafting import DRAFTING_RUNNERS
from gallery.recurrent_states import RECURRENT_MUTANTS
from gallery.runner_classification import CLASSIFICATION_MUTANTS
from gallery.runner_dispatch import DISPATCH_MUTANTS
from gallery.runner_padding import PADDING_MUTANTS
from gallery.runner_session import SESSION_MUTANTS
from gallery.runner_state import STATE_MUTANTS

MUTANTS: tuple[Mutant, ...] = (
    CLASSIFICATION_MUTANTS
    + DISPATCH_MUTANTS
    + PADDING_MUTANTS
    + SESSION_MUTANTS
    + STATE_MUTANTS
    + RECURRENT_MUTANTS
    + COUPLED_RUNNERS
    + DRAFTING_RUNNERS
)
