#!/usr/bin/env bash
# Set-up if needed, then the end-to-end demo on this machine (scripts/demo.py): scripts/demo.sh --help
#
# Without a usable GPU, or with --device cpu or SCOUT_FORCE_CPU=1, everything runs on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
exec .venv/bin/python scripts/demo.py "$@"
