#!/usr/bin/env bash
# Set-up if needed, then the test suite: unit tests first, tests with real servers last.
#
#   scripts/test.sh                      everything but the slow ones, unit tests in parallel on up to four CPUs
#   scripts/test.sh -m slow              the slow ones: more models, a GPU's server, load while processes are killed
#   scripts/test.sh -m 'not e2e'         without servers, some minutes
#   scripts/test.sh test/ops -k merge    any pytest arguments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
. scripts/cpu_env.sh

if [ $# -gt 0 ]; then
    exec .venv/bin/python -m pytest -q --durations=10 "$@"
fi
# All always run, so that one report has every failure. Tests of the attention process or servers run serially:
# a process that is starved of CPU for two seconds is replaced.
status=0
.venv/bin/python -m pytest -q --durations=10 -m 'not e2e and not slow' --ignore test/worker \
    -n "$(nproc)" --maxprocesses 4 --dist loadfile --no-loadscope-reorder || status=$?
.venv/bin/python -m pytest -q --durations=15 -m 'not slow' test/worker test/e2e || status=$?
exit "$status"
