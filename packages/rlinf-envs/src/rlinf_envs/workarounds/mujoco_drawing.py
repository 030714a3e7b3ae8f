"""Renders MuJoCo scenes without a window, in one rendering context for all rows of a process.

MuJoCo's rendering data for a model (meshes and textures in the rendering library) takes far longer to create than the
simulation and five times its memory: 0.15 s and 130 MB for a Meta-World task in software. So it is created once per
model file, shared by all rows, and the least recently used is dropped.
"""

from __future__ import annotations

import ctypes.util
import importlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from rlinf_envs.errors import RenderingUnavailableError
from rlinf_envs.workarounds.mujoco_meshes import coarse_meshes

_MAX_PREPARED = 12
"""Models whose rendering data is kept; 2 GB for Meta-World in software."""
_COARSE_CELL_M = 0.015
"""Cell size of coarse meshes in images of 64 x 64, less than a pixel at a distance of 1.5 m; smaller in larger
images."""


def choose_drawing() -> None:
    """Selects EGL, which uses a GPU if there is one, on machines without a display. Call before MuJoCo is first
    imported. Without the library nothing is selected, because MuJoCo's import would fail."""
    # Mesa renders small images faster with one thread.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    if "MUJOCO_GL" not in os.environ and "DISPLAY" not in os.environ and ctypes.util.find_library("EGL"):
        os.environ["MUJOCO_GL"] = "egl"


class Painter:
    """Renders one row's simulation.

    Args:
        name: models of the same name differ only in positions and share rendering data.
        size: side of the images in pixels.
        is_fast: no antialiasing, shadows or reflections, and meshes reduced to the resolution of the images.
        hidden_groups: groups of the model's geometries that are not rendered.
    """

    def __init__(self, name: str, model: Any, *, size: int, is_fast: bool, hidden_groups: Sequence[int] = ()) -> None:
        mujoco = _mujoco()
        self._key = (name, size, is_fast)
        self._model = model
        self._is_fast = is_fast
        self._scene = mujoco.MjvScene(model, maxgeom=2000)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[list(hidden_groups)] = 0
        self._rectangle = mujoco.MjrRect(0, 0, size, size)

    def picture(self, data: Any, camera: str) -> np.ndarray:
        """Renders a camera of the model as [size, size, 3] uint8, a view of a new buffer with reversed rows.
        RenderingUnavailableError if rendering is not possible."""
        mujoco = _mujoco()
        prepared = _prepared(self._key, self._model)
        view = mujoco.MjvCamera()
        view.type = mujoco.mjtCamera.mjCAMERA_FIXED
        view.fixedcamid = self._model.camera(camera).id
        mujoco.mjv_updateScene(self._model, data, self._option, None, view, mujoco.mjtCatBit.mjCAT_ALL, self._scene)
        if self._is_fast:
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, prepared)
        mujoco.mjr_render(self._rectangle, self._scene, prepared)
        rows = np.empty((self._rectangle.height, self._rectangle.width, 3), np.uint8)
        mujoco.mjr_readPixels(rows, None, self._rectangle, prepared)
        return rows[::-1]  # OpenGL counts rows from the bottom


def _mujoco() -> Any:
    """Returns the module, untyped for pyright."""
    return importlib.import_module("mujoco")


_context: Any = None
_failure: str | None = None
_ready: OrderedDict[tuple[str, int, bool], Any] = OrderedDict()


def _prepared(key: tuple[str, int, bool], model: Any) -> Any:
    """Returns MuJoCo's `MjrContext` of a model and makes this process's rendering context current."""
    global _context, _failure
    mujoco = _mujoco()
    if _failure is not None:  # a second attempt would make MuJoCo exit the process
        raise RenderingUnavailableError(_failure)
    _, size, is_fast = key
    try:
        if _context is None:
            _context = mujoco.GLContext(size, size)
        _context.make_current()
        if key not in _ready:
            visual = model.vis
            visual.global_.offwidth = visual.global_.offheight = size
            if is_fast:
                quality = visual.quality
                quality.offsamples = 0
                quality.numslices, quality.numstacks, quality.numquads = 8, 4, 1  # for round shapes and planes
            with coarse_meshes(model, _COARSE_CELL_M * 64 / size) if is_fast else nullcontext():
                _ready[key] = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
    except Exception as error:  # each of MuJoCo's rendering backends raises different errors
        _failure = (
            f"MuJoCo cannot draw with MUJOCO_GL={os.environ.get('MUJOCO_GL')} ({error}); set the variable before the "
            "program starts: egl with libEGL installed, or osmesa with Mesa's libOSMesa"
        )
        raise RenderingUnavailableError(_failure) from error
    _ready.move_to_end(key)
    if len(_ready) > _MAX_PREPARED:
        _, oldest = _ready.popitem(last=False)
        oldest.free()
    return _ready[key]
