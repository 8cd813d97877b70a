#!/bin/sh
# Says why the simulator cannot be built and run here; says nothing where it can.
set -eu
cxx=${CXX:-g++}

if ! command -v nvcc >/dev/null; then
  echo "there is no nvcc in PATH"
elif ! nvcc --version | grep -q 'release 13\.'; then
  echo "it stands in for the CUDA runtime of release 13, and nvcc is of another: $(nvcc --version | grep -o 'release [0-9.]*')"
elif [ "$(uname -s) $(uname -m)" != "Linux x86_64" ]; then
  echo "it needs Linux on x86-64, and this is $(uname -s) on $(uname -m)"
elif ! grep -q '^flags.* avx2 ' /proc/cpuinfo || ! grep -q '^flags.* f16c ' /proc/cpuinfo || ! grep -q '^flags.* fma ' /proc/cpuinfo; then
  echo "it needs a processor with AVX2, F16C and FMA"
elif ! command -v "$cxx" >/dev/null; then
  echo "there is no $cxx in PATH"
elif "$cxx" --version | grep -q 'Free Software Foundation' && [ "$("$cxx" -dumpversion | cut -d. -f1)" -lt 12 ]; then
  echo "it needs g++ 12 or newer, and $cxx is $("$cxx" -dumpversion)"
fi
