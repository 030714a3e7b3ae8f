"""MuJoCo chooses how it draws when it is first imported, which any test of a process may do."""

import pathlib
import sys

from rlinf_envs.workarounds.mujoco_drawing import choose_drawing

choose_drawing()
sys.path.append(str(pathlib.Path(__file__).parent))  # for libero_motion.py
