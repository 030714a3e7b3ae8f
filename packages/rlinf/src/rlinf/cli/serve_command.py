"""`rlinf serve RUN`: serves a robot policy to clients of openpi and of vla-eval."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlinf.address_space import check_address_space
from rlinf.cli.play_command import POLICY_HELP
from rlinf.config.downloads import with_downloads
from rlinf.config.overrides import Override, parse_overrides, refuse_misspelt_options
from rlinf.config.playing import TrainedConfig
from rlinf.console.live_line import LiveLine
from rlinf.errors import UserError

if TYPE_CHECKING:
    from rlinf.playing.checkpoint import TrainedPolicy

OPTIONS = ("--checkpoint", "--host", "--port", "--api-key-file", "--rename", "--traceback", "--help")
PORT = 8000
"""openpi's default, too."""

DESCRIPTION = """Serves a robot policy without exploration over a websocket: to openpi-client at ws://HOST:PORT, and to
vla-eval at ws://HOST:PORT/vla-eval."""

EPILOG = """Keys of the run's config can be overridden: --env.options.image_size 224, --cluster.threads_per_device 8,
--policy.options.num_denoising_steps 5. docs/serving.md explains it."""


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve", help="serve a robot policy to openpi-client and vla-eval", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("path", metavar="RUN", help=POLICY_HELP)
    parser.add_argument(
        "--checkpoint", metavar="WHICH", help="checkpoint of a run: newest (default), best, or step-000100"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=PORT, help=f"0: any free one (default: {PORT})")
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="clients need the key in this file, which is created if missing"
    )
    parser.add_argument(
        "--rename", metavar="MAP", help="keys of clients' observations: '{observation/left: image.front}'"
    )
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    refuse_misspelt_options(args.overrides, OPTIONS, set(TrainedConfig.model_fields), "rlinf serve")
    rename = _rename(args.rename)
    chosen = _policy(args.path, args.checkpoint, parse_overrides(args.overrides))
    for note in chosen.config.notes:
        print(f"note: {note}")
    api_key = _api_key(args.api_key_file, args.host)
    line = LiveLine()
    with line.doing("loading the policy, and creating one environment for what it shows"):
        import torch

        from rlinf.playing.loaded import acting_policy
        from rlinf.serving.server import policy_server
        from rlinf.serving.service import PolicyService

        torch.set_num_threads(chosen.config.cluster.threads_per_device)  # as workers: it decides the last bits
        policy = acting_policy(chosen.config, chosen.checkpoint)
    name = chosen.title
    service = PolicyService(policy, name, rename)

    async def serve() -> None:
        async with policy_server(service, args.host, args.port, api_key) as server:
            host, port = next(iter(server.sockets)).getsockname()[:2]
            address = f"ws://[{host}]:{port}" if ":" in host else f"ws://{host}:{port}"
            print(f"serving {name}: openpi {address}, vla-eval {address}/vla-eval")
            for field, keys in service.observations.keys.items():
                print(f"  {field}: {', '.join(keys)}", flush=True)
            await server.serve_forever()

    asyncio.run(serve())
    return 0


def _rename(text: str | None) -> Mapping[str, str]:
    """Raises: UserError."""
    if text is None:
        return {}
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"--rename {text}: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise UserError(f"--rename {text} is no map of texts", hint="--rename '{observation/left: image.front}'")
    return value


def _policy(place: str, which: str | None, overrides: list[Override]) -> TrainedPolicy:
    """Raises: UserError."""
    check_address_space()
    from rlinf.jobs.checks import check_trained_references
    from rlinf.playing.checkpoint import find_policy

    policy = find_policy(place, which, overrides)
    policy = replace(policy, config=with_downloads(policy.config))
    check_trained_references(policy.config)
    return policy


def _api_key(file: str | None, host: str) -> str | None:
    """Raises: UserError if the packages are missing, or other machines could connect without a key."""
    if missing := [name for name in ("websockets", "msgpack", "PIL") if find_spec(name) is None]:
        raise UserError(f"rlinf serve needs {', '.join(missing)}", hint="pip install 'rlinf[serve]'")
    from rlinf_comm.wire import is_loopback
    from rlinf_envs import read_secret

    if file is None:
        if not is_loopback(host):
            raise UserError(
                f"--host {host}: other machines could use the policy without a key",
                hint="give --api-key-file FILE, which is created if missing",
            )
        return None
    try:
        return read_secret(file, create=True).decode()
    except ValueError as error:
        raise UserError(f"--api-key-file {file}: {error}") from error
