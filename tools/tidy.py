#!/usr/bin/env python3
"""Checks the tree for what compilers do not: run by //tools:tidy_test.

    tools/tidy.py [ROOT]      prints "file:line: what is wrong", exits 1 if anything is

Each rule is a function from a file to messages; tidy_selftest.py feeds every
rule a bad sample, so that no rule is dead.
"""

import os
import re
import shutil
import subprocess
import sys

ROOMS = ("runtime", "comm", "moe", "zero3", "testing", "tools")
LIBRARY_ROOMS = ("runtime", "comm", "moe", "zero3", "testing")
MAX_HEADER_LINES = 400
CONSUMER = "testing/consumer/"  # a stranger's workspace: its own rules and names

# Written in pieces, so that this file does not match itself.
MARKERS = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
UNFINISHED = re.compile("|".join(("not implemented" + " yet", "for " + "now,", "place" + "holder")), re.IGNORECASE)
MACHINE_PATH = re.compile(r"(?<![\w.}/-])/(?:ho" + r"me|ro" + r"ot|wo" + r"rk|mnt|Users)/[\w.-]")

# Header -> (folders that may include it, what to use instead).
RESTRICTED_INCLUDES = (
    (re.compile(r"mpi\.h"), ("comm/mpi/", "tools/bench/"), "//comm/mpi"),
    (re.compile(r"gflags/.*"), ("tools/",), "a validated struct or proto"),
    (re.compile(r"(cuda|cublas|nccl).*\.h"), ("runtime/device/", "runtime/ops/", "comm/nccl/", "tools/bench/"),
     "//runtime/device"),
    (re.compile(r"(oneapi/dnnl/.*|dnnl.*|omp\.h)"), ("runtime/ops/", "tools/bench/"), "//runtime/ops"),
    (re.compile(r"iostream"), ("tools/",), "a returned string"),
)


class File:
    """A file of the tree: its path from the root, its text and lines."""

    def __init__(self, path, text):
        self.path = path
        self.text = text
        self.lines = text.splitlines()
        self.name = os.path.basename(path)
        self.folder = os.path.dirname(path)
        self.room = path.split("/")[0]

    def is_build(self):
        return self.name in ("BUILD", "BUILD.bazel", "WORKSPACE")

    def is_cpp(self):
        return self.name.endswith((".h", ".cc", ".cu"))

    def is_test(self):
        """Test programs and mains may read flags and print."""
        return bool(re.search(r"(_test|_main|_fuzz|_bench(mark)?)\.(cc|cu)$", self.name))

    def is_library(self):
        return (self.is_cpp() and self.room in LIBRARY_ROOMS and not self.is_test() and
                not self.path.startswith(CONSUMER))

    def code_lines(self):
        """Yields (number, line without its // comment)."""
        for number, line in enumerate(self.lines, 1):
            yield number, re.sub(r"//.*", "", line) if self.is_cpp() else line


def header_length(file):
    if file.name.endswith(".h") and len(file.lines) > MAX_HEADER_LINES:
        yield len(file.lines), f"header has {len(file.lines)} lines, more than {MAX_HEADER_LINES}: split it"


def include_guard(file):
    if not file.name.endswith(".h") or file.room not in ROOMS or file.path.startswith(CONSUMER):
        return
    guard = "EVENKEEL_" + re.sub(r"[^A-Za-z0-9]", "_", file.path).upper() + "_"
    if f"#ifndef {guard}\n#define {guard}\n" not in file.text:
        yield 1, f"include guard is not {guard}"


def file_comment(file):
    if "/testdata/" in file.path:
        return  # it may be broken on purpose
    if not file.text.strip():
        if not file.name.endswith(".txt"):
            yield 1, "empty file"
        return
    first = file.lines[0]
    if file.name.endswith((".h", ".cc", ".cu", ".proto")):
        # The sources and the test of a header may leave the comment to it.
        stem = re.sub(r"_test$", "", os.path.splitext(file.path)[0])
        good = first.startswith("//") or first == f'#include "evenkeel/{stem}.h"'
    elif file.name.endswith(".bzl"):
        good = first.startswith('"""')
    elif file.is_build() or file.name.endswith((".sh", ".py", ".md", ".textproto", ".bazelrc")):
        good = first.startswith("#")
    else:
        return
    if not good:
        yield 1, "the file does not start with a comment that says what it is"


def leftovers(file):
    for number, line in enumerate(file.lines, 1):
        for found in (MARKERS.search(line), UNFINISHED.search(line)):
            if found:
                yield number, f"unfinished-sounding word '{found.group(0)}'"


def machine_paths(file):
    for number, line in enumerate(file.lines, 1):
        found = MACHINE_PATH.search(line)
        if found:
            yield number, f"path of one machine: {found.group(0)}..."


def printing(file):
    if not file.is_library():
        return
    for number, line in file.code_lines():
        found = re.search(r"std::cout|(?<![\w:])(std::)?(printf|puts)\s*\(", line)
        if found:
            yield number, f"'{found.group(0)}' in a library: return the text instead"


def environment(file):
    if not file.is_library():
        return
    for number, line in file.code_lines():
        if re.search(r"\b(secure_)?getenv\s*\(|\bDEFINE_(bool|int32|int64|double|string)\s*\(", line):
            yield number, "environment or flag read below tools/: configuration arrives as a value"


def includes(file):
    if not file.is_cpp():
        return
    for number, line in enumerate(file.lines, 1):
        found = re.match(r'\s*#\s*include\s+([<"])([^>"]+)', line)
        if not found:
            continue
        header = found.group(2)
        if found.group(1) == '"' and not file.path.startswith(CONSUMER) and (header.split("/")[0] in ROOMS or "/" not in header):
            if not RESTRICTED_INCLUDES[0][0].fullmatch(header) and not header.endswith(("nccl.h", "omp.h")):
                yield number, f'include "{header}" as "evenkeel/<package>/<file>.h"'
        if file.room == "third_party" or (file.is_test() and not header.startswith(("cuda", "nccl"))):
            continue
        for pattern, folders, instead in RESTRICTED_INCLUDES:
            if pattern.fullmatch(header) and not file.path.startswith(folders):
                yield number, f"<{header}> belongs to {', '.join(folders)}: use {instead}"


def names(file):
    if not file.is_cpp():
        return
    for number, line in file.code_lines():
        if re.search(r"\busing namespace std\b", line):
            yield number, "using namespace std"
        if re.search(r"^\s*#\s*if(?!.*_H_$).*\b(__CUDACC__|\w*CUDA\w*)\b", line) and not file.name.endswith((".cu", "_cuda.h")):
            yield number, "CUDA condition in a source file: use a file of its own and target_compatible_with"


def build_files(file):
    if not file.is_build() or file.room not in ROOMS:
        return
    if file.path.startswith(CONSUMER):
        return
    for number, line in enumerate(file.lines, 1):
        found = re.match(r"(cc|proto|sh|py)_(library|binary|test|proto_library)\(", line)
        if found:
            yield number, f"{found.group(0)[:-1]} is not from //tools:build_defs.bzl"
        found = re.match(r'load\("([^"]+)"', line)
        if found and not found.group(1).startswith((":", "//tools", "//testing", "//third_party")):
            yield number, f"load from {found.group(1)}: rules come through //tools:build_defs.bzl"


RULES = (header_length, include_guard, file_comment, leftovers, machine_paths, printing, environment, includes,
         names, build_files)


def orphans(files):
    """Sources that no BUILD file of their folder names; not a rule per file."""
    builds = {file.folder: file.text for file in files if file.is_build()}
    for file in files:
        if not file.name.endswith((".h", ".cc", ".cu", ".proto")) or file.path.startswith(("third_party/", CONSUMER)):
            continue
        folder, inside = file.folder, file.name
        while folder and folder not in builds:
            inside = os.path.basename(folder) + "/" + inside
            folder = os.path.dirname(folder)
        if f'"{inside}"' not in builds.get(folder, "") and "glob(" not in builds.get(folder, ""):
            yield file.path, 1, f"no target in {folder or 'the root'}/BUILD has this file"


TRAIL = re.compile(r"Trail(\d+)(?=[A-Z_]|$)|(?<=\d)(?:_|And)(\d+)(?=[A-Z_]|$)")


def trail_numbers(name):
    """The numbers of the bug trail in a test's name: Trail3_Trail4_X, Trail35_37_X and Trail19And20_X."""
    return {int(first or more) for first, more in TRAIL.findall(name)} if "Trail" in name else set()


def trails(files):
    """Tests that pages name for an entry of the bug trail, and that are gone or have another number."""
    tests = set()
    for file in files:
        if file.is_test():
            tests.update(re.findall(r"^(?:TYPED_)?TEST(?:_[PF])?\(\w+,\s*(\w+)\)", file.text, re.MULTILINE))
    for file in files:
        if not file.path.startswith("docs/"):
            continue
        for number, line in enumerate(file.lines, 1):
            named = re.findall(r"`(?:\w+\.)?(\w*Trail\d\w*)`", line)
            for name in named:
                if name not in tests:
                    yield file.path, number, f"no test is called {name}"
            row = re.match(r"\| (\d+(?:, \d+)*) \|", line)
            missing = set(map(int, row[1].split(", "))) - set().union(*map(trail_numbers, named)) if row and named else ()
            for entry in missing:
                yield file.path, number, f"no test of this row has {entry} in its name"


FAULT_PAGE = "docs/comm_faults.md"
# The rows of the fault table about collectives: agreement, buffers and numbers, processes and start-up.
FAULTS = [f"C{n:02}" for n in (1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 15, 16, 17, 18, 20, 21, 22, 23, 24, 25, 26, 27, 29, 30, 31)]


def faults(files):
    """Rows of the fault page that are missing, name no test with their id, or name a test that is gone."""
    pages = [file for file in files if file.path == FAULT_PAGE]
    tests = set()
    for file in files if pages else ():
        if file.is_cpp() and file.path.startswith("comm/"):
            tests.update(re.findall(r"^TEST(?:_[PF])?\(\w+,\s*(C\d\d_\w+)\)", file.text, re.MULTILINE))
            tests.update(re.findall(r"^INSTANTIATE_TEST_SUITE_P\((C\d\d_\w+),", file.text, re.MULTILINE))
            tests.update(re.findall(r'"(C\d\d_\w+)"', file.text))  # cases of the conformance suite
    for page in pages:
        rows = set()
        for number, line in enumerate(page.lines, 1):
            row = re.match(r"\| (C\d\d) \|", line)
            named = re.findall(r"`(C\d\d_\w+)`", line)
            for name in named:
                if name not in tests:
                    yield page.path, number, f"no test is called {name}"
            if row:
                rows.add(row[1])
                if not any(name.startswith(row[1]) for name in named):
                    yield page.path, number, f"no test of this row has {row[1]} in its name"
        for missing in sorted(set(FAULTS) - rows):
            yield page.path, 1, f"no row {missing}"


def check(files):
    """Returns [(path, line, message)] for a list of File."""
    found = [(file.path, line, message) for file in files for rule in RULES for line, message in rule(file)]
    return sorted(found + list(orphans(files)) + list(trails(files)) + list(faults(files)))


def tree(root):
    """Returns the text files under root, git-ignored ones left out."""
    paths = []
    if shutil.which("git"):
        listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"], capture_output=True,
                                text=True, check=False)
        paths = listed.stdout.splitlines() if listed.returncode == 0 else []
    if not paths:
        for folder, folders, names_here in os.walk(root):
            folders[:] = [f for f in folders if not f.startswith("bazel-") and f not in (".git", ".cache", "parity-report")]
            paths += [os.path.relpath(os.path.join(folder, name), root) for name in names_here
                      if name != "user.bazelrc"]
    files = []
    for path in sorted(paths):
        full = os.path.join(root, path)
        if path == "LICENSE" or os.path.islink(full) or not os.path.isfile(full):
            continue
        try:
            with open(full, encoding="utf-8") as stream:
                files.append(File(path, stream.read()))
        except UnicodeDecodeError:
            pass  # a picture
    return files


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else "."
    files = tree(root)
    if not any(file.path == "WORKSPACE" for file in files):
        print(f"tidy: {root} is not the root of the tree")
        return 1
    found = check(files)
    for path, line, message in found:
        print(f"{path}:{line}: {message}")
    print(f"{len(files)} files, {len(found)} complaints")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
