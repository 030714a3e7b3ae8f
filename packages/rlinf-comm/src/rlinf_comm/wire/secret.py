"""The secret of a job: whoever knows it belongs to the job, and nobody else may join, look up or send anything.

    RLINF_JOB_SECRET=...            32 random characters or more, or
    RLINF_JOB_SECRET_FILE=...       a file with them, of this user and readable by nobody else (chmod 600)

Where neither is set, job_secret() makes one and puts it into this process's environment, so that the children that it
starts from then on have it too. That is enough on one machine; peers that listen to others need one set by hand.

It proves (handshake.py, HMAC-SHA256 over fresh random numbers of both sides) and is never sent. What travels between
peers is not encrypted: README.md says what this protects against, and what not.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import pathlib
import secrets
import stat
import threading

from rlinf_comm.errors import NotTrusted

SECRET_VARIABLE = "RLINF_JOB_SECRET"
"""The env var with the job's secret."""
FILE_VARIABLE = "RLINF_JOB_SECRET_FILE"
"""The env var with the path of a file that contains the job's secret."""
MIN_CHARACTERS = 32
"""16 random bytes in hexadecimal: nobody can try them all."""

HOW_TO_SET = (
    f"set {SECRET_VARIABLE} for all processes of the job, or {FILE_VARIABLE} to a file of mode 0600, to the same "
    f"{MIN_CHARACTERS} random characters or more (python -c 'import secrets; print(secrets.token_hex(32))')"
)

_making = threading.Lock()
_made_here: list[str] = []
"""What job_secret() has made in this process, for messages."""


def job_secret() -> bytes:
    """The secret of this job; where none is set, one is made for this process and the children that it starts later.

    Raises:
        NotTrusted: too short, or a file that others could read.
    """
    with _making:
        secret = _set_secret()
        if secret is None:
            _made_here.append(secrets.token_hex(32))
            os.environ[SECRET_VARIABLE] = secret = _made_here[-1]
    return secret.encode()


def key_for(purpose: str, of: bytes = b"") -> bytes:
    """A key of 32 bytes that only this job can make, a different one for each purpose."""
    return hmac.digest(job_secret(), f"rlinf-comm {purpose} ".encode() + of, "sha256")


def require_secret_beyond(host: str, what: str) -> None:
    """Raises NotTrusted when `what` would be open to other machines and the job has no secret that they could have."""
    if not is_loopback(host) and _set_secret() in (None, *_made_here):
        raise NotTrusted(
            f"{what} can be reached from other machines at {host}, and this job has no secret: {HOW_TO_SET}"
        )


def where_it_comes_from() -> str:
    """Says where the job secret comes from, for messages."""
    if os.environ.get(SECRET_VARIABLE) in _made_here:
        return "this process made its job secret itself, and only children that it starts afterwards have the same"
    return (
        f"this process has its job secret from {SECRET_VARIABLE if os.environ.get(SECRET_VARIABLE) else FILE_VARIABLE}"
    )


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address leads to this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _set_secret() -> str | None:
    text, path = os.environ.get(SECRET_VARIABLE), os.environ.get(FILE_VARIABLE)
    if text:
        return _checked(text, SECRET_VARIABLE)
    return _checked(_read(pathlib.Path(path)), f"{FILE_VARIABLE}={path}") if path else None


def _checked(text: str, source: str) -> str:
    if len(text) < MIN_CHARACTERS:
        raise NotTrusted(f"{source}: a job secret of {len(text)} characters; {HOW_TO_SET}")
    return text


def _read(path: pathlib.Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not keep us waiting
    except OSError as error:
        raise NotTrusted(f"{FILE_VARIABLE}={path} cannot be read: {error.strerror}") from error
    with open(descriptor) as file:
        status = os.fstat(descriptor)  # of what is open, which nobody can put another file in the place of
        if not stat.S_ISREG(status.st_mode):
            raise NotTrusted(f"{FILE_VARIABLE}={path} is no regular file")
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
            raise NotTrusted(
                f"{FILE_VARIABLE}={path} has the mode {stat.S_IMODE(status.st_mode):04o} and belongs to user "
                f"{status.st_uid}; it must be yours and readable by you alone (chmod 600 {path})"
            )
        return file.read().strip()
