import numpy as np
import pytest

metaworld_env = pytest.importorskip("rlinf_envs.adapters.metaworld.env", reason="needs Meta-World")
mujoco = pytest.importorskip("mujoco", reason="needs MuJoCo")

from rlinf_envs.workarounds.mujoco_drawing import Painter  # noqa: E402
from rlinf_envs.workarounds.mujoco_meshes import coarse_meshes  # noqa: E402

SCENE = """
<mujoco>
  <asset><mesh name="one" vertex="{vertices}" face="{faces}"/></asset>
  <worldbody>
    <light pos="0 0 3"/><camera name="front" pos="0 -.5 0" xyaxes="1 0 0 0 0 1"/>
    <geom type="mesh" mesh="one"/>
  </worldbody>
</mujoco>
"""


@pytest.fixture
def model():
    """A ball of a radius of 10 cm from 24 rings of 48 vertices and its poles."""
    angles = [(np.pi * (i + 1) / 25, np.pi * j / 24) for i in range(24) for j in range(48)]
    vertices = [(np.sin(a) * np.cos(b), np.sin(a) * np.sin(b), np.cos(a)) for a, b in angles] + [(0, 0, 1), (0, 0, -1)]
    faces = []
    for j in range(48):
        after = (j + 1) % 48
        faces += [(1152, j, after), (1153, 23 * 48 + after, 23 * 48 + j)]
        for top in range(0, 23 * 48, 48):
            faces += [(top + j, top + 48 + j, top + 48 + after), (top + j, top + 48 + after, top + after)]
    return model_of(0.1 * np.array(vertices), faces)


def model_of(vertices, faces):
    text = [" ".join(map(str, np.ravel(values))) for values in (vertices, faces)]
    return mujoco.MjModel.from_xml_string(SCENE.format(vertices=text[0], faces=text[1]))


def test_coarse_meshes_keep_the_shape_with_fewer_triangles(model):
    full_count, full_faces = int(model.mesh_facenum[0]), model.mesh_face.copy()
    with coarse_meshes(model, 0.03):
        count = int(model.mesh_facenum[0])
        faces = model.mesh_face[:count]
        assert count < full_count / 4
        assert len(np.unique(np.sort(faces, axis=1), axis=0)) == count, "no triangle twice"
        corners = model.mesh_vert[faces].astype(np.float64)  # each corner is one of the mesh's own vertices
        volume = np.einsum("fi,fi->f", corners[:, 0], np.cross(corners[:, 1], corners[:, 2])).sum() / 6
        assert volume == pytest.approx(4 / 3 * np.pi * 0.1**3, rel=0.2), "closed, and turned outwards"
        normals = model.mesh_normal[model.mesh_facenormal[:count]]
        outwards = corners / np.linalg.norm(corners, axis=2, keepdims=True)
        assert (normals * outwards).sum(2).min() > 0.9, "normals went with their triangles"
    assert model.mesh_facenum[0] == full_count
    assert np.array_equal(model.mesh_face, full_faces), "collisions see the full mesh"


def test_thin_walls_keep_both_faces():
    """Two plates of 20 x 20 cm, each 4 mm thick: the two faces of a plate lie in the same cells."""
    side = np.linspace(-0.1, 0.1, 21)
    vertices = [(x, y, z) for z in (-0.052, -0.048, 0.048, 0.052) for x in side for y in side]
    faces = []
    for layer in range(4):
        for i, j in np.ndindex(20, 20):
            a = 441 * layer + 21 * i + j
            square = [(a, a + 21, a + 22), (a, a + 22, a + 1)]
            faces += square if layer % 2 else [triangle[::-1] for triangle in square]
    model = model_of(vertices, faces)
    with coarse_meshes(model, 0.03):
        count = int(model.mesh_facenum[0])
        corners = model.mesh_vert[model.mesh_face[:count]].astype(np.float64)
    assert count < len(faces) / 4
    sides = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]) / 2
    assert np.linalg.norm(sides, axis=1).sum() == pytest.approx(4 * 0.2 * 0.2, rel=0.2), "four faces"
    assert np.abs(sides.sum(0)).max() < 1e-3, "as much of each front as of each back"


def test_fast_pictures_look_like_full_ones(model):
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    fast, full = (
        Painter(f"sphere {is_fast}", model, size=64, is_fast=is_fast).picture(data, "front").astype(np.float64)
        for is_fast in (True, False)
    )
    assert full.std() > 20
    assert np.abs(fast - full).mean() < 5
