#!/usr/bin/env bash
# The checkpoint program as a user sees it: what it prints, its exit codes, and files that other readers understand.
set -u
checkpoint=tools/checkpoint
root=$TEST_TMPDIR/run
failed=0
tools/write_checkpoint "$root" || exit 1

# expect CODE TEXT ARGUMENTS...: the exit code, and a text that stdout or stderr holds.
expect() {
  local code=$1 text=$2 output status
  shift 2
  output=$("$checkpoint" "$@" 2>&1)
  status=$?
  if ((status != code)) || [[ $output != *"$text"* ]]; then
    echo "FAIL: checkpoint $*: exit $status (wanted $code), wanted '$text', got: $output"
    failed=1
  fi
}

# Without the folder's name, so that copies can be compared.
digest() { "$checkpoint" verify "$1" | grep -o 'step 20, .*digest [0-9a-f]*'; }

expect 0 'data_position = 20' inspect "$root"
expect 0 'experts.w_in' inspect "$root/step-000000000010"
expect 0 'step 10, every byte verifies' verify "$root"
expect 0 'world 8, ep 4, tp 2' reshard "$root" "$TEST_TMPDIR/out" --world=8 --ep=4 --tp=2
expect 0 '8 files of world size 8' inspect "$TEST_TMPDIR/out"
expect 0 'world 1' reshard "$TEST_TMPDIR/out" "$TEST_TMPDIR/whole"
for copy in out whole; do
  if [[ -z $(digest "$TEST_TMPDIR/$copy") || $(digest "$TEST_TMPDIR/$copy") != "$(digest "$root")" ]]; then
    echo "FAIL: $copy: $(digest "$TEST_TMPDIR/$copy"), not $(digest "$root")"
    failed=1
  fi
done

# Whole tensors have their plain names and shapes in a file that needs no reader of ours.
python3 - "$TEST_TMPDIR"/whole/step-*/rank-*.safetensors <<'END' || failed=1
import json, struct, sys
data = open(sys.argv[1], "rb").read()
(length,) = struct.unpack("<Q", data[:8])
header = json.loads(data[8 : 8 + length])
w_in = header["experts.w_in"]
assert w_in["dtype"] == "F32" and w_in["shape"] == [8, 4, 6], w_in
begin, end = w_in["data_offsets"]
values = struct.unpack("<192f", data[8 + length + begin : 8 + length + end])
assert values == tuple(float(i + 20000) for i in range(192)), values[:4]
assert header["momentum.norm"]["shape"] == [5]
END

expect 2 'ep must divide' reshard "$root" "$TEST_TMPDIR/x" --world=6 --ep=4
expect 2 'cannot be cut into 3 equal parts' reshard "$root" "$TEST_TMPDIR/x" --world=3 --tp=3
expect 2 'world 2147483647, wanted at most 65536' reshard "$root" "$TEST_TMPDIR/x" --world=2147483647
expect 2 'holds step-000000000020 already' reshard "$root" "$root"
expect 2 'holds step-000000000020 already' reshard "$root" "$TEST_TMPDIR/out"
expect 2 'no checkpoint' verify "$TEST_TMPDIR"
expect 2 'usage:' inspect
expect 2 'No such file' inspect /no_such_folder

# One flipped bit of the newest: named by tensor and block; the one before is found instead.
file=$root/step-000000000020/rank-00000-of-00001.safetensors
python3 - "$file" <<'END'
import sys
data = bytearray(open(sys.argv[1], "rb").read())
data[-1] ^= 4
open(sys.argv[1], "wb").write(data)
END
expect 1 'block 0 is damaged' verify "$root/step-000000000020"
expect 1 'of norm' verify "$root"
(($("$checkpoint" verify "$root" 2>&1 >"$TEST_TMPDIR/stdout" | wc -l) == 1)) || { echo "FAIL: one damaged, not one line"; failed=1; }
expect 0 'skipped step-000000000020' inspect "$root"
truncate -s -3 "$file"
expect 1 'expected' verify "$root/step-000000000020"
truncate -s -3 "$root"/step-000000000010/rank-*
expect 1 "2 of 2 checkpoints in $root are not whole" verify "$root"

exit "$failed"
