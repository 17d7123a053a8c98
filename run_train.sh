#!/usr/bin/env bash
# Train. On a machine without the project's packages this first makes .venv.
#
#   NGPU=8 LOG_RANK=0 CONFIG_FILE=./train_configs/llama3_8b.toml ./run_train.sh --training.steps=100
#
# docs/configuration.md tells what the variables do, docs/multinode.md those for several nodes (NNODES, RDZV_ENDPOINT);
# ./run_train.sh --help lists the settings.
set -euo pipefail

repo="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
# shellcheck source=scripts/setup_env.sh
source "$repo/scripts/setup_env.sh"
use_environment

export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" "$repo/scripts/launch.py" "$@"
