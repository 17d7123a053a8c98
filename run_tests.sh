#!/usr/bin/env bash
# Run the tests, on all cores. On a machine without the packages they need this first makes .venv. Arguments go to
# pytest (-n 0: one test after the other in this process, as a debugger wants it).
set -euo pipefail

repo="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
# shellcheck source=scripts/setup_env.sh
source "$repo/scripts/setup_env.sh"
use_environment dev

# Tests that start the launchers are to use the same interpreter.
export PYTHON
cd -- "$repo"
# One process for each core that this one may use, and each of them to work on one; files stay whole, for tests share what
# is slow to make, and in the order that tests/conftest.py gives them.
cores="$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m pytest --numprocesses="$cores" --maxprocesses=8 --dist=loadfile --no-loadscope-reorder "$@"
