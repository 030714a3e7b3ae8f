"""SGLang as a generation engine: prompts batched continuously, in processes of its own.

    engine.py     SGLangEngine, what the rollout stage speaks to
    arguments.py  server arguments: those of the recipe, ours, and those that nobody may set
    requests.py   prompts and sampling settings to requests, and what comes back to completions
    server.py     sglang.Engine in a thread of its own, and its processes, which are watched
    child.py      what runs in SGLang's scheduler processes

Nothing outside this folder imports it, so that a process without SGLang never needs it. Facts about SGLang were read
from version 0.5.23.
"""
