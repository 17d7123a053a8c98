#!/usr/bin/env bash
# Run the tests. On a machine without the packages they need this first makes .venv. Arguments go to pytest.
set -euo pipefail

repo="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
# shellcheck source=scripts/setup_env.sh
source "$repo/scripts/setup_env.sh"
use_environment dev

# Tests that start the launchers are to use the same interpreter.
export PYTHON
cd -- "$repo"
exec "$PYTHON" -m pytest "$@"
