"""Makes ``_deployments``, ``_equality`` and ``_logits`` of benchmarks/ importable, and ``flashinfer_rig``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
