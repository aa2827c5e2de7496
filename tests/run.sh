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
  local name=$1 log=$logs/$2 start=$SECONDS
  shift 2
  "$@" 2>&1 | tee "$log"
  close "$name" "${PIPESTATUS[0]}" "$log" "$start"
}

close() {  # name, status, log, start
  [ "$2" = 0 ] || failed=1
  closing+=("$1: $([ "$2" = 0 ] && echo passed || echo "FAILED (status $2, $3)"), $((SECONDS - $4)) s")
}

closing=()
run "C++ tests" ctest.txt ctest --preset "$preset" --parallel "${JOBS:-2}"
if [ "$preset" != asan ]; then  # that preset has no bindings
  # Tests that mostly wait run beside the others.
  waits=$logs/pytest_waits.txt start=$SECONDS
  python -m pytest -m waits >"$waits" 2>&1 &
  run "Python tests" pytest.txt python -m pytest -m "not rebuild and not waits"
  wait $!
  status=$?
  cat "$waits"
  close "Python tests that wait" "$status" "$waits" "$start"
fi
printf '%s\n' "${closing[@]}"
exit $failed
