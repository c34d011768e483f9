"""Makes ``worlds`` and ``probe`` of the property tests importable under importlib import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "property"))
