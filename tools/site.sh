#!/usr/bin/env bash
# Builds the documentation as a site in build/site. A dead link or a dead anchor is an error.
#   --serve   shows it at http://127.0.0.1:8000 and follows changes
#   --check   builds it and opens five pages in Chromium: nothing is wider than the window, text has enough contrast
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh
ensure_environment
.venv/bin/python -m pip --quiet --disable-pip-version-check install -c tools/constraints.txt -r tools/docs-requirements.txt
export NO_MKDOCS_2_WARNING=1 # about another product

# Without --quiet, which hides warnings from --strict too, so that no dead link would be an error.
build() {
  .venv/bin/python -m mkdocs build --strict 2>&1 | sed '/^INFO/d'
}

case "${1:-}" in
  --serve) exec .venv/bin/python -m mkdocs serve ;;
  --check)
    build
    .venv/bin/python tools/site/check_in_browser.py build/site
    ;;
  "") build ;;
  *) fail "usage: tools/site.sh [--serve | --check]" ;;
esac
