"""MuJoCo chooses how it draws when it is first imported, which any test of a process may do."""

from rlinf_envs.mujoco_drawing import choose_drawing

choose_drawing()
