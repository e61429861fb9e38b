#!/usr/bin/env bash
# Builds and runs the programs of testing/consumer, a workspace of its own, with
# a Bazel of its own, and proves what they do not link. The nested output base
# lies in the outer one, so the second run is quick and `bazel clean --expunge`
# takes it away.
set -euo pipefail

root=$(dirname "$(readlink -f WORKSPACE)")
base=${PWD%%/execroot/*}
[[ $base != "$PWD" ]] || base=$TEST_TMPDIR
nested=$base/consumer
mkdir -p "$nested"

startup=(--output_user_root="$nested" --output_base="$nested/base" --max_idle_secs=15)
[[ ! -f $root/user.bazelrc ]] || startup+=(--bazelrc="$root/user.bazelrc")
bazel() { # without the variables by which a test knows itself
  env -i PATH="$PATH" HOME="$nested" "$root/bazelw" "${startup[@]}" "$@"
}
cd "$root/testing/consumer"
trap 'bazel shutdown >/dev/null 2>&1' EXIT

bazel build --noshow_progress --symlink_prefix=/ //...

# does_not_link PROGRAM ROOMS: fails when PROGRAM has anything of the rooms below it.
does_not_link() {
  local found
  found=$(bazel query --noshow_progress "filter('^@+evenkeel//($2)[:/]', deps(//:$1))" 2>/dev/null)
  if [[ -n $found ]]; then
    printf '%s links what it must not:\n%s\n' "$1" "$found"
    exit 1
  fi
}
# The query sees what is there, so that its silence means something.
if (does_not_link moe_only 'moe|comm') >/dev/null || (does_not_link zero3_only 'zero3|comm') >/dev/null; then
  echo "the query does not see the rooms that are linked"
  exit 1
fi
does_not_link comm_only 'moe|zero3|testing|tools'
does_not_link moe_only 'zero3|testing|tools'
does_not_link zero3_only 'moe|testing|tools'

for program in comm_only moe_only zero3_only; do
  echo "== $program"
  bazel run --noshow_progress --ui_event_filters=-info --symlink_prefix=/ "//:$program"
done
