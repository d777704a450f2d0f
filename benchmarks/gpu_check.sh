#!/usr/bin/env bash
# What needs a GPU, on a machine with one or more: trains on one with NCCL under steadyrun, kills and hangs the rank, looks
# at the memory of standbys, and compares restart times with torchrun. Takes about 6 minutes.
#
#   bash benchmarks/gpu_check.sh [folder for the results]
#
# PYTHON: an interpreter with torch (CUDA), numpy, and steadyrun or its dependencies (psutil, structlog, prometheus_client,
# nvidia-ml-py). The GPU's settings are left alone. Ends with 0 when all parts did.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
out=${1:-$(mktemp -d "${TMPDIR:-/tmp}/steadyrun-gpu.XXXXXX")}
mkdir -p "$out"
if ! "$python" -c 'import steadyrun.core.classes' 2>/dev/null; then
    export PYTHONPATH="$PWD/agent:$PWD/launcher:$PWD/collectors${PYTHONPATH:+:$PYTHONPATH}"
fi
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
failed=()

echo "== machine"
nvidia-smi --query-gpu=index,name,memory.total,memory.used,driver_version --format=csv
"$python" - <<'PY' || { echo "needs torch with CUDA, numpy and steadyrun's dependencies in $python"; exit 2; }
import numpy, psutil, structlog, torch, steadyrun.launcher.main
assert torch.cuda.is_available(), "torch sees no GPU"
print("torch", torch.__version__, "CUDA", torch.version.cuda, "NCCL", torch.cuda.nccl.version())
PY

echo "== training on one GPU under steadyrun, with a kill and a hang"
job=$out/train
mkdir -p "$job"
STEADYRUN_FAULTS="kill rank=0 step=2503; hang rank=0 step=4505 attempt=1" \
    timeout 240 "$python" -m steadyrun.launcher --standalone --nproc-per-node 1 --ft-run-dir "$job/runs" \
    --ft-step-timeout 4 --ft-restart-grace 1 \
    examples/train_gpt.py --steps 6000 --every 200 --log-every 500 --batch 32 --out "$job" >"$job/output.txt" 2>&1 &
launcher=$!
# While it runs: memory on the GPU by process, and which processes are standbys.
while kill -0 "$launcher" 2>/dev/null; do
    {
        nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits | sed "s/^/gpu /"
        cat "$job"/runs/latest/live/*.json 2>/dev/null
        echo
    } >>"$job/memory.txt"
    sleep 0.5
done
wait "$launcher"
status=$?
grep -E '^(step|going|starting|asked)|steadyrun:' "$job/output.txt" | tail -40
"$python" examples/demo_report.py "$job" --every 200 --exit-code "$status" || failed+=("training")

echo "== copies between the GPU and snapshot memory"
if "$python" -c 'import pytest' 2>/dev/null; then
    "$python" -m pytest -q -m gpu -p no:cacheprovider tests/integration/checkpoint || failed+=("copies")
else
    echo "left out: pytest is not installed in $python"
fi

echo "== standbys: memory on the host and on the GPU"
"$python" - "$job/memory.txt" <<'PY' || failed+=("standbys")
import json, sys
standbys, on_gpu = {}, {}
for line in open(sys.argv[1]):
    if line.startswith("gpu "):
        pid, _, mib = line[4:].partition(",")
        if pid.strip().isdecimal() and mib.strip().isdecimal():
            on_gpu[int(pid)] = max(on_gpu.get(int(pid), 0), int(mib))
    elif line.startswith("{"):
        for s in json.loads(line).get("standbys", ()):
            if s["ready"]:
                standbys[s["pid"]] = s["memory_bytes"]
print(f"{len(standbys)} standbys seen ready; host memory, MiB: {sorted(round(b / 2**20) for b in standbys.values())}")
print(f"GPU memory by process, MiB: {on_gpu} (inside a container pids may differ or be missing)")
sys.exit(not standbys)
PY

echo "== restart, against torchrun"
timeout 330 "$python" benchmarks/restart.py --ranks 1 --device cuda --tries 2 --only 0,2,3 --json "$out/restart.json" \
    || failed+=("restart")

echo "== left on the GPU"
nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv,noheader
echo "results are in $out"
[ ${#failed[@]} -eq 0 ] && echo "all parts ended as expected" || { echo "FAILED: ${failed[*]}"; exit 1; }
