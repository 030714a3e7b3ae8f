from .api import Run as Run, load_config as load_config, load_policy as load_policy, plan as plan, train as train
from .errors import RunFailed as RunFailed, UserError as UserError

__version__: str
