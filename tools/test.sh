#!/usr/bin/env bash
# Every test, in the environment that tools/quickstart.sh uses.
#   tools/test.sh [--all] [pytest arguments]     --all: also those marked slow
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

selection=(-m "not slow and not gpu")
if [ "${1:-}" = "--all" ]; then
  shift
  selection=(-m "not gpu")
fi

ensure_environment
.venv/bin/python -m pip --quiet --disable-pip-version-check install -c tools/constraints.txt -r tools/test-requirements.txt
.venv/bin/python -m pytest "${selection[@]}" "$@"
