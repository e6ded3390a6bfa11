#!/usr/bin/env bash
# Install a wheel in a clean environment, away from the repository, and use it: bash .github/check_wheel.sh dist/nwise-*.whl
set -euo pipefail
WHEEL="$(realpath "$1")"
CONSTRAINTS="$(realpath "$(dirname "$0")/../constraints.txt")"
cd "$(mktemp -d)"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --constraint "$CONSTRAINTS" torch
venv/bin/pip install --quiet --constraint "$CONSTRAINTS" "$WHEEL"
venv/bin/python -c "import nwise; print('nwise', nwise.__version__)"
venv/bin/nwise --help > /dev/null
venv/bin/nwise plan --costs transformer --devices 4
# Without the extra, a sentence that names it; with it, a run.
if venv/bin/nwise train --max-steps 2 2> said; then echo "scikit-learn should not be installed"; exit 1; fi
grep -F "nwise[train]" said
venv/bin/pip install --quiet --constraint "$CONSTRAINTS" "$WHEEL[train]"
venv/bin/nwise train --max-steps 20 --json
