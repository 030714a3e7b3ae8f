"""Weight sync: transports the weights of a policy version from the ranks that train to the ranks that serve."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
