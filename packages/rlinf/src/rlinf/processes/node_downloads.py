"""Downloads models from the Hugging Face Hub once for each node of a cluster, however many workers read them there.

The driver has the models in its own cache, each in the folder of its commit. A worker on every other node downloads the
same files to the same folder, so that the paths of the config are right on all of them. On a node that shares the cache
with the driver there is nothing to download.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlinf.config.common import ClusterConfig
from rlinf.errors import UserError
from rlinf.hub import fetch_same, files_of, has_all, public_name
from rlinf.processes.env_vars import passed_env_vars
from rlinf_sched import Cluster
from rlinf_workers import Worker
from rlinf_workers.launchers import Identity, Launcher, WorkerSpec

ROLE = "downloads"


class Downloader(Worker):
    """Downloads to its node."""

    def lacks(self, folder: str, files: Sequence[str]) -> bool:
        """Whether a file of the folder is not here."""
        return not has_all(Path(folder), files)

    def download(self, folder: str, files: Sequence[str]) -> str:
        """Returns why it could not; empty if the files are here now."""
        try:
            fetch_same(Path(folder), files)
        except UserError as error:
            return str(error)
        return ""


def download_to_nodes(
    launcher: Launcher, cluster: Cluster, models: Sequence[Path], config: ClusterConfig, log_folder: Path
) -> None:
    """Returns when every node of the cluster has the models.

    Args:
        models: folders of snapshots in the driver's cache.

    Raises: UserError, WorkersError.
    """
    nodes = sorted({device.node for device in cluster.devices} - {0})
    if not nodes or not models:
        return
    (log_folder / ROLE).mkdir(parents=True, exist_ok=True)
    workers = [
        launcher.start(
            WorkerSpec(
                identity=Identity(role=ROLE, rank=rank, num_ranks=len(nodes)),
                worker_class=Downloader,
                log_path=log_folder / ROLE / f"{rank}.log",
                env_vars=passed_env_vars(config),
                node=node,
            )
        )
        for rank, node in enumerate(nodes)
    ]
    for model in models:
        files = files_of(model)
        lacking = [worker.call("lacks", str(model), files) for worker in workers]
        to_do = [(node, worker) for node, worker, lacks in zip(nodes, workers, lacking, strict=True) if lacks.result()]
        if to_do:
            numbers = ", ".join(str(node) for node, _ in to_do)
            print(f"downloading {public_name(model)} to the cluster's nodes: {numbers}", file=sys.stderr)
        answers = [(node, worker.call("download", str(model), files)) for node, worker in to_do]
        for node, answer in answers:
            if failure := answer.result():
                raise UserError(f"on node {node} of the cluster: {failure}")
    for worker in workers:
        launcher.end(worker)
