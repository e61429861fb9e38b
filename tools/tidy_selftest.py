#!/usr/bin/env python3
"""Proves that every rule of tidy.py fires on a bad sample and not on a good one."""

import os
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.getcwd(), "tools"))
import tidy  # pylint: disable=wrong-import-position

GUARD = "// A mesh.\n#ifndef EVENKEEL_COMM_MESH_H_\n#define EVENKEEL_COMM_MESH_H_\n{}\n#endif\n"

# rule -> [(path, text that must be refused)]
BAD = {
    tidy.header_length: [("comm/mesh.h", "// A mesh.\n" + "int x;\n" * 400)],
    tidy.include_guard: [
        ("comm/mesh.h", "// A mesh.\n#ifndef COMM_MESH_H_\n#define COMM_MESH_H_\n#endif\n"),
        ("comm/mesh.h", "// A mesh.\n#pragma once\n"),
    ],
    tidy.file_comment: [
        ("comm/mesh.cc", "int x;\n"),
        ("comm/BUILD", "load()\n"),
        ("moe/order.proto", 'syntax = "proto3";\n'),
        ("moe/own.textproto", 'name: "own"\n'),
        ("tools/x.bzl", "x = 1\n"),
        ("comm/mesh.cc", ""),
    ],
    tidy.leftovers: [
        ("comm/mesh.cc", "// TO" + "DO: later\n"),
        ("docs/a.md", "# A\nIt is not implemented " + "yet.\n"),
    ],
    tidy.machine_paths: [("docs/a.md", "# A\nSee /ho" + "me/me/x.\n"), ("comm/a.cc", '// A.\nf("/ro' + 'ot/x");\n')],
    tidy.printing: [
        ("comm/mesh.cc", "// A.\nstd::cout << 1;\n"),
        ("comm/mesh.cc", '// A.\nprintf("x");\n'),
        ("comm/mesh.cc", '// A.\nstd::puts("x");\n'),
    ],
    tidy.environment: [
        ("moe/router.cc", '// A.\nauto x = std::getenv("X");\n'),
        ("moe/router.cc", '// A.\nDEFINE_bool(x, true, "");\n'),
    ],
    tidy.includes: [
        ("moe/router.cc", "// A.\n#include <mpi.h>\n"),
        ("moe/router.cc", "// A.\n#include <gflags/gflags.h>\n"),
        ("moe/router.cc", '// A.\n#include "gflags/gflags.h"\n'),
        ("moe/router.cc", "// A.\n#include <cuda_runtime.h>\n"),
        ("moe/router.cc", "// A.\n#include <iostream>\n"),
        ("moe/router.cc", '// A.\n#include "oneapi/dnnl/dnnl.hpp"\n'),
        ("moe/router.cc", '// A.\n#include "comm/mesh.h"\n'),
        ("moe/router_test.cc", '// A.\n#include "router.h"\n'),
    ],
    tidy.names: [
        ("comm/a.cc", "// A.\nusing namespace std;\n"),
        ("comm/a.cc", "// A.\n#ifdef EVENKEEL_CUDA\n#endif\n"),
    ],
    tidy.build_files: [
        ("comm/BUILD", "# A.\ncc_library(\n"),
        ("comm/BUILD", '# A.\nload("@rules_cc//cc:defs.bzl", "cc_library")\n'),
    ],
}

GOOD = [
    ("comm/mesh.h", GUARD.format('#include "absl/status/status.h"\n#include "evenkeel/comm/topology.h"\n#include <mutex>')),
    ("comm/mesh.cc", '#include "evenkeel/comm/mesh.h"\n'),
    ("comm/mesh_test.cc", '#include "evenkeel/comm/mesh.h"\n'),
    ("runtime/cuda/x.h", "// X.\n#ifndef EVENKEEL_RUNTIME_CUDA_X_H_\n#define EVENKEEL_RUNTIME_CUDA_X_H_\n#endif\n"),
    ("comm/mpi/a.cc", "// A.\n#include <mpi.h>\n"),
    ("comm/mesh_test.cc", '// A.\n#include <iostream>\nint main() { std::cout << getenv("X"); }\n'),
    ("tools/parity.cc", '// A.\n#include <gflags/gflags.h>\nDEFINE_bool(x, true, "");\nint main() { printf("x"); }\n'),
    ("comm/a.cc", '// A: std::cout is not used.\nint n = std::snprintf(b, 3, "x");\nfoo::printf(1);\n'),
    ("comm/BUILD", '# A.\nload("//tools:build_defs.bzl", "ek_cc_library")\nek_cc_library(name = "x", srcs = ["x.cc"])\n'),
    ("docs/a.md", "# A\nThe texts in /usr/share/common-licenses; `tools/{}/x` and a.b/{}/c.\n".format("work", "root")),
]


class TidyTest(unittest.TestCase):

    def test_every_rule_has_a_bad_sample(self):
        self.assertEqual(set(tidy.RULES), set(BAD))

    def test_rules_fire_on_bad_samples(self):
        for rule, samples in BAD.items():
            for path, text in samples:
                with self.subTest(rule=rule.__name__, text=text[:60]):
                    self.assertTrue(list(rule(tidy.File(path, text))))

    def test_good_samples_pass_all_rules(self):
        for path, text in GOOD:
            for rule in tidy.RULES:
                with self.subTest(rule=rule.__name__, path=path):
                    self.assertEqual(list(rule(tidy.File(path, text))), [])

    def test_file_in_no_target_is_found(self):
        build = tidy.File("comm/BUILD", '# A.\nx(srcs = ["mesh.cc"])\n')
        mesh = tidy.File("comm/mesh.cc", "// A.\n")
        lost = tidy.File("comm/lost.cc", "// A.\n")
        nested = tidy.File("comm/deep/lost.h", "// A.\n")
        self.assertEqual([path for path, _, _ in tidy.orphans([build, mesh, lost, nested])],
                         ["comm/lost.cc", "comm/deep/lost.h"])

    def test_trail_entries_without_their_test_are_found(self):
        test = tidy.File("moe/x_test.cc", "// A.\nTEST(X, Trail3_Trail4_Capacity) {}\nTEST_P(X, C1_Trail35_37And38_Norm) {}\n"
                         "TYPED_TEST(X, Trail7_TopK) {}\n")
        page = tidy.File("docs/a.md", "| 3, 4 | x | `Trail3_Trail4_Capacity` |\n"
                         "| 35, 37, 38 | x | `X.C1_Trail35_37And38_Norm` |\n"
                         "| 7, 8 | x | `Trail7_TopK` |\n"
                         "| 9 | x | `Trail9_Gone` |\n"
                         "| 10 | x | not a test: `reason` |\n")
        self.assertEqual([line for _, line, _ in tidy.trails([test, page])], [3, 4])

    def test_rows_of_the_fault_page_without_their_test_are_found(self):
        rows = "".join(f"| {row} | x | `{row}_Case` |\n" for row in tidy.FAULTS)
        cases = "".join(f'  add("{row}_Case", Case);\n' for row in tidy.FAULTS if row not in ("C06", "C12", "C22"))
        test = tidy.File("comm/x_test.cc", "// A.\nTEST(X, C06_Case) {}\nINSTANTIATE_TEST_SUITE_P(C12_Case, X);\n"
                         "TEST_F(X,\n       C22_Case) {}\n" + cases)
        page = tidy.File(tidy.FAULT_PAGE, rows)
        self.assertEqual(list(tidy.faults([test, page])), [])
        self.assertEqual(list(tidy.faults([test])), [])
        gone = tidy.File("comm/x_test.cc", test.text.replace("C22_Case", "C22_Other"))
        self.assertEqual([message for _, _, message in tidy.faults([gone, page])], ["no test is called C22_Case"])
        other = tidy.File(tidy.FAULT_PAGE, rows.replace("`C31_Case`", "`C30_Case`").replace("| C01 |", "| - |"))
        self.assertEqual([message for _, _, message in tidy.faults([test, other])],
                         ["no test of this row has C31 in its name", "no row C01"])


if __name__ == "__main__":
    unittest.main()
