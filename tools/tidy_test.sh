#!/usr/bin/env bash
# Runs tidy.py over the source tree that this test was built from. The runfiles
# link to it, so the files need not be listed as data.
set -euo pipefail
root=$(dirname "$(readlink -f WORKSPACE)")
exec python3 "$(dirname "$0")/tidy.py" "$root"
