"""A scripted motion for LIBERO's tasks: what to do next, from the positions of the simulation, one action at a time.

It takes an object by its middle, or by its rim where it is wider than the gripper, carries it over its goal, lowers it
until it touches something and lets it go; drawers are pulled by their handles, and the stove's knob is turned. In an
open drawer the hand lies across, since the cabinet and what stands on it leave it no room along the drawer. Nothing but
actions moves the simulation.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlinf_envs.adapters.libero.scene import LiberoScene

DOWN = np.array([[0.0, 1, 0], [1, 0, 0], [0, 0, -1]])
"""The hand's axes in the world, as columns: it points down, its fingers lie along y."""
SIDEWAYS = np.array([[0.0, 1, 0], [0, 0, -1], [-1, 0, 0]])
"""It points along -y, its fingers lie one above the other."""
OPEN, CLOSED = -1.0, 1.0
_GRIPPER_WIDTH = 0.07
_FINGER_LENGTH = 0.025
"""Metres from where the fingers meet up to the palm, less some room."""
_MOVE, _TURN = 0.05, 0.5
"""Metres and radians of an action of 1."""
_GRIPPER_STEPS = 10
"""Actions in which the gripper opens or closes; robosuite moves its target by a quarter of its half width in each."""
_MAX_TRIALS = 3
_RIM, _DRAWER_RIM = (0.006, 0.02), (0.018, 0.014)
"""Metres from an object's edge inwards and from its top down to where its rim is taken. In a drawer the open fingers
have to fit between the rim and the wall, and the palm has to stay above the wall."""


class Motion:
    """The actions [7] of an episode, made while it goes on."""

    def __init__(self, scene: LiberoScene) -> None:
        self._env = scene._env
        self._model = scene._model
        self._data = scene._env.sim.data._data
        self._hand_site = scene._hand_site
        self._down = DOWN

    def actions(self) -> Iterator[np.ndarray]:
        """Those that bring the task to its goal, more than are needed where something is dropped."""
        (goal,) = self._env.parsed_problem["goal_state"]
        yield from getattr(self, f"_{goal[0]}")(*goal[1:])

    def _open(self, region: str) -> Iterator[np.ndarray]:
        handle = self._handle(region)
        yield from self._go(handle + _by(0, 0.12, 0), OPEN, SIDEWAYS, near=0.01)
        yield from self._go(handle + _by(0, 0.01, 0), OPEN, SIDEWAYS)
        yield from self._stay(CLOSED, SIDEWAYS)
        yield from self._go(handle + _by(0, 0.25, 0), CLOSED, SIDEWAYS, limit=40)
        yield from self._stay(OPEN, SIDEWAYS)
        yield from self._go(self._hand + _by(0, 0.08, 0), OPEN, SIDEWAYS, near=0.02)

    def _turnon(self, name: str) -> Iterator[np.ndarray]:
        knob = self._body(f"{name}_button") + _by(0, 0, 0.035)
        yield from self._go(knob + _by(0, 0, 0.1), OPEN, near=0.01)
        yield from self._go(knob, OPEN)
        yield from self._stay(CLOSED)
        yield from self._stay(CLOSED, _turned(DOWN, 1.2), count=60)

    def _on(self, name: str, other: str, *, aside: np.ndarray | None = None) -> Iterator[np.ndarray]:
        drawer = self._drawer_around(name)
        self._down = DOWN if drawer is None else self._across(drawer)
        for _ in range(_MAX_TRIALS):
            yield from self._take(name, drawer)
            if aside is not None:  # out from under a drawer
                yield from self._go(self._hand + aside, CLOSED, near=0.01)
            yield from self._go(self._hand + _by(0, 0, 0.1), CLOSED, near=0.02)
            yield from self._put(name, other)

    def _in(self, name: str, region: str) -> Iterator[np.ndarray]:
        if "cabinet" not in region:
            yield from self._on(name, region)
            return
        yield from self._open(region)
        yield from self._go(self._hand + _by(0, 0, 0.1), OPEN, near=0.02)
        yield from self._on(name, region, aside=_by(-0.08, 0, 0.02))

    def _take(self, name: str, drawer: str | None) -> Iterator[np.ndarray]:
        low, high = self._box(name)
        place = (low + high) / 2
        place[2] = max(place[2], high[2] - _FINGER_LENGTH, low[2] + 0.012)
        if high[1] - low[1] > _GRIPPER_WIDTH:
            inwards, below = _RIM if drawer is None else _DRAWER_RIM
            edge = self._down[:2, 0]  # along the fingers
            if drawer is not None and edge @ (self._site(drawer) - place)[:2] < 0:
                edge = -edge  # where the drawer has more room
            place[:2] += edge * ((high[1] - low[1]) / 2 - inwards)
            place[2] = max(low[2] + 0.01, high[2] - below)
        yield from self._go(np.array([*place[:2], max(self._hand[2], high[2] + 0.1)]), OPEN, near=0.01)
        yield from self._go(place, OPEN)
        yield from self._stay(CLOSED)

    def _put(self, name: str, other: str) -> Iterator[np.ndarray]:
        """The object's origin goes over that of another object, or over the middle of a region."""
        is_region = other in self._env.object_sites_dict
        place = self._site(other) if is_region else self._body(self._root(other))
        rise = max(0.0, place[2] + 0.1 - self._box(name)[0][2])
        yield from self._go(self._hand + _by(0, 0, rise), CLOSED, near=0.02)
        to_place = place - self._body(self._root(name))
        yield from self._go(self._hand + _by(to_place[0], to_place[1], 0), CLOSED, near=0.01)
        for _ in range(60):
            if self._touches(name):
                break
            to_place = place - self._body(self._root(name))
            yield self._action(self._hand + _by(to_place[0], to_place[1], -0.02), CLOSED)
        yield from self._stay(OPEN)
        yield from self._go(self._hand + _by(0, 0, 0.1), OPEN, near=0.02)

    def _go(
        self, place: np.ndarray, gripper: float, turn: np.ndarray | None = None, *, near: float = 0.004, limit: int = 60
    ) -> Iterator[np.ndarray]:
        """Until the hand is that near to a place, in metres, or the actions are used up."""
        for _ in range(limit):
            if np.abs(place - self._hand).max() < near:
                return
            yield self._action(place, gripper, turn)

    def _stay(
        self, gripper: float, turn: np.ndarray | None = None, *, count: int = _GRIPPER_STEPS
    ) -> Iterator[np.ndarray]:
        """While the gripper opens or closes, or the hand turns."""
        place = self._hand
        for _ in range(count):
            yield self._action(place, gripper, turn)

    def _action(self, place: np.ndarray, gripper: float, turn: np.ndarray | None = None) -> np.ndarray:
        """The action that moves the hand to a place and turns it to its axes there (None: those of a hand that points
        down), as far as one action does."""
        rotations: Any = importlib.import_module("scipy.spatial.transform").Rotation
        axes = self._data.site_xmat[self._hand_site].reshape(3, 3)
        turned = rotations.from_matrix((self._down if turn is None else turn) @ axes.T).as_rotvec()
        moved = np.concatenate([2 * (place - self._hand) / _MOVE, turned / _TURN])
        return np.concatenate([np.clip(moved, -1.0, 1.0), [gripper]])

    @property
    def _hand(self) -> np.ndarray:
        """[3]: where the fingers meet."""
        return self._data.site_xpos[self._hand_site].copy()

    def _site(self, name: str) -> np.ndarray:
        return self._data.site_xpos[self._model.site(name).id].copy()

    def _body(self, name: str) -> np.ndarray:
        return self._data.xpos[self._model.body(name).id].copy()

    def _root(self, name: str) -> str:
        """The body of an object that its others hang on."""
        return self._env.get_object(name).root_body

    def _drawer_around(self, name: str) -> str | None:
        """The region of the drawer that an object begins in."""
        regions = (state[2] for state in self._env.parsed_problem["initial_state"] if state[:2] == ["in", name])
        return next((region for region in regions if "cabinet" in region), None)

    def _across(self, region: str) -> np.ndarray:
        """The hand's axes where it points down and its fingers lie along a drawer's width."""
        drawer = self._model.site_bodyid[self._model.site(region).id]
        width = self._data.xmat[drawer].reshape(3, 3)[:, 0]
        return _turned(DOWN, np.arctan2(-width[0], width[1]))

    def _handle(self, region: str) -> np.ndarray:
        """[3]: the middle of what sticks out furthest of a drawer."""
        drawer = self._model.site_bodyid[self._model.site(region).id]
        geoms = np.flatnonzero((self._model.geom_bodyid == drawer) & (self._model.geom_group == 0))
        return max((self._data.geom_xpos[geom].copy() for geom in geoms), key=lambda place: place[1])

    def _box(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """[3], [3]: corners of the box around the shapes of an object that collide, along the world's axes."""
        corners = []
        for geom in np.flatnonzero(self._owner() == self._model.body(self._root(name)).id):
            if self._model.geom_group[geom] == 0:
                axes = self._data.geom_xmat[geom].reshape(3, 3)
                middle, half = np.split(self._model.geom_aabb[geom], 2)
                middle, half = self._data.geom_xpos[geom] + axes @ middle, np.abs(axes) @ half
                corners += [middle - half, middle + half]
        return np.min(corners, axis=0), np.max(corners, axis=0)

    def _touches(self, name: str) -> bool:
        """Whether an object touches anything but the robot."""
        robot = self._model.body_rootid[self._model.site_bodyid[self._hand_site]]
        held = self._model.body(self._root(name)).id
        pairs = self._owner()[self._data.contact.geom]
        return any(held in pair and robot not in pair and pair[0] != pair[1] for pair in pairs)

    def _owner(self) -> np.ndarray:
        """[number of shapes]: the root of each shape's body."""
        return self._model.body_rootid[self._model.geom_bodyid]


def _by(x: float, y: float, z: float) -> np.ndarray:
    """[3]: so many metres along the world's axes."""
    return np.array([x, y, z])


def _turned(axes: np.ndarray, angle: float) -> np.ndarray:
    """The axes turned about the vertical, in radians."""
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]]) @ axes
