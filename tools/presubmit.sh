#!/usr/bin/env bash
# What a change must pass before it lands, quickest first:
#
#   tools/presubmit.sh                 everything
#   tools/presubmit.sh format test     only these steps
#
#   format    clang-format leaves every source as it is
#   test      all tests: among them tidy, arrows and the consumer workspace
#   clang     everything builds with clang and its layering check
#   asan      all tests under AddressSanitizer and UBSan
#   tsan      the threaded rooms under ThreadSanitizer (no MPI processes)
#   cuda      the CUDA sources compile and link, where a toolkit is found
#
# Exits 1 when a step fails; further arguments for Bazel come from
# EK_BAZEL_FLAGS.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
read -ra flags <<<"${EK_BAZEL_FLAGS:-}"
bazel() { ./bazelw "$1" --noshow_progress --keep_going "${flags[@]}" "${@:2}"; }

step_format() {
  if ! type -P clang-format >/dev/null; then
    echo "clang-format is missing: apt-get install clang-format"
    return 1
  fi
  git ls-files -z '*.h' '*.cc' '*.cu' | xargs -0 -r clang-format --dry-run --Werror
}
step_test() { bazel test //...; }
step_clang() {
  if ! type -P clang++ >/dev/null; then
    echo "clang is missing: apt-get install clang"
    return 1
  fi
  bazel build --config=clang //...
}
step_asan() { bazel test --config=asan //...; }
step_tsan() {
  bazel test --config=tsan --build_tests_only \
    //third_party/... //runtime/... //comm/... //moe/... //zero3/... //testing/...
}
step_cuda() {
  if [[ ! -x ${CUDA_PATH:-/usr/local/cuda}/bin/nvcc ]]; then
    echo "no CUDA toolkit here: nothing to do"
    return 0
  fi
  bazel build --config=cuda //...
}

steps=("$@")
((${#steps[@]})) || steps=(format test clang asan tsan cuda)
failed=()
for step in "${steps[@]}"; do
  if ! declare -F "step_$step" >/dev/null; then
    echo "presubmit: no step '$step'; see the head of $0" >&2
    exit 2
  fi
  echo "== $step"
  start=$SECONDS
  "step_$step" || failed+=("$step")
  echo "== $step: $((SECONDS - start)) s"
done
if ((${#failed[@]})); then
  echo "presubmit: FAILED: ${failed[*]}"
  exit 1
fi
echo "presubmit: all of these hold: ${steps[*]}"
