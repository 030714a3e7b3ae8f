"""SGLang as a generation engine: continuous batching in its own processes.

    engine.py     SGLangEngine, which the rollout stage uses
    options.py    server arguments: those that determine memory and times, and those that no recipe may set
    arguments.py  all arguments of an engine: those of the recipe, and those set here
    requests.py   converts prompts and sampling settings to requests, and outputs to answers
    server.py     starts sglang.Engine
    child.py      the code in SGLang's scheduler processes
    processors/   pictures of requests, in place of SGLang's own processors

Nothing outside this folder imports it, so a process without SGLang never needs it. Facts about SGLang were read from
version 0.5.23.
"""
