"""`rlinf explain RUN`: diagnoses a run that hangs, from another terminal."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rlinf.errors import UserError
from rlinf.run_folder.plain_files import create_plain, read_plain, read_plain_json

if TYPE_CHECKING:
    from rlinf_workers.explaining import ProcessRecord, ProcessSight, Snapshot

STALE_S = 10.0
"""Seconds of silence after which the driver, which writes once a second, hangs or gets no CPU time."""
LOOK_S = 25.0
"""Seconds that the driver gets to notice the request and query workers on other hosts."""


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain",
        help="diagnose a hang: which process waits for which, and what the root cause does",
        description="Diagnoses a running job without stopping it: shows which process waits for which since when, and "
        "the stack, memory and last log lines of the root cause; for a run that has ended, how it ended. "
        "docs/explain.md explains the output.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--all", action="store_true", help="show all waits and the stacks of all processes")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rlinf.run_folder.folder import WAITS
    from rlinf.run_folder.lock import check_owner
    from rlinf_workers import printable_lines
    from rlinf_workers.explaining import (
        DRIVER,
        explain,
        explanation_json,
        explanation_text,
        process_states,
        read_snapshot,
    )

    folder: Path = args.run_folder
    manifest = _manifest(folder)
    check_owner(folder)
    try:
        snapshot = _with_own_logs(read_snapshot(read_plain(folder / WAITS)), folder)
    except FileNotFoundError:
        print(printable_lines(_ended(folder, manifest) + _choice(manifest) + _gpu_memory(folder)))
        return 0
    except UserError:
        raise  # a ValueError, too
    except ValueError as error:
        raise UserError(
            f"{folder / WAITS} was written by another version of rlinf: {error}",
            hint="use the rlinf that the run was started with",
        ) from error
    driver = next((one for one in snapshot.processes if one.name == DRIVER), None)
    if driver is None:
        raise UserError(f"{folder / WAITS} names no driver; was it edited?")
    if process_states([driver])[DRIVER].condition == "gone":
        print(printable_lines(_ended(folder, manifest) + _choice(manifest) + _gpu_memory(folder)))
        return 0
    silent_s = time.time() - snapshot.taken_s
    elsewhere = _seen_elsewhere(folder, snapshot) if silent_s <= STALE_S else []
    suspects = [DRIVER] if silent_s > STALE_S else []
    explanation = explain(snapshot, every=args.all, suspects=suspects, elsewhere=elsewhere)
    if args.json:
        print(explanation_json(explanation).decode())
        return 0
    if silent_s > STALE_S:
        print(
            f"root cause: driver (process {driver.pid}) has written nothing for {silent_s:.0f} s: it hangs or is "
            "stopped; its stack is below, and all else below is as old as that"
        )
    if driver.host != platform.node():
        print(f"the run is on {driver.host}: call rlinf explain there, which sees its processes")
    print(explanation_text(explanation, every=args.all) + _choice(manifest) + _gpu_memory(folder))
    return 0


def _choice(manifest: Mapping[str, Any]) -> str:
    """A line on the engine that `rollout.engine: auto` stands for; empty if the recipe names one."""
    from rlinf.config.reasoning import ENGINE_CHOICE

    return "".join(f"\n{note}" for note in manifest.get("notes", ()) if note.startswith(ENGINE_CHOICE))


def _gpu_memory(folder: Path) -> str:
    """Predicted and measured memory of the roles on the fullest GPU, in a table; empty if the driver counted none."""
    from rlinf.cli.table import aligned
    from rlinf.run_folder.folder import GPU_MEMORY

    if not (folder / GPU_MEMORY).is_file():
        return ""
    values = read_plain_json(folder / GPU_MEMORY)
    rows = [("peak on a GPU, GiB", "predicted", "measured", "predicted / measured")]
    for role, of_role in values["roles"].items():
        predicted, measured = of_role["predicted_bytes"], of_role["measured_bytes"]
        rows.append((role, f"{predicted / 2**30:.1f}", f"{measured / 2**30:.1f}", f"{predicted / measured - 1:+.1%}"))
    return f"\n\n{aligned(rows)}\nthe GPU has {values['device_bytes'] / 2**30:.1f}"


def _with_own_logs(snapshot: Snapshot, folder: Path) -> Snapshot:
    """Drops logs outside the run's folder, so that no file content decides which other files are read or which
    processes get a signal (those that write such a log do)."""

    def record_of(record: ProcessRecord) -> ProcessRecord:
        is_inside = Path(record.log_path).resolve().is_relative_to(folder.resolve())
        return record if is_inside else replace(record, log_path="")

    return replace(snapshot, processes=tuple(map(record_of, snapshot.processes)))


def _seen_elsewhere(folder: Path, snapshot: Snapshot) -> list[ProcessSight]:
    """Returns the processes on other hosts; the driver, which runs on this host, queries its workers there."""
    from rlinf.run_folder.folder import ASKED, SEEN
    from rlinf_workers.explaining import ProcessSight

    hosts = {record.host for record in snapshot.processes}
    if platform.node() not in hosts or len(hosts) == 1:
        return []
    (folder / SEEN).unlink(missing_ok=True)
    os.close(create_plain(folder / ASKED))
    deadline = time.monotonic() + LOOK_S
    while not (folder / SEEN).exists():
        if time.monotonic() > deadline:
            return []
        time.sleep(0.1)
    return msgspec.json.decode(read_plain(folder / SEEN), type=list[ProcessSight])


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_plain_json(folder / "manifest.json")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} is not the folder of a run: it has no manifest.json") from None
    except UserError:
        raise  # a ValueError, too
    except ValueError as error:
        raise UserError(f"{folder / 'manifest.json'} is not JSON: {error}") from error
    sessions = manifest.get("sessions") if isinstance(manifest, dict) else None
    if not isinstance(sessions, list) or not sessions or not {"started", "ended"} <= set(_keys(sessions[-1])):
        raise UserError(f"{folder / 'manifest.json'} names no session of a run; was it edited?")
    return manifest


def _keys(value: Any) -> Iterable[str]:
    return value if isinstance(value, dict) else ()


def _ended(folder: Path, manifest: dict[str, Any]) -> str:
    """Describes how a run without processes ended."""
    from rlinf.run_folder.folder import RESULT, resume_command
    from rlinf.run_folder.lock import check_free

    session = manifest["sessions"][-1]
    explanations = sorted(folder.glob("explain-*.txt"), key=lambda path: path.stat().st_mtime)
    more = f"\nexplained then: {explanations[-1]}" if explanations else ""
    more += _waits(folder)
    if session["ended"] is None:
        try:
            check_free(folder)
        except UserError:
            return f"the run in {folder} has no processes yet, or ends: it reads its model, plans, or writes a report"
        return (
            f"the run in {folder} was killed: nobody works on it, and it did not say that it ended; began "
            f"{session['started']}\ngo on with: {resume_command(folder)}{more}"
        )
    if "failure" in session:
        go_on = f"\ngo on with: {resume_command(folder)}"
        return f"the run in {folder} ended {session['ended']}: {session['failure']}{go_on}{more}"
    if (folder / RESULT).is_file():
        result = read_plain_json(folder / RESULT)
        num_steps = result.get("num_steps") if isinstance(result, dict) else "?"
        return f"the run in {folder} is finished after {num_steps} steps, since {session['ended']}{more}"
    return f"the run in {folder} ended {session['ended']}{more}"


def _waits(folder: Path) -> str:
    """A line on who waited for whom; empty if generation and training shared devices."""
    from rlinf.report.records import read_run
    from rlinf.report.waits import find_waits

    waits = find_waits(read_run(folder))
    return "" if waits is None else f"\nwaits in steps {waits.steps[0] + 1} to {waits.steps[-1] + 1}: {waits.advice()}"
