#!/usr/bin/env bash
# Kills a saving run hundreds of times (default 500, a quarter in each of four ways) and checks after
# each kill that the latest save is whole and right. From the repository's root, after `make build`.
set -euo pipefail
cd "$(dirname "$0")/../.."
POISE_KILLS=${1:-500} "build/${PRESET:-cpu}/tests/state/state_kill_test" --gtest_brief=1 2>&1 |
  grep -E "kills,|FAILED|PASSED|Failure"
