#!/usr/bin/env bash
# tests/fuzz/sanitized.sh PYTHON... - runs PYTHON... with kernels built with AddressSanitizer and UndefinedBehaviorSanitizer.
# Leaks are not looked for: Python and its packages keep memory until the process ends.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(command -v "$1")
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") # not resolved: an environment is known by its link
folder=$PWD/build/sanitized
ninja=$("$python" -c 'import ninja; print(ninja.BIN_DIR)')/ninja
cmake=$("$python" -c 'import cmake; print(cmake.CMAKE_BIN_DIR)')/cmake
"$cmake" -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=None -DRECMILL_SANITIZE=ON -DCMAKE_MAKE_PROGRAM="$ninja" \
  -DPython_EXECUTABLE="$python" -DCMAKE_CXX_COMPILER="${CXX:-g++}" >/dev/null
"$cmake" --build "$folder" >/dev/null
RECMILL_SANITIZED=$(echo "$folder"/_cpu*.so)
PYTHONPATH=$PWD/tests/fuzz/sanitized${PYTHONPATH:+:$PYTHONPATH}
export RECMILL_SANITIZED PYTHONPATH
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
# The sanitizers' libraries must come before everything else that the interpreter loads.
LD_PRELOAD=$(for name in libasan.so libubsan.so libstdc++.so; do "${CXX:-g++}" -print-file-name="$name"; done | paste -sd:) exec "$@"
