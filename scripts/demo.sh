#!/usr/bin/env bash
# Set-up if needed, then the end-to-end demo on this machine: a prefill server, a decode server with
# --kv-offload scout, SGLang's router; three questions to a small language model about a real text,
# SGLang's bench_serving, a short report; finally everything is stopped.
#
#   scripts/demo.sh [--device auto|cpu|cuda] [--model DIR] [--keep-logs] [...]    see scripts/demo.sh --help
#
# Without a usable GPU, or with --device cpu or SCOUT_FORCE_CPU=1, everything runs on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
exec .venv/bin/python scripts/demo.py "$@"
