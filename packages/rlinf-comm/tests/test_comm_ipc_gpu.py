"""What only a GPU can show of rlinf_comm.ipc: two processes on one device."""

import multiprocessing

import pytest
import torch

from rlinf_comm import _C
from rlinf_comm.ipc.arena import IpcArena, opened_arenas
from rlinf_comm.ipc.driver import KINDS, load_driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_C.num_cuda_devices() == 0 or not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 60
CONTENT = bytes(range(200))


def reverse(pipe, handle):
    driver = load_driver()
    arenas = opened_arenas(driver)
    place = arenas.open(handle, 0) + 1000
    driver.write(0, place, driver.read(0, place, len(CONTENT))[::-1])
    arenas.close(handle, 0)
    pipe.send("done")


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_read_and_written_in_the_other_process(kind):
    driver = load_driver()
    try:
        arena = IpcArena(driver, 0, 8 << 20, kind)
    except OSError as error:
        pytest.skip(f"{kind} handles do not work here: {error}")
    driver.write(0, arena.handle.pointer + 1000, CONTENT)
    pipe, there = SPAWN.Pipe()
    child = SPAWN.Process(target=reverse, args=(there, arena.handle), daemon=True)
    child.start()
    there.close()
    assert pipe.poll(WAIT_S) and pipe.recv() == "done"
    assert driver.read(0, arena.handle.pointer + 1000, len(CONTENT)) == CONTENT[::-1]
    child.join(WAIT_S)
