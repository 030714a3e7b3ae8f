"""What the embodied job must know of its environment and its policy before any process starts.

One environment is made, stepped once and closed, so that mistakes in its id, its options and its first numbers are
answered at once. The policy is asked what it needs of what the environment shows and takes.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlinf.errors import UserError
from rlinf.plugin_checks import named_class
from rlinf_envs import PICTURE, EnvError, EnvSpec, kind_spec, make_env
from rlinf_workers import LocalLauncher, RemoteError, WorkerLost
from rlinf_workers.launchers import Identity, WorkerSpec
from rlinf_workers.plugins import POLICIES
from rlinf_workers.policies import Needs, Policy, PolicyError, PolicySettings
from rlinf_workers.roles import EnvInterface, EnvProbe, interface_of, one_step


def probe(spec: EnvSpec, python: str | None = None) -> EnvInterface:
    """Makes one environment of `spec`, takes one step and closes it.

    Args:
        python: interpreter of the environment that its workers run in; None: this one.

    Raises:
        UserError: it cannot be made or stepped.
    """
    if python is not None:
        return _in_venv(spec, python, "look")
    where = f"env.id={spec.id!r}"
    try:
        env = make_env(one_step(spec))
    except EnvError as error:
        raise UserError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{where} could not be made: {_last_line(error)}", hint=_place_of(error)) from error
    try:
        interface = interface_of(env, spec)
        env.close()
    except EnvError as error:
        raise UserError(f"{where}: {error}", hint=_place_of(error.__cause__)) from error
    except Exception as error:  # a batch of the user's own may raise what it likes
        raise UserError(f"{where}: {_last_line(error)}", hint=_place_of(error)) from error
    return interface


def facts_of(spec: EnvSpec, python: str | None = None) -> dict[str, str]:
    """Returns what decides an evaluation in `spec` besides seeds, actions and the time limit
    (`KindSpec.evaluation_facts`).

    Args:
        python: as `probe`, which has accepted `spec`.

    Raises: UserError.
    """
    if python is not None:
        return _in_venv(spec, python, "facts")
    try:
        return dict(kind_spec(spec.kind, spec.id).evaluation_facts(spec.id, spec.options))
    except EnvError as error:
        raise UserError(f"env.id={spec.id!r}: {error}") from error


def _in_venv(spec: EnvSpec, python: str, method: str) -> Any:
    """Calls a method of `EnvProbe` in a process of the environments' own venv."""
    where = f"env.id={spec.id!r} in {python}"
    with TemporaryDirectory(prefix="rlinf-") as folder:
        launcher = LocalLauncher()
        identity = Identity(role="env", rank=0, num_ranks=1)
        log_path = Path(folder) / "env.log"
        try:
            started = launcher.start(
                WorkerSpec(identity=identity, worker_class=EnvProbe, log_path=log_path, python=python)
            )
            return started.call(method, spec).result()
        except RemoteError as error:
            text = error.message if error.error_type == EnvError.__name__ else f"{error.error_type}: {error.message}"
            hint = f"raised in {error.raised_in}" if error.raised_in else None
            raise UserError(f"{where}: {text}", hint=hint) from error
        except WorkerLost as error:
            raise UserError(f"{where} could not be made: {error}") from error
        finally:
            launcher.shutdown()


def needs_of(policy: PolicySettings, env_id: str) -> Needs:
    """What the policy needs in an environment that shows and takes what its settings say.

    Raises: UserError for a policy that is not there, has no such options or cannot act in this environment.
    """
    where = f"policy.name={policy.name!r}"
    arguments, keys = (policy.fields, policy.actions), {"at": "policy.name", "options_at": "policy.options"}
    policy_class = named_class(POLICIES, policy.name, policy.options, *arguments, **keys, base=Policy, seed=policy.seed)
    try:
        needs: Needs = policy_class.needs(policy.fields, policy.actions, **policy.options)
    except PolicyError as error:
        raise UserError(f"{where} cannot act in env.id={env_id!r}: {error}") from error
    except Exception as error:  # the policy may be the user's own and raise what it likes
        raise UserError(f"{where}, policy.options: {_last_line(error)}", hint=_place_of(error)) from error
    if lacking := [name for name in needs.reads if name not in policy.fields]:
        shows_pictures = any(name.startswith(PICTURE) for name in policy.fields)
        another = "--policy.name cnn, which looks at pictures" if shows_pictures else "another policy"
        raise UserError(
            f"{where} reads {', '.join(lacking)}, and env.id={env_id!r} shows {', '.join(sorted(policy.fields))}",
            hint=f"choose options of the environment that show it, or {another}",
        )
    return needs


def _last_line(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def _place_of(error: BaseException | None) -> str | None:
    """File and line where the environment's own code raised, if that is why."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    if error is None or error.__traceback__ is None or isinstance(error, EnvError):
        return None
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised in {frame.filename}:{frame.lineno}"
