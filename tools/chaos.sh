#!/usr/bin/env bash
# Tiny training runs that are disturbed at random moments: killed and stopped processes, a full disk, cut connections.
# Each goes on, or stops with a named cause and is resumed, to the numbers of a run in peace, and leaves nothing behind.
#   tools/chaos.sh MINUTES [SEED] [overrides of rlinf train]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -ge 1 ] || { echo "usage: tools/chaos.sh MINUTES [SEED] [overrides of rlinf train]" >&2; exit 2; }
minutes="$1"
seed="${2:-0}"
shift $(($# > 1 ? 2 : 1))
exec .venv/bin/python integration_tests/chaos_runs.py "$minutes" "$seed" "$@"
