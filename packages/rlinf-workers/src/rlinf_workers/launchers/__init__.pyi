from .base import (
    Identity as Identity,
)
from .base import (
    Node as Node,
)
from .base import (
    WorkerSpec as WorkerSpec,
)
from .cluster_report import (
    ClusterReport as ClusterReport,
)
from .cluster_report import (
    NodeReport as NodeReport,
)
from .cluster_report import (
    WayReport as WayReport,
)
from .credentials import (
    credential_names as credential_names,
)
from .credentials import (
    worker_variables as worker_variables,
)
from .interpreter import (
    Interpreter as Interpreter,
)
from .interpreter import (
    clean_environment as clean_environment,
)
from .interpreter import (
    examine_interpreter as examine_interpreter,
)
from .interpreter import (
    own_protocols as own_protocols,
)
from .spec import LauncherSpec as LauncherSpec
