"""ManiSkill's robots drawn by their collision shapes: grey and a little angular, at a fraction of the triangles.

The visual meshes of a Panda have 135,000 triangles, which is most of the time of a picture drawn in software; its
collision hulls have a hundredth of that. Physics reads the collision shapes alone, so that no trajectory changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_GREY = [0.6, 0.6, 0.62, 1.0]
_OF_MESHES = ("convex_mesh", "nonconvex_mesh", "multiple_convex_meshes")


def with_lite_robot(task_class: type[Any]) -> type[Any]:
    """The class of a task whose robots are loaded so. Its objects and scene stay as they are."""

    class Lite(task_class):
        def _load_agent(self, *args: Any, **kwargs: Any) -> None:
            with _drawn_by_collision_shapes():
                super()._load_agent(*args, **kwargs)

    Lite.__name__, Lite.__qualname__ = task_class.__name__, task_class.__qualname__
    return Lite


@contextlib.contextmanager
def _drawn_by_collision_shapes() -> Iterator[None]:
    """Inside, articulations are built so."""
    from mani_skill.utils.building.articulation_builder import ArticulationBuilder

    original = ArticulationBuilder.build

    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        for link in self.link_builders:
            if link.collision_records:  # a part without any, such as a camera's mount, keeps its own
                link.visual_records = [_visual_of(record) for record in link.collision_records]
        return original(self, *args, **kwargs)

    setattr(ArticulationBuilder, "build", build)  # noqa: B010  the checker knows its signature
    try:
        yield
    finally:
        setattr(ArticulationBuilder, "build", original)  # noqa: B010


def _visual_of(record: Any) -> Any:
    """What draws a `CollisionShapeRecord`."""
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
