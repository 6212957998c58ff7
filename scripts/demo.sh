#!/usr/bin/env bash
# Set-up if needed, then the whole main job on this machine: a prefill server, a decode server with
# --kv-offload scout, SGLang's router; three questions to a small language model about a real text,
# SGLang's bench_serving, a short report; everything stopped again.
#
#   scripts/demo.sh [--device auto|cpu|cuda] [--model recall|PATH] [--keep-logs] [...]    see scripts/demo.sh --help
#
# Without a GPU that can be used, or with --device cpu or SCOUT_FORCE_CPU=1, all of it runs on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SECONDS=0
scripts/setup.sh
export SCOUT_SETUP_S=$SECONDS

exec .venv/bin/python scripts/demo.py "$@"
