"""A page opened in headless Chromium, which says what it made of it."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ASK = """<pre id="asked"></pre><script>
addEventListener("error", (event) => errors.push(event.message));
const errors = [], films = [...document.querySelectorAll("video")];
const ready = films.map((film) => new Promise((done) => {
  if (film.readyState >= 2 || film.error) done();
  for (const name of ["loadeddata", "error"]) film.addEventListener(name, done);
}));
Promise.all(ready).then(() => {
  const seen = films.map((film) => ({
    width: film.videoWidth, height: film.videoHeight, seconds: film.duration, error: film.error && film.error.message,
  }));
  const drawn = [...document.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect().height);
  const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  document.getElementById("asked").textContent = JSON.stringify({ films: seen, drawn, wide, errors });
});
</script></body>"""


def look(page: Path, folder: Path) -> dict[str, Any]:
    """What the browser says: `films` with width, height, seconds and error, the heights of what is `drawn`, whether the
    page is too `wide` for its window, and the `errors` of its scripts. Skips the test where there is no Chromium.

    Args:
        folder: for the browser's own files.
    """
    browser = next((path for name in NAMES if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip("there is no Chromium here")
    asking = folder / "asking.html"
    asking.write_text(page.read_text(encoding="utf-8").replace("</body>", ASK), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=20000"]
    done = subprocess.run(
        [browser, *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", asking.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    match = re.search(r'<pre id="asked">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match and match[1], done.stderr[-2000:]
    return json.loads(match[1])
