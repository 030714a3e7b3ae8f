"""Opens pages of the built site in headless Chromium, in three widths and both palettes, and reports bad layout.

python tools/site/check_in_browser.py SITE [PICTURES]

A page must not be wider than its window, an element outside a scrolling box must not be wider than the page, and text
must have the contrast of WCAG 2 AA: 4.5, or 3 if it is large. PICTURES is a folder for screenshots.
"""

from __future__ import annotations

import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PAGES = ("index.html", "how-do-i.html", "start.html", "reference/keys-reasoning.html", "reference/api/rlinf_algos.html")
WIDTHS = (390, 800, 1400)
PALETTES = {"light": "default", "dark": "slate"}
FRAMES = """<!doctype html><html><body style="margin:0">{frames}<pre id="report" hidden></pre><script>{script}</script>
</body></html>"""
FRAME = """<iframe style="border:0;display:block;width:{width}px;height:1100px" data-palette="{palette}"
data-scheme="{scheme}" src="{page}"></iframe>"""
"""Headless windows are at least 500 pixels wide, so the page is shown in frames."""
SCRIPT = (Path(__file__).parent / "check_in_browser.js").read_text(encoding="utf-8")


def main(site: Path, pictures: Path | None) -> int:
    """Prints every finding; returns 1 if there is one."""
    browser = next((path for name in NAMES if (path := shutil.which(name))), None)
    if browser is None:
        print("needs Chromium: apt-get install chromium", file=sys.stderr)
        return 2
    num_problems = 0
    with _served(site) as address, tempfile.TemporaryDirectory() as profile:
        look = functools.partial(_look, browser, Path(profile))
        for page in PAGES:
            combinations = [(width, palette) for palette in PALETTES for width in WIDTHS]
            every = ",".join(f"{width}-{palette}" for width, palette in combinations)
            problems = look(f"{address}/_frames/{every}/{page}")
            print("".join(f"{page}, {problem}\n" for problem in problems), end="")
            num_problems += len(problems)
            if pictures is None:
                continue
            for width, palette in combinations:
                picture = pictures / f"{Path(page).stem}-{width}-{palette}.png"
                look(f"{address}/_frames/{width}-{palette}/{page}", picture, width)
    print(f"{len(PAGES)} pages in {len(WIDTHS)} widths and {len(PALETTES)} palettes: {num_problems} problems")
    return int(num_problems > 0)


@contextmanager
def _served(site: Path) -> Iterator[str]:
    """Serves a folder on loopback, and a frame around each page."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            match = re.fullmatch(r"/_frames/([\w,-]+)/(.*)", self.path)
            if match is None:
                super().do_GET()
                return
            combinations = [part.split("-") for part in match[1].split(",")]
            frames = [
                FRAME.format(width=width, palette=palette, scheme=PALETTES[palette], page=f"/{match[2]}")
                for width, palette in combinations
            ]
            text = FRAMES.format(frames="".join(frames), script=SCRIPT).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    handler = functools.partial(Handler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()


def _look(browser: str, profile: Path, url: str, picture: Path | None = None, width: int = 500) -> list[str]:
    """Returns what the script finds in the frames at `url`, or writes a picture of them."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    flags += ["--virtual-time-budget=10000", f"--window-size={max(width, 500)},1100"]
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([browser, *flags, f"--screenshot={picture}", url], capture_output=True, timeout=300, check=True)
        return []
    done = subprocess.run([browser, *flags, "--dump-dom", url], capture_output=True, text=True, timeout=300)
    match = re.search(r'<pre id="report" hidden="">(.*?)</pre>', done.stdout, re.DOTALL)
    if not match or not match[1]:
        raise RuntimeError(f"{url}: no report from the browser\n{done.stderr[-1000:]}")
    return json.loads(html.unescape(match[1]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
