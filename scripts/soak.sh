#!/usr/bin/env bash
# Set-up if needed, then a pair of servers under random load while the CPU attention process is killed, stopped
# and given corrupted data; prints one table. Exit code 0: nothing was lost, wrong or left behind.
#
#   scripts/soak.sh --minutes N [--seed S] [--case tokens|recall|device] [--json FILE]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
. scripts/cpu_env.sh
export PYTHONPATH=test:test/e2e:test/worker:scripts HF_HUB_OFFLINE=1
exec .venv/bin/python -m soak "$@"
