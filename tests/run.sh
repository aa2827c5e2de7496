#!/usr/bin/env bash
# Runs every test of a build: C++ (ctest), then Python (pytest). Both run even if the first fails;
# ends in one line for each. Called by `make test`, which sets PRESET, JOBS and the environment.
set -uo pipefail
cd "$(dirname "$0")/.."
preset=${PRESET:-cpu}
logs=build/$preset/test_logs
mkdir -p "$logs"
failed=0

run() {  # name, log, command...
  local name=$1 log=$logs/$2 start=$SECONDS status
  shift 2
  "$@" 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  [ "$status" = 0 ] || failed=1
  closing+=("$name: $([ "$status" = 0 ] && echo passed || echo "FAILED (status $status, $log)"), $((SECONDS - start)) s")
}

closing=()
run "C++ tests" ctest.txt ctest --preset "$preset" --parallel "${JOBS:-2}"
if [ "$preset" != asan ]; then  # that preset has no bindings
  run "Python tests" pytest.txt python -m pytest
fi
printf '%s\n' "${closing[@]}"
exit $failed
