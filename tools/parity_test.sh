#!/usr/bin/env bash
# The parity program as a user sees it: exit codes and messages of bad input, a wrong order found, files written.
set -u
parity=tools/parity
out=$TEST_TMPDIR/report
failed=0

# expect CODE TEXT FLAGS...: the exit code, and a text that stdout or stderr holds. Errors are one line on stderr.
expect() {
  local code=$1 text=$2 status
  shift 2
  "$parity" --out="$out" "$@" >"$TEST_TMPDIR/stdout" 2>"$TEST_TMPDIR/stderr"
  status=$?
  if ((status != code)) || ! cat "$TEST_TMPDIR/stdout" "$TEST_TMPDIR/stderr" | grep -qF -- "$text"; then
    echo "FAIL: parity $*: exit $status (wanted $code), wanted '$text', got:"
    cat "$TEST_TMPDIR/stdout" "$TEST_TMPDIR/stderr"
    failed=1
  fi
  if ((code == 2)) && (($(wc -l <"$TEST_TMPDIR/stderr") != 1)); then
    echo "FAIL: parity $*: more than one line:"
    cat "$TEST_TMPDIR/stderr"
    failed=1
  fi
}

expect 2 'ep 3' --ep=3
expect 2 'tp 3' --tp=3 --dp=4
expect 2 'experts' --experts=6
expect 2 'top_k' --top_k=9
expect 2 'capacity_factor' --capacity_factor=-1
expect 2 'no_such_corpus' --corpus=/no_such_corpus
: >"$TEST_TMPDIR/empty"
expect 2 'empty' --corpus="$TEST_TMPDIR/empty"
expect 2 "no order named 'nope'" --candidate=nope
expect 2 "no order named 'nope'" --reference=nope
expect 2 'tools/testdata: it is a folder' --candidate=tools/testdata
expect 2 '/dev/zero: it is no regular file' --corpus=/dev/zero
expect 2 'broken_syntax.textproto:3:' --candidate=tools/testdata/broken_syntax.textproto
expect 2 'step 6 (combine)' --candidate=tools/testdata/missing_all_reduce.textproto
expect 2 'contradicts' --etp=1 --reference=reference
expect 2 '--etp=3' --etp=3
expect 2 '--backend=smoke: comm: no backend is called "smoke"; linked: in_process, mpi' --backend=smoke
expect 2 'backend sim is not linked into this program: link //comm/sim; linked: in_process, mpi' --backend=sim
expect 2 'NCCL' --backend=nccl
expect 2 '--zero3=all' --zero3=all
expect 2 "unknown dtype 'f12'" --dtype=f12
expect 2 '--optimizer=lion' --optimizer=lion
expect 2 'steps' --steps=0
expect 2 '--drop=all: known are by_top_k, probs' --drop=all
expect 2 '--activation=relu: known are gelu, swiglu' --activation=relu
expect 2 '--score=tanh: known are softmax, sigmoid' --score=tanh
expect 2 'groups 3 does not divide experts 8' --groups=3
expect 2 'groups_kept 2 of 1 groups of 8 experts' --groups_kept=2
for value in nan inf -1 1e300; do expect 2 "is not a number from 0 on" --z_coefficient=$value; done
expect 2 'is not a positive number' --route_scale=1e300
expect 2 'experts is 2000000000, wanted at most 1048576' --experts=2000000000
expect 2 'shared_experts is 2000000000' --shared_experts=2000000000
expect 2 'are a model of' --experts=1048576
expect 2 'are 4611686018427387904 passes' --dp=1 --ep=1 --batches=4611686018427387904
expect 2 'names no order' --candidate=
expect 2 'names no order' --candidate=,,
expect 2 'has no layout' --numerics=canonical --baseline_layout=tp=2 --reference=dense
expect 2 'shared_experts is -1' --shared_experts=-1
expect 2 'shared_gate needs shared_experts' --shared_gate
expect 2 'choose one' --shared_experts=2 --residual_moe
expect 2 '--numerics=exact: known are fast, canonical' --numerics=exact
expect 2 'fast ones promise no equal bits' --baseline_layout=tp=1
expect 2 'tp is there twice' --numerics=canonical --baseline_layout=tp=1,tp=2
expect 2 'batches 3 is not dp 2 times a power of two' --numerics=canonical --dp=2 --ep=2 --batches=3
expect 2 'experts is 12' --numerics=canonical --experts=12
expect 2 "unexpected 'word'" word
expect 2 "unknown command line flag 'tpp'" --tpp=2
expect 2 "illegal value 'two'" --tp=two
expect 2 '/proc/report' --out=/proc/report --steps=1
expect 0 '-baseline_layout' --help

expect 2 '--ranks_per_node=-1' --ranks_per_node=-1
expect 2 'on nodes 0, 0, 0, 1' --tp=2 --ep=4 --dp=4 --ranks_per_node=6 --candidate='two_level(fused)' --steps=1

small=(--tp=2 --ep=2 --dp=2 --steps=2)
expect 0 'token_sliced' "${small[@]}" --zero3=flat,coalesced,per_parameter,off
for file in report.json report.html report.md loss.png; do
  [[ -s $out/$file ]] || { echo "FAIL: no $file"; failed=1; }
done
python3 - "$out/report.json" <<'END' || failed=1
import json, sys
report = json.load(open(sys.argv[1]))
assert report["version"] == 1
for run in report["runs"]:
    for axis in ("ep", "tp"):
        counted, predicted = run["bytes"][axis]["counted"], run["bytes"][axis]["predicted"]
        assert counted == predicted, (run["order"], axis, counted, predicted)
    assert run["peak_gathered_bytes"]["counted"] == run["peak_gathered_bytes"]["predicted"], run["order"]
    assert len(run["loss"]) == 2 and run["loss"][0] > 0
    if run["zero3"] == "flat":
        assert 0 < run["leaf_fetch_host_ops"] <= 10, run["leaf_fetch_host_ops"]
verdicts = [(run["order"], run["zero3"], run["verdict"]) for run in report["runs"]]
assert ("reference", "coalesced", "bitwise") in verdicts, verdicts
assert ("reference", "per_parameter", "bitwise") in verdicts, verdicts
assert ("fused", "flat", "bitwise") in verdicts, verdicts
assert ("unsharded", "flat", "bounded") in verdicts, verdicts
END
expect 0 'two_level(fused)' "${small[@]}" --ranks_per_node=2 --candidate='two_level(fused),two_level(dedup)'
expect 0 'auto=' "${small[@]}" --ranks_per_node=2 --candidate=auto
expect 0 'auto=' "${small[@]}" --candidate=auto
# Every order in one layout, the reference in another, the same bits.
expect 0 'tp 2 ep 2 dp 2 etp 1: same bits as reference in tp 1 ep 1 dp 4 etp 1' "${small[@]}" --numerics=canonical \
  --baseline_layout=dp=4 --dtype=bf16 --optimizer=adamw --capacity_factor=0.5
python3 - "$out/report.json" <<'END' || failed=1
import json, sys
runs = json.load(open(sys.argv[1]))["runs"]
assert len(runs) >= 7, len(runs)
for digest in ("loss_digest", "gradient_digest", "parameter_digest"):
    assert len({run[digest] for run in runs}) == 1, [(run["order"], run[digest]) for run in runs]
assert [run["verdict"] for run in runs] == ["reference"] + ["bitwise"] * (len(runs) - 1)
END
expect 0 'bounded' "${small[@]}" --reference=dense --candidate=fused
expect 0 'bitwise' "${small[@]}" --dtype=bf16 --optimizer=adamw --candidate=fused
expect 0 'loss scale 65536, 0 steps overflowed' "${small[@]}" --dtype=f16 --candidate=fused,token_sliced
expect 0 'steps overflowed and were skipped' "${small[@]}" --dtype=f16 --loss_scale=16777216 --steps=12 --candidate=fused
expect 2 '3 is not a power of two' "${small[@]}" --dtype=f16 --loss_scale=3
expect 2 'only --dtype=f16' "${small[@]}" --loss_scale=1024
expect 0 'bitwise' "${small[@]}" --capacity_factor=0 --candidate=token_sliced --reference=reference
expect 0 'bitwise' "${small[@]}" --shared_experts=2 --shared_gate --activation=swiglu --candidate=fused
expect 0 'bitwise' "${small[@]}" --residual_moe --expert_bias --drop=position --z_coefficient=0.01 --candidate=token_sliced
expect 0 'bitwise' "${small[@]}" --score=sigmoid --groups=4 --groups_kept=2 --route_scale=2.5 --candidate=fused
expect 0 'bitwise' "${small[@]}" --recompute --candidate=fused

exit "$failed"
