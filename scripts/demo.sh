#!/usr/bin/env bash
# Set-up if needed, then the whole main job on this machine: a prefill server, a decode server with
# --kv-offload scout, SGLang's router and its bench_serving; a short report; everything stopped again.
#
#   scripts/demo.sh [--model PATH] [--keep-logs] [...]     see scripts/demo.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
. scripts/cpu_env.sh

exec .venv/bin/python scripts/demo.py "$@"
