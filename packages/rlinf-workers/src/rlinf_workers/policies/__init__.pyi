from .base import (
    Needs as Needs,
)
from .base import (
    Policy as Policy,
)
from .base import (
    PolicyError as PolicyError,
)
from .base import (
    PolicySettings as PolicySettings,
)
from .base import (
    make_policy as make_policy,
)
from .base import (
    outline_policy as outline_policy,
)
from .spec import (
    ActingCost as ActingCost,
)
from .spec import (
    PolicySpec as PolicySpec,
)
