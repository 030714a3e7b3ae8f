"""Renders ManiSkill's robots by their collision shapes: grey and slightly angular, with a fraction of the triangles.

The visual meshes of a Panda have 135,000 triangles, which dominate software rendering; its collision hulls have a
hundredth of that. Physics uses only the collision shapes, so no trajectory changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_GREY = [0.6, 0.6, 0.62, 1.0]
_OF_MESHES = ("convex_mesh", "nonconvex_mesh", "multiple_convex_meshes")


def with_lite_robot(task_class: type[Any]) -> type[Any]:
    """Returns a subclass of a task with such robots. Its objects and scene do not change."""

    class Lite(task_class):
        def _load_agent(self, *args: Any, **kwargs: Any) -> None:
            with _drawn_by_collision_shapes():
                super()._load_agent(*args, **kwargs)

    Lite.__name__, Lite.__qualname__ = task_class.__name__, task_class.__qualname__
    return Lite


@contextlib.contextmanager
def _drawn_by_collision_shapes() -> Iterator[None]:
    """Context in which articulations are built with collision shapes as visuals."""
    from mani_skill.utils.building.articulation_builder import ArticulationBuilder

    original = ArticulationBuilder.build

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        for link in self.link_builders:
            if link.collision_records:  # a part without any, such as a camera's mount, keeps its visuals
                link.visual_records = [_visual_of(record) for record in link.collision_records]
        return original(self, *args, **kwargs)

    setattr(ArticulationBuilder, "build", build)  # noqa: B010  the checker knows its signature
    try:
        yield
    finally:
        setattr(ArticulationBuilder, "build", original)  # noqa: B010


def _visual_of(record: Any) -> Any:
    """Returns the visual of a `CollisionShapeRecord`."""
    import sapien.render
    from sapien.wrapper.actor_builder import VisualShapeRecord

    material = sapien.render.RenderMaterial()
    material.base_color = _GREY
    return VisualShapeRecord(
        type="file" if record.type in _OF_MESHES else record.type,
        filename=record.filename,
        scale=record.scale,
        radius=record.radius,
        length=record.length,
        material=material,
        pose=record.pose,
    )
