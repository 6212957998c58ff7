#!/usr/bin/env bash
# Builds a stub libcuda.so.1 that reports no device: SGLang 0.5.23 loads the GPU driver's library even on machines
# without one. Installed where scripts/cpu_env.sh looks for it: in lib/no-driver of the environment.
#
#   scripts/no_driver.sh VENV
set -euo pipefail
mkdir -p "${1:?the folder of a virtual environment}/lib/no-driver"
echo 'extern "C" int cuPointerGetAttribute() { return 100; } // no device' |
    "${CXX:-c++}" -shared -fPIC -Wl,-soname,libcuda.so.1 -xc++ - -o "$1/lib/no-driver/libcuda.so.1"
