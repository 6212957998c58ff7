#!/usr/bin/env bash
# Do the hooks hold on an SGLang release that is not supported yet? Installs it into .venv, and runs the tests of the
# plugin and those that compare tokens with stock SGLang's. Afterwards scripts/setup.sh installs a supported one again.
#
#   scripts/newest_sglang.sh            the newest release
#   scripts/newest_sglang.sh 0.5.24     this one
#
# Prints the release on its last line, and ends with the tests' status.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
UV="$(command -v uv || echo .cache/uv-bootstrap/bin/uv)"
rm .venv/.sglang-scout-setup
"$UV" pip install -q --python .venv/bin/python --override .cache/overrides.txt \
    --upgrade-package sglang "sglang${1:+==$1}" >&2
release="$(.venv/bin/python -c 'from importlib.metadata import version; print(version("sglang"))')"

. scripts/cpu_env.sh
export SCOUT_UNTESTED_SGLANG=1
status=0
.venv/bin/python -m pytest -q -m 'not slow' test/plugin test/e2e/test_identity.py || status=$?
echo "$release"
exit "$status"
