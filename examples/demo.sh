#!/usr/bin/env bash
# Trains examples/train_gpt.py on two ranks under steadyrun, kills one rank, hangs the other, and prints what came of it.
#
#   bash examples/demo.sh [further options of train_gpt.py]
#
# Needs Linux and Python >= 3.10 with pip. On the first run it makes a virtual environment in .venv and installs this
# checkout into it. Settings, all optional:
#   PYTHON       interpreter for the virtual environment               (python3)
#   VENV         where it is, or will be                               (.venv)
#   TORCH_SPEC   requirement for torch; an index may offer CUDA builds of gigabytes  (torch==2.13.0)
#   DEMO_OUT     folder for checkpoints, losses and the run's records  (a new temporary folder)
#   DEMO_STEPS   steps to train                                        (240)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv}
torch=${TORCH_SPEC:-torch==2.13.0}
steps=${DEMO_STEPS:-240}
kill_at=$((steps * 9 / 20 + 3))
hang_at=$((steps * 17 / 20 + 5))

installed() {
    "$venv/bin/python" - 2>/dev/null <<'PY'
import importlib.util, sys
sys.exit(not all(importlib.util.find_spec(m) for m in ("torch", "numpy", "steadyrun.launcher.main")))
PY
}
if ! installed; then
    echo "== setting up $venv (once)"
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    # torch by itself first, so that the version asked for is taken; numpy is needed by torch.distributed.checkpoint.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$torch" numpy
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable .
fi

out=${DEMO_OUT:-$(mktemp -d "${TMPDIR:-/tmp}/steadyrun-demo.XXXXXX")}
mkdir -p "$out"
export OMP_NUM_THREADS=1
export STEADYRUN_FAULTS="kill rank=1 step=$kill_at; hang rank=0 step=$hang_at attempt=1"
set -- --steps "$steps" --every 20 --log-every 20 --out "$out" "$@"

echo "== training on two ranks; faults on order: $STEADYRUN_FAULTS"
echo "+ steadyrun --standalone --nproc-per-node 2 --ft-step-timeout 4 examples/train_gpt.py $*"
status=0
"$venv/bin/steadyrun" --standalone --nproc-per-node 2 --ft-run-dir "$out/runs" \
    --ft-step-timeout 4 --ft-restart-grace 1 \
    examples/train_gpt.py "$@" || status=$?

echo
echo "== steadyctl incidents"
"$venv/bin/steadyctl" incidents "$out/runs" || true
echo
echo "== what happened"
"$venv/bin/python" examples/demo_report.py "$out" --exit-code "$status"
