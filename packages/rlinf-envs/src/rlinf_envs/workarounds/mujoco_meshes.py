"""Reduces meshes to the triangles that a small image can show, because triangles dominate software rendering.

All vertices in one cell of a grid become one vertex, and triangles without area are removed (vertex clustering:
Rossignac and Borrel, "Multi-resolution 3D approximations for rendering complex scenes", 1993). A scene of Meta-World
goes from 67,800 triangles to 8,600 for images of 64 x 64, whose pixels are a little larger than the cells; software
rendering takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_FACE_FIELDS = ("mesh_face", "mesh_facenormal", "mesh_facetexcoord")


@contextmanager
def coarse_meshes(model: Any, cell: float) -> Iterator[None]:
    """Context in which the model's meshes have coarse triangles, for creating rendering data. Afterwards the full
    meshes are restored, so collisions do not change.

    Args:
        model: an `MjModel`.
        cell: side of the grid's cells in metres.
    """
    originals = {name: getattr(model, name).copy() for name in (*_FACE_FIELDS, "mesh_facenum")}
    try:
        for mesh in range(model.nmesh):
            _coarsen(model, mesh, cell)
        yield
    finally:
        for name, values in originals.items():
            getattr(model, name)[:] = values


def _coarsen(model: Any, mesh: int, cell: float) -> None:
    """Moves the remaining triangles to the front of the mesh's arrays, with their normals and texture coordinates."""
    vertices = slice(model.mesh_vertadr[mesh], model.mesh_vertadr[mesh] + model.mesh_vertnum[mesh])
    start, count = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
    cells = np.floor(model.mesh_vert[vertices] / cell).astype(np.int64)
    _, first, cell_of = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    corners = cell_of.reshape(-1)[model.mesh_face[start : start + count]]
    a, b, c = corners.T
    has_area = (a != b) & (b != c) & (a != c)
    _, distinct = np.unique(_from_lowest(corners[has_area]), axis=0, return_index=True)
    staying = np.flatnonzero(has_area)[np.sort(distinct)]
    stop = start + len(staying)
    for name in _FACE_FIELDS[1:]:
        getattr(model, name)[start:stop] = getattr(model, name)[start + staying]
    model.mesh_face[start:stop] = first[corners[staying]]
    model.mesh_facenum[mesh] = len(staying)


def _from_lowest(corners: np.ndarray) -> np.ndarray:
    """Rotates each triangle [F, 3] so that its lowest corner comes first. The orientation stays, because only front
    faces are rendered and the two faces of a thin wall may have the same corners."""
    turns = (corners.argmin(axis=1)[:, None] + np.arange(3)) % 3
    return np.take_along_axis(corners, turns, axis=1)
