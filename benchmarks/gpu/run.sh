#!/usr/bin/env bash
# All checks that need a GPU, on one GPU, in one go. Stops at the first failure.
#
#   benchmarks/gpu/run.sh            every check_*.py beside this file
#   benchmarks/gpu/run.sh --dry      the same on the CPU, without what only CUDA has: tests the scripts, not the package
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-python}"
device=cuda
if [[ "${1:-}" == "--dry" ]]; then
    device=cpu
fi
export OMP_NUM_THREADS=4
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # a checkout need not be installed
"$python" - "$device" <<'PY'
import sys, torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("no GPU is visible to torch; run on a machine that has one, or with --dry")
print("torch", torch.__version__, torch.cuda.get_device_name(0) if sys.argv[1] == "cuda" else "on the CPU (dry run)")
PY
for check in benchmarks/gpu/check_*.py; do
    echo "== $check"
    timeout 70 "$python" "$check" --device "$device"
done
echo "all GPU checks passed"
