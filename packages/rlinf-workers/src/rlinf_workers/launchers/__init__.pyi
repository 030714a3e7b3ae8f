from .base import (
    Identity as Identity,
    Launcher as Launcher,
    Node as Node,
    ServiceHandler as ServiceHandler,
    StageProgress as StageProgress,
    Wait as Wait,
    WorkerHandle as WorkerHandle,
    WorkerSpec as WorkerSpec,
)
from .cluster_report import ClusterReport as ClusterReport, NodeReport as NodeReport, WayReport as WayReport
from .credentials import credential_names as credential_names, worker_variables as worker_variables
from .interpreter import (
    Interpreter as Interpreter,
    clean_env_vars as clean_env_vars,
    examine_interpreter as examine_interpreter,
    own_protocols as own_protocols,
)
from .local.launcher import LocalLauncher as LocalLauncher
from .spec import LauncherSpec as LauncherSpec
