"""What a process has named goes away with it, however it ends."""

import stat
import subprocess
import sys
import time
from pathlib import Path

from rlinf_workers.leftovers import SweptFolder

KILLED = """
import os, sys
from rlinf_workers.leftovers import SweptFolder
folder = SweptFolder("rlinf-test-")
(folder.path / "a file").write_text("x")
folder.also(sys.argv[1])
print(folder.path, flush=True)
for process in os.listdir("/proc"):
    try:
        if process.isdigit() and open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[1] == str(os.getpid()):
            os.kill(int(process), 9)
    except OSError:
        pass
os.killpg(os.getpgid(0), 9)
"""


def test_a_folder_is_swept_when_its_process_is_killed_with_its_children_and_its_group(tmp_path: Path):
    beside, other = tmp_path / "named too", tmp_path / "other"
    for path in (beside, other):
        path.write_text("x")
    command = [sys.executable, "-c", KILLED, str(beside)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert done.returncode == -9
    folder = Path(done.stdout.strip())
    deadline_s = time.monotonic() + 30
    while (folder.exists() or beside.exists()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not folder.exists() and not beside.exists() and other.exists()


def test_no_other_user_comes_into_a_folder():
    """The socket of an engine's processes is in one."""
    swept = SweptFolder("rlinf-test-")
    assert stat.S_IMODE(swept.path.stat().st_mode) == 0o700
    swept.close()


def test_a_folder_is_gone_once_it_is_closed(tmp_path: Path):
    swept = SweptFolder("rlinf-test-")
    (swept.path / "a file").write_text("x")
    swept.also(tmp_path / "was never made")
    swept.close()
    swept.close()
    assert not swept.path.exists()
