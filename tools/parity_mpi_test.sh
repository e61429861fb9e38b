#!/usr/bin/env bash
# The same job as threads and as processes: the bits of the losses and of the parameters are equal.
set -u
flags=(--tp=2 --ep=2 --dp=2 --steps=3 --candidate=drop_gather,fused)
tools/parity "${flags[@]}" --out="$TEST_TMPDIR/threads" || exit 1
tools/mpi_test.sh 4 tools/parity --backend=mpi "${flags[@]}" --out="$TEST_TMPDIR/mpi" || exit 1
python3 - "$TEST_TMPDIR" <<'END' || exit 1
import json, sys
threads, mpi = (json.load(open(f"{sys.argv[1]}/{kind}/report.json"))["runs"] for kind in ("threads", "mpi"))
assert len(threads) == len(mpi) == 3
for a, b in zip(threads, mpi):
    for key in ("order", "verdict", "loss", "loss_digest", "parameter_digest", "bytes", "collectives"):
        assert a[key] == b[key], (a["order"], key, a[key], b[key])
END
# Nodes of two processes, exchanges in two levels.
nodes=(--tp=1 --ep=4 --dp=4 --steps=2 --ranks_per_node=2 --candidate="two_level(reference),overlapped(two_level(token_sliced)),per_node(dedup)")
tools/parity "${nodes[@]}" --out="$TEST_TMPDIR/threads" || exit 1
tools/mpi_test.sh 4 tools/parity --backend=mpi "${nodes[@]}" --out="$TEST_TMPDIR/mpi" || exit 1
python3 - "$TEST_TMPDIR" <<'END' || exit 1
import json, sys
threads, mpi = (json.load(open(f"{sys.argv[1]}/{kind}/report.json"))["runs"] for kind in ("threads", "mpi"))
assert len(threads) == len(mpi) == 4
for a, b in zip(threads, mpi):
    for key in ("order", "verdict", "loss_digest", "parameter_digest", "bytes", "collectives"):
        assert a[key] == b[key], (a["order"], key, a[key], b[key])
    between = b["bytes"]["ep"]["inter_node"]
    assert between["counted"] == between["predicted"] > 0, b
END
# Every process picks the same order.
tools/mpi_test.sh 4 tools/parity --backend=mpi --tp=1 --ep=2 --dp=4 --steps=2 --candidate=auto --out="$TEST_TMPDIR/auto" || exit 1
# Another layout, on fewer of the processes: the same bits, and those of threads.
layouts() {  # processes, flags
  local ranks=$1
  shift
  tools/parity "$@" --numerics=canonical --steps=2 --out="$TEST_TMPDIR/threads" || exit 1
  tools/mpi_test.sh "$ranks" tools/parity --backend=mpi "$@" --numerics=canonical --steps=2 \
    --out="$TEST_TMPDIR/mpi" >"$TEST_TMPDIR/output" 2>&1 || { cat "$TEST_TMPDIR/output"; exit 1; }
  python3 - "$TEST_TMPDIR" <<'END' || exit 1
import json, sys
threads, mpi = (json.load(open(f"{sys.argv[1]}/{kind}/report.json"))["runs"] for kind in ("threads", "mpi"))
assert len(threads) == len(mpi) > 1
assert [run["verdict"] for run in mpi] == ["reference"] + ["bitwise"] * (len(mpi) - 1), mpi
for a, b in zip(threads, mpi):
    for key in ("order", "verdict", "note", "loss", "loss_digest", "gradient_digest", "parameter_digest"):
        assert a[key] == b[key], (a["order"], key, a[key], b[key])
END
}
layouts 4 --tp=2 --ep=2 --dp=2 --baseline_layout=dp=1 --candidate=fused,token_sliced
layouts 8 --tp=2 --ep=4 --dp=4 --baseline_layout=tp=1,ep=2,dp=2 --candidate=fused --dtype=bf16
tools/mpi_test.sh 2 tools/parity --backend=mpi --tp=1 --ep=2 --dp=2 --numerics=canonical --baseline_layout=dp=4 \
  --out="$TEST_TMPDIR/x" >"$TEST_TMPDIR/output" 2>&1
[[ $? == 2 ]] || { cat "$TEST_TMPDIR/output"; echo "FAIL: wanted exit 2"; exit 1; }
[[ $(grep -c 'needs 4 ranks, the world has 2' "$TEST_TMPDIR/output") == 1 ]] || { cat "$TEST_TMPDIR/output"; exit 1; }
# A world of another size is one line from one rank.
tools/mpi_test.sh 2 tools/parity --backend=mpi "${flags[@]}" --out="$TEST_TMPDIR/x" >"$TEST_TMPDIR/output" 2>&1
[[ $? == 2 ]] || { echo "FAIL: wanted exit 2"; exit 1; }
[[ $(grep -c 'a world of 4 is wanted, the job has 2 ranks' "$TEST_TMPDIR/output") == 1 ]] || { cat "$TEST_TMPDIR/output"; exit 1; }
