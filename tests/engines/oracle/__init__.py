"""The engines' own code beside our emulation: oracles, comparisons (``run_*``) and recorders (``record_*``).

The scripts need this repository's ``tests`` folder on the path, and the released wheels of the engines:

    PYTHONPATH=tests python tests/engines/oracle/run_vllm_config.py --wheel FOLDER
"""

import sys
from pathlib import Path

# Python puts a script's folder first on the path, where sglang.py and tensorrt_llm.py would shadow the engines.
sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != Path(__file__).parent]
