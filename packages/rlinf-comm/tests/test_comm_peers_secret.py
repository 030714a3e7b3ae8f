"""The secret of a job: where it comes from, and who may have it."""

import os
import subprocess
import sys

import pytest

from rlinf_comm import NotTrusted
from rlinf_comm.peers import Peer, job_secret
from rlinf_comm.wire import secret
from rlinf_comm.wire.secret import FILE_VARIABLE, SECRET_VARIABLE, key_for


@pytest.fixture
def no_secret(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "")
    monkeypatch.setattr(secret, "_made_here", [])


def test_one_is_made_and_handed_to_children(no_secret):
    new_secret = job_secret()
    assert len(new_secret) >= 32
    program = "from rlinf_comm.peers import job_secret; print(job_secret().decode())"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout.strip().encode() == new_secret == job_secret()


def test_it_is_read_from_a_file_of_mine_alone(no_secret, monkeypatch, tmp_path):
    path = tmp_path / "secret"
    path.write_text("x" * 40 + "\n")
    path.chmod(0o600)
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    assert job_secret() == b"x" * 40
    path.chmod(0o640)
    with pytest.raises(NotTrusted, match=r"has the mode 0640 .*\(chmod 600"):
        job_secret()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_refused(no_secret, monkeypatch, tmp_path):
    path = tmp_path / "secret"
    path.write_text("x" * 40)
    path.chmod(0o600)
    os.chown(path, 65534, 65534)
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    with pytest.raises(NotTrusted, match="belongs to user 65534"):
        job_secret()


def test_short_and_missing_ones_are_named(no_secret, monkeypatch, tmp_path):
    monkeypatch.setenv(SECRET_VARIABLE, "password")
    with pytest.raises(NotTrusted, match=f"{SECRET_VARIABLE}: a job secret of 8 characters; set"):
        job_secret()
    monkeypatch.setenv(SECRET_VARIABLE, "")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(NotTrusted, match="cannot be read: No such file"):
        job_secret()
    os.mkfifo(tmp_path / "pipe", 0o600)
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "pipe"))
    with pytest.raises(NotTrusted, match="no regular file"):
        job_secret()


def test_what_others_can_reach_needs_a_secret_that_was_set(no_secret):
    for call in (
        lambda: Peer.listen("a", host="192.0.2.77"),
        lambda: Peer.join("192.0.2.77:29400", "a"),
        lambda: Peer.join("0.0.0.0:29400", "a", host="127.0.0.1"),
    ):
        with pytest.raises(NotTrusted, match=f"can be reached from other machines .* set {SECRET_VARIABLE}"):
            call()
    with Peer.listen("a"), pytest.raises(NotTrusted):  # now one has been made, which no other machine has
        Peer.listen("b", host="192.0.2.77")


def test_keys_differ_by_purpose_and_by_what_they_are_for():
    assert len({key_for("peer", b"a"), key_for("peer", b"b"), key_for("directory")}) == 3
