#!/usr/bin/env bash
# Install a wheel in a clean environment, away from the repository, and use it: bash .github/check_wheel.sh dist/nwise-*.whl
set -euo pipefail
WHEEL="$(realpath "$1")"
CONSTRAINTS="$(realpath "$(dirname "$0")/../constraints.txt")"
cd "$(mktemp -d)"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --constraint "$CONSTRAINTS" torch
venv/bin/pip install --quiet --constraint "$CONSTRAINTS" "$WHEEL"
# The library needs torch and numpy alone; the command needs the extra, and says so.
venv/bin/python - <<'PROGRAM'
import torch, nwise
pipe = nwise.Pipeline([torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)], strategy="end-to-end")
print("nwise", nwise.__version__, pipe.step(torch.randn(3, 4), target=torch.tensor([0, 1, 1])))
PROGRAM
if venv/bin/nwise --help 2> said; then echo "the extra should not be installed"; exit 1; fi
grep -F "nwise[app]" said
venv/bin/pip install --quiet --constraint "$CONSTRAINTS" "$WHEEL[app]"
venv/bin/nwise --help > /dev/null
venv/bin/nwise plan --costs transformer --devices 4
venv/bin/nwise train --max-steps 20 --json
