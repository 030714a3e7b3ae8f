"""The FSDP2 backend: it conforms on one rank and on two."""

from rlinf_workers.testing.backends import check_backend, check_ranks
from rlinf_workers.training.fsdp2.backend import fsdp2


def test_it_conforms_alone(tmp_path):
    check_backend(fsdp2, str(tmp_path))


def test_it_conforms_on_two_ranks(tmp_path):
    check_ranks(fsdp2, str(tmp_path), num_ranks=2, num_ranks_per_replica=1)
