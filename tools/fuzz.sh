#!/usr/bin/env bash
# Mutated values, deltas and streams of values against the native code of rlinf-comm, built with AddressSanitizer and
# UndefinedBehaviorSanitizer. Needs clang with its run-time libraries.
#   tools/fuzz.sh [--inputs 1000000] [--seed 0]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$PWD/.venv/bin/python"
build="$PWD/build/fuzz"
flags="-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined -shared-libasan"

mkdir -p "$build"
cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_CXX_FLAGS="$flags" \
  -DRLINF_CUDA=OFF -DPython_EXECUTABLE="$python" \
  -Dpybind11_DIR="$("$python" -c 'import pybind11; print(pybind11.get_cmake_dir())')" > "$build.log" 2>&1 \
  || { cat "$build.log"; exit 1; }
cmake --build "$build" >> "$build.log" 2>&1 || { tail -40 "$build.log"; exit 1; }
# shellcheck disable=SC2086
clang++ -std=c++17 -shared -fPIC $flags -o "$build/allocations.so" tools/fuzz_allocations.cc

# A package of its own, so that the installed module stays as it is.
rm -rf "$build/package"
mkdir -p "$build/package"
cp -r packages/rlinf-comm/src/rlinf_comm "$build/package/"
rm -f "$build"/package/rlinf_comm/_C*.so
cp "$(find "$build" -name '_C*.so' -not -path '*/package/*' | head -1)" "$build/package/rlinf_comm/"

runtime="$(clang++ -print-file-name=libclang_rt.asan-x86_64.so)"
# Leaks are not looked for: the interpreter keeps what it likes until its end. The finder of an editable installation
# would lead to the module without sanitizers.
exec env LD_PRELOAD="$runtime" PYTHONMALLOC=malloc OMP_NUM_THREADS=1 \
  ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1 \
  UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH="$build/package:packages/rlinf-comm/tests" \
  "$python" -c '
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
' packages/rlinf-comm/tests/comm_fuzz.py --allocations "$build/allocations.so" --inputs 1000000 "$@"
