#!/usr/bin/env bash
# From a fresh checkout to two trained policies: a language model that sorts digits and a robot arm that pushes a cube.
# Under Python 3.13 the robot is left out, because its simulator, ManiSkill, does not install there.
#   tools/quickstart.sh            both jobs
#   tools/quickstart.sh --short    a few steps of each: does everything work here?
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

short=()
case "${1:-}" in
  "") ;;
  --short) short=(--run.num_steps 2 --run.evaluate_every 2 --run.checkpoint_every 2) ;;
  *) fail "usage: tools/quickstart.sh [--short]" ;;
esac

ensure_environment
recipes=(sort-grpo)
if can_have_maniskill; then
  recipes+=(pushcube-ppo)
else
  echo "pushcube-ppo is left out: ManiSkill does not install under $(.venv/bin/python --version); with another Python: rm -r .venv, PYTHON=python3.12 tools/quickstart.sh"
fi
runs="runs/quickstart-$(date +%Y%m%d-%H%M%S)"
for recipe in "${recipes[@]}"; do
  echo
  .venv/bin/rlinf train "$recipe" --output "$runs/$recipe" "${short[@]}"
done
echo
.venv/bin/rlinf compare "${recipes[@]/#/$runs/}"
