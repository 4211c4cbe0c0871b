#!/usr/bin/env bash
# Every table again, one script after the other, alone on the machine: about two and a half hours on 2 cores. A script that fails is named at the end; the others run.
#
#   benchmarks/run_all.sh                     all
#   benchmarks/run_all.sh speedup interrupt   some
#   QUICK=1 benchmarks/run_all.sh speedup paced interrupt scaling     what has --quick, in minutes, into build/results: does it run?
#
# Results go to benchmarks/results/NAME.json; benchmarks/tables.py renders them.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python results=benchmarks/results quick=()
if [[ -n ${QUICK:-} ]]; then results=build/results quick=(--quick); fi
[[ $# -gt 0 ]] || set -- speedup paced interrupt staleness scaling quality simulated limits
mkdir -p "$results"
export OMP_NUM_THREADS=1
failed=()
for name in "$@"; do
    echo "=== $name, $(date +%T)"
    if "$python" "benchmarks/$name.py" "${quick[@]}" | tee "$results/$name.txt" && tail -n 1 "$results/$name.txt" >"$results/$name.json.new"; then
        mv "$results/$name.json.new" "$results/$name.json"
    else
        failed+=("$name")
    fi
    rm -f "$results/$name.txt" "$results/$name.json.new"
done
"$python" benchmarks/tables.py --results "$results"
[[ ${#failed[@]} -eq 0 ]] || { echo "failed: ${failed[*]}" >&2; exit 1; }
