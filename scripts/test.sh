#!/usr/bin/env bash
# Set-up if needed, then the test suite: unit tests first, tests with real servers last.
#
#   scripts/test.sh                      everything
#   scripts/test.sh -m 'not e2e'         without servers, about a minute
#   scripts/test.sh test/ops -k merge    any pytest arguments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
. scripts/cpu_env.sh

exec .venv/bin/python -m pytest -q --durations=10 "$@"
