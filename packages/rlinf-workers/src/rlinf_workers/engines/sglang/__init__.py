"""SGLang as a generation engine: continuous batching in its own processes.

    engine.py     SGLangEngine, which the rollout stage uses
    arguments.py  server arguments: those of the recipe, those set here, and those that nobody may set
    requests.py   converts prompts and sampling settings to requests, and outputs to completions
    server.py     sglang.Engine in its own thread, and supervision of its processes
    child.py      the code in SGLang's scheduler processes

Nothing outside this folder imports it, so a process without SGLang never needs it. Facts about SGLang were read from
version 0.5.23.
"""
