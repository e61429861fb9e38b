"""Evenkeel's build rules. BUILD files load rules from here only.

They set what every target needs whatever flags a build is given: the include
prefix ("evenkeel/<package>/<file>.h", so that a consumer's own runtime/ or
testing/ folder never shadows ours), C++20, warnings, no contraction
of a*b+c (results must not depend on who compiled them), the layering check.

    ek_cc_library(name = "mesh", srcs = ["mesh.cc"], hdrs = ["mesh.h"], deps = [...])
    ek_cc_test(name = "mesh_test", srcs = ["mesh_test.cc"], deps = [":mesh", ...])
    ek_proto_library(name = "order_proto", srcs = ["order.proto"])
    ek_cc_proto_library(name = "order_cc_proto", deps = [":order_proto"])
    ek_mpi_test(name = "mpi_test", srcs = ["mpi_test.cc"], ranks = [2, 4], deps = [...])
    ek_cuda_library(name = "cuda_ops", srcs = ["ops.cu"], hdrs = ["cuda_ops.h"])
    ek_gpu_test(name = "cuda_ops_test", srcs = ["cuda_ops_test.cc"], deps = [":cuda_ops"])
    ek_script_test(name = "tidy_test", script = "tidy_test.py")

A dep against the arrows of the house (//tools/arrows) stops the build here.
"""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")
load("@rules_proto//proto:defs.bzl", "proto_library")
load("//third_party/cuda:cuda_library.bzl", "REQUIRES_CUDA", "cuda_objects")
load("//tools/arrows:arrows.bzl", "check_arrows")

EK_COPTS = [
    "-std=c++20",
    "-Wall",
    "-Wextra",
    # One rounding per operation, on every compiler and target.
    "-ffp-contract=off",
]

_FEATURES = ["layering_check"]

def _include_prefix():
    return "evenkeel/" + native.package_name()

def _check_deps(name, deps):
    check_arrows(native.package_name(), name, deps)
    return deps

def ek_cc_library(name, hdrs = [], deps = [], copts = [], features = [], **kwargs):
    """A library whose headers are included as "evenkeel/<package>/<file>.h"."""
    prefix = {}
    if hdrs and native.package_name():
        prefix = {
            "include_prefix": _include_prefix(),
            "strip_include_prefix": "/" + native.package_name(),
        }
    prefix.update(kwargs)

    # One archive instead of a shared object per library: every object is
    # compiled once, and tests and binaries link the same code.
    prefix.setdefault("linkstatic", True)
    cc_library(
        name = name,
        hdrs = hdrs,
        deps = _check_deps(name, deps),
        copts = EK_COPTS + copts,
        features = _FEATURES + features,
        **prefix
    )

def ek_cc_binary(name, deps = [], copts = [], features = [], **kwargs):
    """A program."""
    cc_binary(
        name = name,
        deps = _check_deps(name, deps),
        copts = EK_COPTS + copts,
        features = _FEATURES + features,
        **kwargs
    )

def ek_cc_test(name, size = "small", deps = [], copts = [], features = [], gtest_main = True, **kwargs):
    """A GoogleTest program; gtest, gmock and their main come with it.

    Args:
      name: target name, the tested file's name with _test behind it.
      size: Bazel's test size; it sets the timeout.
      deps: libraries under test and what the test includes.
      copts: further compiler options.
      features: further toolchain features.
      gtest_main: False where srcs or deps bring a main of their own.
      **kwargs: passed to cc_test.
    """
    kwargs.setdefault("linkstatic", True)
    gtest = ["@com_google_googletest//:gtest"]
    if gtest_main:
        gtest.append("@com_google_googletest//:gtest_main")
    cc_test(
        name = name,
        size = size,
        copts = EK_COPTS + copts,
        features = _FEATURES + features,
        deps = _check_deps(name, deps) + gtest,
        **kwargs
    )

def ek_mpi_test(
        name,
        srcs,
        deps = [],
        ranks = [2, 4],
        size = "small",
        args = [],
        data = [],
        tags = [],
        gtest_main = False,
        timeout = None,
        **kwargs):
    """A GoogleTest program run under mpirun, once per number of ranks.

    Makes the test program <name>_program, one test <name>_<n> for each n in
    ranks, and the suite <name>. The test fails when any rank fails. srcs or
    deps bring a main that initializes MPI.

    Args:
      name: name of the test suite.
      srcs: sources of the program.
      deps: its libraries, gtest comes with it.
      ranks: numbers of processes to run with.
      size: Bazel's test size.
      args: arguments of the program.
      data: files the program reads.
      tags: further tags; "mpi" and the processor demand are set.
      gtest_main: whether to link GoogleTest's own main.
      timeout: Bazel's test timeout.
      **kwargs: passed to the program's cc_binary.
    """
    gtest = ["@com_google_googletest//:gtest"]
    if gtest_main:
        gtest.append("@com_google_googletest//:gtest_main")
    program = name + "_program"
    ek_cc_binary(
        name = program,
        testonly = True,
        srcs = srcs,
        data = data,
        deps = deps + gtest,
        tags = tags + ["mpi"],
        **kwargs
    )
    for n in ranks:
        native.sh_test(
            name = "{}_{}".format(name, n),
            size = size,
            timeout = timeout,
            srcs = [Label("//tools:mpi_test.sh")],
            args = [str(n), "$(rootpath :{})".format(program)] + args,
            data = [":" + program] + data,
            # Ranks wait by polling: give them the processors, as far as
            # there are any.
            tags = tags + ["mpi", "cpu:2"],
        )
    native.test_suite(
        name = name,
        tests = [":{}_{}".format(name, n) for n in ranks],
        tags = tags + ["mpi"],
    )

def ek_fuzz_test(name, srcs, deps = [], runs = 1000, max_len = 512, size = "small", tags = []):
    """A function LLVMFuzzerTestOneInput that must not crash, whatever the bytes.

    Makes the test <name>, which runs a fixed set of generated inputs, and the
    program <name>_libfuzzer for real fuzzing, built on demand:

        bazel run --config=fuzz //moe:router_fuzz_libfuzzer -- -max_total_time=60

    Args:
      name: name of the test.
      srcs: sources that define LLVMFuzzerTestOneInput.
      deps: what they include.
      runs: inputs that the test tries.
      max_len: largest input in bytes.
      size: Bazel's test size.
      tags: further tags; "fuzz" is set.
    """
    cc_test(
        name = name,
        size = size,
        srcs = srcs,
        args = ["-runs={}".format(runs), "-max_len={}".format(max_len)],
        copts = EK_COPTS,
        features = _FEATURES,
        linkstatic = True,
        tags = tags + ["fuzz"],
        deps = _check_deps(name, deps) + [Label("//runtime/base:fuzz_main")],
    )
    ek_cc_binary(
        name = name + "_libfuzzer",
        testonly = True,
        srcs = srcs,
        linkopts = ["-fsanitize=fuzzer"],
        tags = tags + ["fuzz", "manual"],
        deps = deps,
    )

def ek_cuda_library(name, srcs, hdrs = [], deps = [], copts = [], testonly = False, **kwargs):
    """A library of CUDA sources (.cu), compiled by nvcc; skipped where CUDA is off.

    Args:
      name: target name.
      srcs: .cu files, and headers only they include.
      hdrs: headers for host code.
      deps: libraries that the sources include; the CUDA runtime comes with it.
      copts: further options of nvcc.
      testonly: for tests only.
      **kwargs: passed to the library's cc_library.
    """
    deps = _check_deps(name, deps) + ["@local_cuda//:cudart"]
    ek_cc_library(
        name = name + "_headers",
        testonly = testonly,
        hdrs = hdrs,
        target_compatible_with = REQUIRES_CUDA,
        visibility = ["//visibility:private"],
        deps = deps,
    )
    cuda_objects(
        name = name + "_objects",
        testonly = testonly,
        srcs = srcs,
        copts = copts,
        target_compatible_with = REQUIRES_CUDA,
        deps = [":" + name + "_headers"],
    )
    ek_cc_library(
        name = name,
        testonly = testonly,
        srcs = [":" + name + "_objects"],
        hdrs = hdrs,
        target_compatible_with = REQUIRES_CUDA,
        deps = deps,
        **kwargs
    )

def ek_gpu_test(name, tags = [], **kwargs):
    """An ek_cc_test that needs a GPU: skipped where CUDA is off, failing where it is on without one."""
    ek_cc_test(
        name = name,
        tags = tags + ["gpu"],
        target_compatible_with = REQUIRES_CUDA,
        **kwargs
    )

def ek_script_test(name, script, size = "small", **kwargs):
    """A test that is a script; its first line names the interpreter."""
    native.sh_test(name = name, size = size, srcs = [script], **kwargs)

def ek_proto_library(name, srcs, deps = [], **kwargs):
    """A proto_library imported as "evenkeel/<package>/<file>.proto"."""
    proto_library(
        name = name,
        srcs = srcs,
        deps = _check_deps(name, deps),
        import_prefix = _include_prefix(),
        strip_import_prefix = "/" + native.package_name(),
        **kwargs
    )

def ek_cc_proto_library(name, deps, **kwargs):
    """C++ for an ek_proto_library, included as "evenkeel/<package>/<file>.pb.h"."""
    native.cc_proto_library(name = name, deps = _check_deps(name, deps), **kwargs)
