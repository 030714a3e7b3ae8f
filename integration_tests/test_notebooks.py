"""The notebooks of docs/notebooks run as they stand, in a Jupyter kernel of their own and in an empty folder. A cell
that trains can be interrupted."""

import json
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from command_line import END_TIMEOUT_S, TINY_SORT, all_gone, environment, logged_processes, steps_done

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
TRAINING = ("train-and-plot", "custom-reward")
"""Notebooks that start workers."""


def notebooks() -> list[Path]:
    paths = sorted(FOLDER.glob("*.ipynb"))
    assert {path.stem for path in paths} > set(TRAINING)
    return paths


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)


@pytest.mark.slow
@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=END_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env=environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.get("name") == "stderr" and "Traceback" in output.text]


class Kernel:
    """A kernel in a folder, whose cells can be interrupted."""

    def __init__(self, folder: Path) -> None:
        self._manager, self._client = start_new_kernel(kernel_name="python3", cwd=str(folder), env=environment())

    def run(self, cell: str, interrupt_when: Callable[[], bool] | None = None) -> str:
        """Executes a cell, and interrupts it once the condition holds. Returns the name of the error that ended it,
        or its output."""
        request = self._client.execute(cell)
        output, deadline = "", time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline:
            if interrupt_when is not None and interrupt_when():
                self._manager.interrupt_kernel()
                interrupt_when = None
            message = self._message()
            if message is None or message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "error":
                output = content["ename"]
            elif message["msg_type"] == "stream":
                output += content["text"]
            elif content.get("execution_state") == "idle":
                return output
        raise AssertionError(f"the cell does not end: {output}")

    def _message(self) -> dict[str, Any] | None:
        try:
            return self._client.get_iopub_msg(timeout=0.05)
        except queue.Empty:
            return None

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


@pytest.mark.slow
def test_a_cell_that_is_interrupted_ends_its_workers_and_its_run_goes_on(kernel: Kernel, tmp_path: Path):
    keys = {
        key: {"true": True, "false": False, "null": None}.get(str(value), value) for key, value in TINY_SORT.items()
    }
    assert kernel.run(f"import rlinf\nkeys = {keys | {'run.num_steps': 10_000}!r}") == ""
    moments: dict[str, Callable[[Path], bool]] = {
        "starting": lambda run: bool(logged_processes(run)),
        "training": lambda run: steps_done(run) > 1,
    }
    for name, is_now in moments.items():
        run = tmp_path / name
        train = f"rlinf.train('sort-grpo', keys, output='{name}')"
        assert kernel.run(train, lambda run=run, is_now=is_now: is_now(run)) == "KeyboardInterrupt", name
        assert all_gone([pid for pids in logged_processes(run).values() for pid in pids]), name
        num_steps = steps_done(run) + 1
        kernel.run(f"rlinf.Run('{name}').resume(run={{'num_steps': {num_steps}}})")
        result = json.loads((run / "result.json").read_text())
        assert (result["num_steps"], steps_done(run)) == (num_steps, num_steps), name
