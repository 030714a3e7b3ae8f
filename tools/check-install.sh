#!/usr/bin/env bash
# Installs `rlinf[all]` from a folder of our wheels into a bare environment, as a newcomer would, and runs the quick
# start's recipes from there: the checkout is not on any path.
#   tools/check-install.sh FOLDER            two steps of each recipe
#   tools/check-install.sh FOLDER --full     until they have learned, about ten minutes
# FOLDER comes from tools/build-wheels.sh. PYTHON chooses the interpreter; CONSTRAINTS names another constraints file.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
case "${2:---short}" in
  --short) short=(--run.num_steps 2 --run.evaluate_every 2 --run.checkpoint_every 2) ;;
  --full) short=() ;;
  *) echo "usage: tools/check-install.sh FOLDER [--full]" >&2; exit 2 ;;
esac
wheels="$(cd "${1:?usage: tools/check-install.sh FOLDER [--full]}" && pwd)"
constraints="${CONSTRAINTS:-$root/tools/constraints.txt}"

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
"${PYTHON:-python3}" -m venv venv
export PATH="$scratch/venv/bin:$PATH" PYTHONPATH="" PYTHONNOUSERSITE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
echo "== pip install --find-links FOLDER 'rlinf[all]', $(python --version)"
python -m pip --quiet --disable-pip-version-check install -c "$constraints" --find-links "$wheels" 'rlinf[all]'

echo "== every package is the one of the folder"
python - "$wheels" <<'PY'
import importlib.metadata, pathlib, sys
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    name, version = wheel.name.split("-")[:2]
    found = importlib.metadata.distribution(name)
    assert found.version == version, f"{name} {found.version} was installed, the folder has {version}"
    wheel_tags = [line[5:] for line in found.read_text("WHEEL").splitlines() if line.startswith("Tag: ")]
    print(f"{name} {version} {' '.join(wheel_tags)}")  # linux_x86_64: built here from the folder's sdist
PY
echo "== pip check"
python -m pip check
echo "== the quick start"
rlinf doctor || [ $? -eq 1 ]
recipes=(sort-grpo)
python -m pip --quiet show mani-skill 2>/dev/null && recipes+=(pushcube-ppo) || echo "no ManiSkill for this Python: pushcube-ppo is left out"
for recipe in "${recipes[@]}"; do
  rlinf train "$recipe" --output "$recipe" "${short[@]}"
done
rlinf compare "${recipes[@]}"
