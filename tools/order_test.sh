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
expect 0 '-ranks_per_node' --help
help=$("$order" --help)
[[ $help != *tab_completion* ]] || { echo "FAIL: --help shows flags of libraries"; failed=1; }
# The worked table, every row to the byte: s 4096, h 4096, k 2, f 1.25, 2 bytes. Order, T, E; EP, TP and their sum,
# forward; the backward sends the same.
while read -r name T E ep tp sum; do
  for direction in forward backward; do
    text=$("$order" describe "$name" --tp="$T" --ep="$E" | grep -A2 -E "^  $direction +EP")
    for number in "$ep B in 2 collectives" "$tp B in" "$sum B"; do
      [[ $text == *" $number"* ]] || { echo "FAIL: $name T=$T E=$E $direction: wanted $number, got: $text"; failed=1; }
    done
  done
done <<'END'
reference   2 4 125,829,120  83,886,080 209,715,200
reference   4 8 146,800,640 125,829,120 272,629,760
reference   2 2  83,886,080  83,886,080 167,772,160
drop_gather 2 4  62,914,560 167,772,160 230,686,720
drop_gather 4 8  36,700,160 251,658,240 288,358,400
drop_gather 2 2  41,943,040 167,772,160 209,715,200
fused       2 4  62,914,560 125,829,120 188,743,680
fused       4 8  36,700,160 188,743,680 225,443,840
fused       2 2  41,943,040 125,829,120 167,772,160
unsharded   2 4  62,914,560  41,943,040 104,857,600
unsharded   4 8  36,700,160  62,914,560  99,614,720
unsharded   2 2  41,943,040  41,943,040  83,886,080
token_sliced 2 4 50,331,648  83,886,080 134,217,728
token_sliced 4 8 29,360,128 125,829,120 155,189,248
token_sliced 2 2 33,554,432  83,886,080 117,440,512
END
expect 0 'EP 2(E-1)/E V                   =      125,829,120 B' describe reference
expect 0 'TP 2(T-1)/T V                   =       83,886,080 B' describe reference
expect 0 'TP 4(T-1)/T V                   =      167,772,160 B' describe drop_gather
expect 0 'TP 3(T-1)/T V                   =      125,829,120 B' describe fused
expect 0 'TP (T-1)/T V                    =       41,943,040 B' describe unsharded
# Two nodes of two TP groups: the same bytes between nodes, in half the messages.
nodes=(--tp=2 --ep=4 --ranks_per_node=4)
expect 0 '41,943,040 B between nodes, in at most 4 messages' describe fused "${nodes[@]}"
expect 0 '41,943,040 B between nodes, in at most 2 messages' describe 'two_level(fused)' "${nodes[@]}"
expect 0 'EP 2(N-1)/(NT) V + 2(L-1)/(LT) V =       83,886,080 B in 4 collectives' describe 'two_level(fused)' "${nodes[@]}"
expect 0 'all_to_all(ep.peers)' describe 'two_level(fused)' "${nodes[@]}"
expect 2 '--ranks_per_node=3' describe fused --ranks_per_node=3
expect 2 'ep 4 is not divisible by 3' describe fused --ranks_per_node=6
expect 0 'M h b + M h w + Dl h b + Dl h w' describe 'per_node(dedup)' "${nodes[@]}"
expect 2 'does not dispatch destinations' describe 'per_node(fused)'
expect 0 'Dn h b' describe 'two_level(dedup)' "${nodes[@]}"
expect 2 'would be sent for each chunk' describe 'overlapped(dedup)'
expect 0 'backward (derived)' describe fused --tp=4 --ep=8
expect 0 'from s = 73.2 tokens, V = 1.5e+06 B' compare
expect 0 'tokens, balanced routing' compare
expect 0 'two_level(fused)' compare --ranks_per_node=4
expect 0 'per_node(dedup)' compare --ranks_per_node=4
expect 2 '--between_gbps' compare --ranks_per_node=4 --between_gbps=0
expect 0 'never' compare --tp_gbps=50
expect 0 'us of communication and experts per layer; token_sliced would take' compare --expert_tflops=100
expect 2 '--expert_tflops' compare --expert_tflops=-1
expect 2 '--ep_gbps' compare --ep_gbps=0
expect 0 'well-typed' check reference
expect 1 'step 6 (combine) at line 8: tp is P, wants I' check tools/testdata/missing_all_reduce.textproto
expect 1 'step 6 (all_reduce(tp)) at line 8: tp is I, wants P' check tools/testdata/doubled_all_reduce.textproto
expect 1 'step 5 (all_reduce(ep)) at line 7: ep is V(experts), wants P' check tools/testdata/wrong_axis.textproto
expect 2 'broken_syntax.textproto:3:' check tools/testdata/broken_syntax.textproto
expect 2 'tools/testdata: it is a folder' check tools/testdata
expect 2 '/dev/zero: it is no regular file' describe /dev/zero
expect 2 "no order named 'nope'" describe nope
expect 2 'no_such_file' check ./no_such_file
expect 2 'usage:' frobnicate
expect 2 'usage:'
expect 2 '--tokens=0' compare --tokens=0
expect 2 '--hidden=0' describe fused --hidden=0
expect 2 '--ffn=-1' describe fused --ffn=-1
expect 2 '--tp=0' describe fused --tp=0
expect 2 "unknown dtype 'f12'" describe fused --dtype=f12
expect 2 'experts' describe fused --experts=6 --ep=4
expect 2 'sharded' describe fused --expert_layout=sharded
expect 2 "unknown command line flag 'tpp'" describe fused --tpp=2

exit "$failed"
