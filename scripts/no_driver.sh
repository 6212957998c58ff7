#!/usr/bin/env bash
# Makes a libcuda.so.1 that says that there is no device: SGLang 0.5.23 loads the GPU driver's library also where there
# is none. Where scripts/cpu_env.sh looks for it: in lib/no-driver of the environment that it is made for.
#
#   scripts/no_driver.sh VENV
set -euo pipefail
mkdir -p "${1:?the folder of a virtual environment}/lib/no-driver"
echo 'extern "C" int cuPointerGetAttribute() { return 100; } // no device' |
    "${CXX:-c++}" -shared -fPIC -Wl,-soname,libcuda.so.1 -xc++ - -o "$1/lib/no-driver/libcuda.so.1"
