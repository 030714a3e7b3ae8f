import subprocess
import sys

from rlinf_workers import spans


def test_processes_of_a_machine_have_one_clock():
    command = [sys.executable, "-c", "from rlinf_workers import spans; print(spans._UNIX_NS)"]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(child.stdout) == spans._UNIX_NS
