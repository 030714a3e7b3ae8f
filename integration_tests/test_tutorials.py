"""The tutorials run as they stand: every block of a page is written or executed, in order, in one folder.

A comment before a block says what the test has to know:

    <!-- test: exit 2 -->             the command has to end with this exit code
    <!-- test: not run -->            needs what a test does not have: a hub, GPUs, other machines
    <!-- test: background step 3/ --> runs beside the next blocks, which start once it has printed this text; a Ctrl-C
                                      ends it at the end of the page, or before the next one starts
    <!-- test: until is stopped -->   is repeated until it has printed this text
    <!-- test: numbers vary -->       quoted output with other numbers

A `text` block is quoted output: the block before it has to have printed it, whatever the white space. `...` stands for
text that is left out.
"""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from command_line import RLINF, environment

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
SHORT = ("reading-a-plan",)
"""Tutorials that run by default."""
BLOCK = re.compile(
    r"(?:^<!-- test: (?P<mark>[^\n]*) -->\n)?"
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"\n]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = {"bash", "python", "yaml", "json", "text"}
MARKS = ("exit ", "not run", "background ", "until ", "numbers vary")
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
LIMIT_S = 1800
"""For one block on a busy machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block of a page and the comment before it."""

    language: str
    text: str
    title: str
    """The file that it is; empty for a command or quoted output."""
    mark: str

    def after(self, prefix: str) -> str | None:
        """What follows in the mark, None if it does not begin so."""
        return self.mark.removeprefix(prefix) if self.mark.startswith(prefix) else None

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.text] if self.language == "python" else ["bash", "-e", "-c", self.text]


def blocks(page: Path) -> list[Block]:
    """Returns the blocks of a page in order."""
    matches = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(**{name: value or "" for name, value in match.groupdict().items()}) for match in matches]


def pages() -> list[Path]:
    tutorials = sorted(FOLDER.glob("*.md"))
    assert tutorials
    return tutorials


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    """Slow, unless it is one of the short ones."""
    return [] if page.stem in SHORT else [pytest.mark.slow]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_block_is_of_a_kind_that_the_test_executes(page: Path):
    page_blocks, text = blocks(page), page.read_text(encoding="utf-8")
    assert {block.language for block in page_blocks} <= LANGUAGES
    assert all(block.mark == "" or block.mark.startswith(MARKS) for block in page_blocks)
    assert text.count("```") == 2 * len(page_blocks)
    assert text.count("<!-- test: ") == sum(block.mark != "" for block in page_blocks)


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem, marks=marks_of(page)) for page in pages()])
def test_a_tutorial_runs(page: Path, tmp_path: Path):
    script = tmp_path / "bin" / "rlinf"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\nexec " + " ".join(f"'{part}'" for part in RLINF) + ' "$@"\n')
    script.chmod(0o755)
    env = environment() | {"PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
    reader = Reader(tmp_path, env)
    try:
        for block in blocks(page):
            reader.follow(block)
    finally:
        reader.stop()


class Reader:
    """Does what a page says, block by block, in one folder."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._folder, self._env = folder, env
        self._output = ""
        self._background: subprocess.Popen[bytes] | None = None

    def follow(self, block: Block) -> None:
        """Raises: AssertionError with the block and what it printed."""
        if block.mark == "not run":
            return
        if block.title:
            (self._folder / block.title).write_text(block.text)
        elif block.language == "text":
            assert quoted(block).search(joined(self._output)), f"{block.text}\nis not in\n{self._output}"
        elif (awaited := block.after("background ")) is not None:
            self._start(block, awaited)
        elif (awaited := block.after("until ")) is not None:
            self._repeat(block, awaited)
        else:
            code = self._run(block)
            assert code == int(block.after("exit ") or 0), f"{block.text}\n{self._output}"

    def _run(self, block: Block) -> int:
        done = subprocess.run(
            block.command, cwd=self._folder, env=self._env, capture_output=True, text=True, timeout=LIMIT_S
        )
        self._output = done.stdout + done.stderr
        return done.returncode

    def _repeat(self, block: Block, awaited: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self._run(block) != 0 or awaited not in self._output:
            assert time.monotonic() < deadline, f"{block.text}\n{self._output}"
            time.sleep(0.5)

    def _start(self, block: Block, awaited: str) -> None:
        self.stop()
        log = self._folder / "background.txt"
        with log.open("wb") as file:
            self._background = subprocess.Popen(
                block.command, cwd=self._folder, env=self._env, stdout=file, stderr=file, start_new_session=True
            )
        deadline = time.monotonic() + LIMIT_S
        while awaited not in log.read_text():
            assert self._background.poll() is None and time.monotonic() < deadline, f"{block.text}\n{log.read_text()}"
            time.sleep(0.1)

    def stop(self) -> None:
        """Ctrl-C twice, as a reader ends a run that hangs."""
        process, self._background = self._background, None
        if process is None:
            return
        for _ in range(2):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                time.sleep(0.5)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def joined(text: str) -> str:
    return " ".join(text.split())


def quoted(block: Block) -> re.Pattern[str]:
    """Matches output that the block quotes."""
    text = joined(block.text)
    pieces = re.split(r"\.\.\.|(" + NUMBER.pattern + ")" if block.mark == "numbers vary" else r"\.\.\.", text)
    if block.mark == "numbers vary":  # every second piece is a number, or None for what was left out
        numbers = {index: NUMBER.pattern if piece else ".*?" for index, piece in enumerate(pieces) if index % 2}
        return re.compile("".join(numbers.get(index, re.escape(piece or "")) for index, piece in enumerate(pieces)))
    return re.compile(".*?".join(map(re.escape, pieces)))
