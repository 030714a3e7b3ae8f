"""Tools that an agent's policy may call, and what their calls result in.

base.py has the protocol; registry.py creates tools by name; checked.py has the checks around every call; episode.py has
all tools of an episode. Each other file is one kind of tool. Imports no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
