import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))  # the kernels that the golden vectors come from
