"""Strategies of this project's own tests: files of every kind, whole or spoilt, and what data-parallel ranks bring."""

from support.strategies.files import DocumentText, documents
from support.strategies.observations import observations
from support.strategies.profiles import profiles
from support.strategies.ranks import submissions, vectors
from support.strategies.traffic import traffics

__all__ = ["DocumentText", "documents", "observations", "profiles", "submissions", "traffics", "vectors"]
