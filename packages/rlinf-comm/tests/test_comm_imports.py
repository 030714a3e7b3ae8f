"""What `import rlinf_comm` needs: numpy and torch. Machines that only check the GPU have no more than that."""

import subprocess
import sys

PROGRAM = """
import sys
for name in ("msgspec", "hypothesis", "cupy"):
    sys.modules[name] = None  # importing it raises ImportError
import dataclasses, rlinf_comm, rlinf_comm.weights, rlinf_comm.weights.device
from rlinf_comm.weights import Layout, TensorSpec
assert rlinf_comm.unpack(rlinf_comm.pack({"a": (1, 2.5)})) == {"a": (1, 2.5)}
try:
    rlinf_comm.pack(object())
except rlinf_comm.UnsupportedValueError:
    pass
"""


def test_all_but_peers_needs_neither_msgspec_nor_cupy():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
