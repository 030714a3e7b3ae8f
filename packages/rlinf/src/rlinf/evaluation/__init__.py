"""`rlinf eval`: a model answers benchmark problems; what comes out survives being killed and can be gone on with.

model.py       which folder holds the model, and what it allows
run_prompt.py  how the run that trained the model asked it
benchmarks.py  files -> problems with prompts that fit
folder.py      the evaluation's folder: settings, samples as they come, result
run.py         the flow prompts -> rollout -> reward on all devices
scores.py      samples -> avg@k, pass@k, maj@k with their errors
"""

from rlinf.evaluation.run import EvalRun, prepare

__all__ = ["EvalRun", "prepare"]
