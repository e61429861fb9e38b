#!/usr/bin/env python3
"""Counts tests in a file of Bazel's build events (--build_event_json_file).

Prints "N passed, N failed, N skipped". A test that was asked for but has no
result (its build failed) counts as failed; one whose platform constraints do
not hold (a GPU test without CUDA) counts as skipped. Exits 1 when no test
passed or any failed.
"""

import json
import sys


def count(lines):
    """Returns the sets of labels (passed, failed, skipped)."""
    tests, passed, failed, skipped = set(), set(), set(), set()
    for line in lines:
        event = json.loads(line)
        ident = event.get("id", {})
        if "targetConfigured" in ident:
            label = ident["targetConfigured"]["label"]
            kind = event.get("configured", {}).get("targetKind", "")
            if kind.endswith("_test rule"):
                tests.add(label)
            if event.get("aborted", {}).get("reason") == "SKIPPED":
                skipped.add(label)
        elif "targetCompleted" in ident:
            if event.get("aborted", {}).get("reason") == "SKIPPED":
                skipped.add(ident["targetCompleted"]["label"])
        elif "testSummary" in ident:
            label = ident["testSummary"]["label"]
            tests.add(label)
            status = event.get("testSummary", {}).get("overallStatus")
            (passed if status in ("PASSED", "FLAKY") else failed).add(label)
    skipped &= tests
    skipped -= passed
    failed |= tests - passed - skipped
    failed -= skipped
    return passed, failed, skipped


def main():
    try:
        with open(sys.argv[1], encoding="utf-8") as events:
            passed, failed, skipped = count(events)
    except (IndexError, OSError, ValueError) as error:
        print(f"count_tests: {error}", file=sys.stderr)
        passed, failed, skipped = set(), set(), set()
    for label in sorted(failed):
        print(f"failed: {label}")
    print(f"{len(passed)} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
