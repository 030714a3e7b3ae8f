"""`rlinf eval`: evaluates a model on benchmark problems; a killed evaluation can be resumed.

model.py       finds and checks the model folder
run_prompt.py  prompt settings of the run that trained the model
benchmarks.py  files -> problems with prompts that fit
folder.py      the evaluation's folder: settings, samples as they come, result
run.py         the flow prompts -> rollout -> reward on all devices
scores.py      samples -> avg@k, pass@k, maj@k with their errors
"""

from rlinf.evaluation.run import EvalRun, prepare

__all__ = ["EvalRun", "prepare"]
