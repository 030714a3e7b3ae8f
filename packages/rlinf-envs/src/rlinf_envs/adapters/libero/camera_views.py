"""Moves of a camera around the middle of the table, as LIBERO-Plus names them (arXiv:2510.13626).

Angles are rounded as there: positions and quaternions to four decimals after every turn.
"""

from __future__ import annotations

import math

import numpy as np

from rlinf_envs.adapters.libero.variants import CameraView

_MIDDLE = np.array([0.0, 0.0, 0.8])
"""Point that the camera is moved around, in metres."""
_DECIMALS = 4


def moved(position: np.ndarray, wxyz: np.ndarray, view: CameraView) -> tuple[np.ndarray, np.ndarray]:
    """Returns the position [3] in metres and the orientation [4] of a camera after a move."""
    place, turn = np.array(position, dtype=np.float64), np.array(wxyz, dtype=np.float64)
    if view.up:
        upwards = _turn_about_y(view.up)
        place = np.round(_MIDDLE + _rotated(upwards, place - _MIDDLE), _DECIMALS)
        turn = np.round(_product(upwards, turn), _DECIMALS)
    sideways = _turn_about_z(view.around)
    place = np.round(_rotated(sideways, place), _DECIMALS)
    turn = np.round(_product(sideways, turn), _DECIMALS)
    if view.distance != 100:
        place = np.round(_MIDDLE + (place - _MIDDLE) * (view.distance / 100), _DECIMALS)
    if view.turn:
        turn = np.round(_product(_turn_about_z(view.turn), turn), _DECIMALS)
    if view.tilt:
        turn = np.round(_product(_turn_about_y(view.tilt), turn), _DECIMALS)
    return place, turn


def _turn_about_z(degrees: int) -> np.ndarray:
    half = math.radians(degrees) / 2
    return np.array([math.cos(half), 0.0, 0.0, math.sin(half)])


def _turn_about_y(degrees: int) -> np.ndarray:
    """Positive angles raise the camera, so they turn from x to z."""
    half = -math.radians(degrees) / 2
    return np.array([math.cos(half), 0.0, math.sin(half), 0.0])


def _product(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the unit quaternion [w, x, y, z] of `other`, then `one`."""
    w, x, y, z = one
    matrix = np.array([[w, -x, -y, -z], [x, w, -z, y], [y, z, w, -x], [z, -y, x, w]])
    product = matrix @ (other / np.linalg.norm(other))
    return product / np.linalg.norm(product)


def _rotated(turn: np.ndarray, vector: np.ndarray) -> np.ndarray:
    w, axis = turn[0], turn[1:]
    return vector + 2 * np.cross(axis, np.cross(axis, vector) + w * vector)
