#!/usr/bin/env bash
# A long run of tiny steps: memory, descriptors, threads and shared segments of the driver and its workers must not grow,
# and nothing may be left behind. Prints what each held, as JSON. 10,000 steps take a quarter of an hour on two cores.
#   tools/soak.sh STEPS [overrides of rlinf train]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 1 ] || { echo "usage: tools/soak.sh STEPS [overrides of rlinf train]" >&2; exit 2; }
exec .venv/bin/python integration_tests/soaked_run.py "$@"
