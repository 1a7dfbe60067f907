#!/bin/sh
# Builds the library for aarch64 on another machine, and tests its kernels there in emulation. Needs Debian or Ubuntu with
# g++-aarch64-linux-gnu and qemu-user, cmake, and a Python with pip; nothing is installed into the system.
#
#   tools/cross_aarch64.sh [pytest arguments]     by default tests/native, which takes about half an hour
set -eu

root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ $# -gt 0 ] || set -- tests/native

echo "library"
cmake -S "$root" -B "$work/build" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ >"$work/log" 2>&1 &&
  cmake --build "$work/build" --parallel "$(getconf _NPROCESSORS_ONLN)" >>"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
mkdir -p "$work/package"
cp -r "$root/src/onnxtrain" "$work/package/onnxtrain"
mkdir -p "$work/package/onnxtrain/lib"
cp "$work/build/libonnxtrain_kernels.so" "$work/package/onnxtrain/lib/"

echo "Debian's Python for aarch64"
mkdir -p "$work/apt/lists/partial" "$work/apt/archives/partial" "$work/system"
: >"$work/apt/status"
arm_apt() {
  apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$work/apt" \
    -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt" "$@"
}
arm_apt update
arm_apt install --yes --download-only --no-install-recommends python3.11 libstdc++6 libgomp1 >/dev/null 2>&1
for package in "$work"/apt/archives/*.deb; do dpkg -x "$package" "$work/system"; done

echo "packages"
# ONNX Runtime 1.32.0 ends with a segmentation fault when it is imported under QEMU 7.2. This Hypothesis is all Python.
python3 -m pip install --quiet --target "$work/site" --python-version 3.11 --only-binary=:all: \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_26_aarch64 \
  --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
  numpy onnx onnx-ir onnxruntime==1.23.2 safetensors cyclopts rich pytest hypothesis==6.112.0

# Tests start Python anew, by the name that it has: that of this script, since the system cannot run the program itself.
cat >"$work/python" <<END
#!/bin/sh
exec env PYTHONPATH="$work/package:$work/site" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 \\
  qemu-aarch64 -L "$work/system" "$work/system/usr/bin/python3.11" "\$@"
END
chmod +x "$work/python"
echo "import sys; sys.executable = '$work/python'" >"$work/site/sitecustomize.py"

cd "$root"
"$work/python" tools/try_wheel.py
"$work/python" -m pytest -q -p no:cacheprovider -o addopts="" -m "not slow and not thorough" "$@"
