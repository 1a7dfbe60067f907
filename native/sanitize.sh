#!/bin/sh
# Builds the library with AddressSanitizer and UndefinedBehaviorSanitizer and runs its tests on it, and random calls of
# every kernel on every instruction set that the machine has (tests/reliability/fuzz_kernels.py), in a few minutes.
# Needs what the tests need (Python with numpy, onnx, onnxruntime, pytest) and GCC or Clang with the sanitizers.
#
#   native/sanitize.sh [pytest arguments]
set -eu

root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cmake -S "$root" -B "$scratch/build" -DONNXTRAIN_SANITIZE=ON >"$scratch/log" 2>&1 &&
  cmake --build "$scratch/build" --parallel "$(getconf _NPROCESSORS_ONLN)" >>"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }

# A copy of the package, so that it finds this library and not the one that is installed.
mkdir "$scratch/package"
cp -r "$root/src/onnxtrain" "$scratch/package/onnxtrain"
rm -rf "$scratch/package/onnxtrain/lib"
mkdir "$scratch/package/onnxtrain/lib"
cp "$scratch/build/libonnxtrain_kernels.so" "$scratch/package/onnxtrain/lib/"

# Python is not built with the sanitizers, so their runtime comes first, with which nvcc does not start. Leaks are not looked
# for: Python's are many.
compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[^=]*=//p' "$scratch/build/CMakeCache.txt")
preload="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)"
cd "$root/tests/native"
env PYTHONPATH="$scratch/package" LD_PRELOAD="$preload" \
  ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1:max_allocation_size_mb=4096 \
  UBSAN_OPTIONS=print_stacktrace=1 \
  python -m pytest -q -p no:cacheprovider -m "not slow" \
  -k "not needs_nothing_but_libc and not torch and not dead_worker and not test_native_cuda" "$@" \
  . ../reliability/test_kernel_fuzz.py
