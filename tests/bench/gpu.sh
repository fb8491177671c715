#!/usr/bin/env bash
# Everything that wants a GPU, in one go (about 25 minutes on an H100): tests/bench/gpu.sh [FOLDER], from the checkout.
# KVTUNE names the command: .venv/bin/kvtune after `KVTUNE_ENGINE=cuda .ci/setup`, or "python3 -m kvtune" with
# PYTHONPATH where vLLM lies unpacked. Commit what it leaves under reports/gpu and recipes/.
set -uo pipefail
out=${1:-reports/gpu}; kvtune=${KVTUNE:-.venv/bin/kvtune}; mkdir -p "$out"; failed=0
step() { # seconds, name, arguments
  local limit=$1 name=$2; shift 2
  echo "== $name: kvtune $*"; local from=$SECONDS
  timeout -s INT -k 30 "$limit" $kvtune "$@" >"$out/$name.txt" 2>&1 && echo "   $((SECONDS - from)) s" && return
  failed=$((failed + 1)); echo "   FAILED after $((SECONDS - from)) s:"; tail -5 "$out/$name.txt"
}
rounds=rounds:prefixes=30,prefix=14000,suffix=64,output=16,rounds=3
pool=(--num-gpu-blocks-override 64000 --block-size 16 --max-model-len 16384)
step 120 doctor doctor gemma-3-4b
step 180 profile-tiny profile tiny-gemma3 --stacks -o "$out"
step 300 profile profile gemma-3-4b -w $rounds -o "$out" -- "${pool[@]}"
step 300 profile-stock profile gemma-3-4b -w $rounds --core stock -o "$out" -- "${pool[@]}"
step 700 evidence evidence --scale gpu -o "$out"
step 300 sweep sweep gemma-3-4b --pin -w $rounds --on both --trials 4 -o "$out" -- "${pool[@]}"
step 600 tune tune gemma-3-4b -w $rounds --objective ttft --trials 30 --budget 400 --recipe "$out/gemma-3-4b-gpu.toml" -o "$out" -- "${pool[@]}"
for run in "$out"/*.kvrun; do $kvtune report "$run" --force >/dev/null || failed=$((failed + 1)); done
echo "$failed failed; results in $out"; exit $((failed > 0))
