#!/usr/bin/env bash
# The parity program with a user's backend linked into it: known by its name, the same bits as threads, and the rank
# that is late there is named.
set -u
flags=(--tp=2 --ep=2 --dp=2 --steps=2 --candidate=fused)
tools/parity "${flags[@]}" --out="$TEST_TMPDIR/threads" || exit 1
tools/parity_with_slow_rank "${flags[@]}" --backend=slow_rank --out="$TEST_TMPDIR/slow" 2>"$TEST_TMPDIR/stderr" || {
  cat "$TEST_TMPDIR/stderr"
  exit 1
}
python3 - "$TEST_TMPDIR" <<'END' || exit 1
import json, sys
threads, slow = (json.load(open(f"{sys.argv[1]}/{kind}/report.json")) for kind in ("threads", "slow"))
assert len(threads["runs"]) == len(slow["runs"]) == 2
for a, b in zip(threads["runs"], slow["runs"]):
    for key in ("order", "verdict", "loss_digest", "parameter_digest", "bytes", "collectives"):
        assert a[key] == b[key], (a["order"], key, a[key], b[key])
# On the simulated clock: a stop of two seconds and one of three. Who waits for the late rank may be waited for too.
late = max(slow["late_ranks"], key=lambda rank: rank["waited_ms"])
assert late["rank"] == 2 and late["calls"] >= 2, slow["late_ranks"]
assert 4900 < late["waited_ms"] < 15000 and 2900 < late["longest_ms"] < 3100, slow["late_ranks"]
assert isinstance(threads["late_ranks"], list)
END
[[ $(grep -cE '^late: .*rank 2 was late in [0-9]+ calls \(.*s in all, .*s at most\)' "$TEST_TMPDIR/stderr") == 1 ]] || {
  echo "FAIL: no line about the late rank:"
  cat "$TEST_TMPDIR/stderr"
  exit 1
}
# What is not linked is one line that says what is.
tools/parity_with_slow_rank "${flags[@]}" --backend=mpi --out="$TEST_TMPDIR/x" >"$TEST_TMPDIR/output" 2>&1
[[ $? == 2 ]] || { echo "FAIL: wanted exit 2"; cat "$TEST_TMPDIR/output"; exit 1; }
grep -qF -- '--backend=mpi: comm: backend mpi is not linked into this program: link //comm/mpi; linked: in_process, sim, slow_rank' \
  "$TEST_TMPDIR/output" && [[ $(wc -l <"$TEST_TMPDIR/output") == 1 ]] || { cat "$TEST_TMPDIR/output"; exit 1; }
