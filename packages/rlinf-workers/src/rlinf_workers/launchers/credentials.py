"""Which env vars hold credentials. They stay with the driver: workers, and processes they start, run code of models,
environments and rewards, and need none of them. A config names those that custom functions need
(`cluster.pass_env_vars`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlinf_comm.wire import FILE_VARIABLE, SECRET_VARIABLE

OWN = (SECRET_VARIABLE, FILE_VARIABLE)
"""The secret of the job, without which workers cannot connect."""
ANYWHERE = re.compile("SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK")
WORD = re.compile("(?:.*(?:KEY|TOKEN)|KEYS|TOKENS)")
"""A whole word of a name: API_KEY and GITHUBTOKEN, not TOKENIZERS_PARALLELISM."""
LAST_WORD = ("AUTH", "PASS", "PAT", "PWD")
FILES = ("KUBECONFIG", "NETRC", "PGPASSFILE", "SSH_AUTH_SOCK")
"""Paths and sockets that give access to credentials."""
SETTING = re.compile(r"\d{0,6}|true|false|on|off|yes|no", re.IGNORECASE)
"""The value of a switch or a size, such as that of HF_HUB_DISABLE_IMPLICIT_TOKEN."""
URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
"""A user and a password in a URL, as proxies and databases have them."""


def is_credential(name: str, value: str) -> bool:
    """Whether an env var holds a credential, judged by its name or by a password in its value."""
    if name in OWN:
        return False
    words = re.split("[^A-Z0-9]+", name.upper().strip("_"))
    if name.upper() in FILES or ANYWHERE.search(name.upper()) or URL.search(value):
        return True
    if any(WORD.fullmatch(word) for word in words):
        return not SETTING.fullmatch(value)
    return len(words) > 1 and words[-1] in LAST_WORD


def credential_names(variables: Mapping[str, str]) -> list[str]:
    """The names of those that hold credentials."""
    return sorted(name for name, value in variables.items() if is_credential(name, value))


def without_credentials(variables: Mapping[str, str]) -> dict[str, str]:
    """All env vars except those with credentials."""
    return {name: value for name, value in variables.items() if not is_credential(name, value)}


@contextmanager
def worker_variables(more: Mapping[str, str]) -> Iterator[None]:
    """Context in which this process has the env vars of a worker: its own without credentials, plus `more`. Processes
    started in it inherit them."""
    changed = {*credential_names(os.environ), *more}
    before = {name: os.environ[name] for name in changed & os.environ.keys()}
    for name in before:
        del os.environ[name]
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more:
            os.environ.pop(name, None)
        os.environ.update(before)
