"""Two versions of a tiny model for the agent of examples/: python make_models.py ARCHITECTURE FIRST SECOND"""

import shutil
import sys
from pathlib import Path

from sglang_cpu.tiny_model import write_tiny_model

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "session_v2_agentic"))

from warm_start_sglang import warm_start

architecture, first, second = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
write_tiny_model(first, architecture)
warm_start(first)
shutil.copytree(first, second)
warm_start(second, steps=20, seed=1)
