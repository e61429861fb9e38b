#!/usr/bin/env bash
# The order program as a user sees it: what it prints, and its exit codes.
set -u
order=tools/order
failed=0

# expect CODE TEXT ARGUMENTS...: the exit code, and a text that stdout or stderr holds.
expect() {
  local code=$1 text=$2 output status
  shift 2
  output=$("$order" "$@" 2>&1)
  status=$?
  if ((status != code)) || [[ $output != *"$text"* ]]; then
    echo "FAIL: order $*: exit $status (wanted $code), wanted '$text', got: $output"
    failed=1
  fi
}

expect 0 'drop_gather' list
# The worked table: s 4096, h 4096, k 2, f 1.25, 2 bytes; T 2, E 4.
expect 0 'EP 2(E-1)/E V                   =      125,829,120 B' describe reference
expect 0 'TP 2(T-1)/T V                   =       83,886,080 B' describe reference
expect 0 'TP 4(T-1)/T V                   =      167,772,160 B' describe drop_gather
expect 0 'TP 3(T-1)/T V                   =      125,829,120 B' describe fused
expect 0 'TP (T-1)/T V                    =       41,943,040 B' describe unsharded
expect 0 'backward (derived)' describe fused --tp=4 --ep=8
expect 0 'from V = 1.5e+06 B' compare
expect 0 'never' compare --tp_gbps=50
expect 2 '--ep_gbps' compare --ep_gbps=0
expect 0 'well-typed' check reference
expect 1 'step 6 (combine) at line 8: tp is P, wants I' check tools/testdata/missing_all_reduce.textproto
expect 1 'step 6 (all_reduce(tp)) at line 8: tp is I, wants P' check tools/testdata/doubled_all_reduce.textproto
expect 1 'step 5 (all_reduce(ep)) at line 7: ep is V(experts), wants P' check tools/testdata/wrong_axis.textproto
expect 2 'broken_syntax.textproto:3:' check tools/testdata/broken_syntax.textproto
expect 2 "no order named 'nope'" describe nope
expect 2 'no_such_file' check ./no_such_file
expect 2 'usage:' frobnicate
expect 2 'usage:'
expect 2 '--tp=0' describe fused --tp=0
expect 2 "unknown dtype 'f12'" describe fused --dtype=f12
expect 2 'experts' describe fused --experts=6 --ep=4
expect 2 'sharded' describe fused --expert_layout=sharded
expect 2 "unknown command line flag 'tpp'" describe fused --tpp=2

exit "$failed"
