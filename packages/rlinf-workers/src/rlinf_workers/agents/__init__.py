"""Agents: episodes of many turns, whose every token is kept as the engine served it.

sessions.py keeps tokens; templates/ and tool_formats/ read and write conversations; server.py serves them over HTTP;
tools/ has what a policy may call; host.py runs episodes beside a rollout rank, which process.py is the rank's end of.
records.py is what an episode leaves behind. Nothing in this folder imports torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
