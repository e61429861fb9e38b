"""One repository rule that turns a distribution package into Bazel labels.

The headers stay where the compiler finds them by itself, so a library costs
no symlinks and no sandbox set-up. A library that is missing stops the build
with the name of its package. The list below is all there is: the WORKSPACE
(deps.bzl) and the module extension (extensions.bzl) both walk it.
"""

load("//third_party/absl:targets.bzl", "ABSL_PACKAGES")

_INCLUDE_DIRS = [
    "/usr/local/include",
    "/usr/include",
    "/usr/include/x86_64-linux-gnu",
    "/usr/include/aarch64-linux-gnu",
]

def _fail_missing(ctx, what):
    fail("Evenkeel needs {what} for @{name}: install the package {package} (apt-get install {package}).".format(
        what = what,
        name = ctx.attr.debian_package if not ctx.attr.label_name else ctx.attr.label_name,
        package = ctx.attr.debian_package,
    ))

def _system_library_impl(ctx):
    for header in ctx.attr.headers:
        if not [d for d in _INCLUDE_DIRS if ctx.path(d + "/" + header).exists]:
            _fail_missing(ctx, "the header <{}>".format(header))
    for program in ctx.attr.programs:
        path = ctx.which(program)
        if not path:
            _fail_missing(ctx, "the program '{}'".format(program))
        ctx.symlink(path, program)
    if ctx.attr.include_dir_from:
        # Headers outside the default path: ask the compiler wrapper where.
        command = ctx.attr.include_dir_from
        if not ctx.which(command[0]):
            _fail_missing(ctx, "the program '{}'".format(command[0]))
        result = ctx.execute(command)
        dirs = [d for d in result.stdout.replace("\n", " ").split(" ") if d and ctx.path(d + "/" + ctx.attr.include_dir_header).exists]
        if not dirs:
            _fail_missing(ctx, "the header <{}>".format(ctx.attr.include_dir_header))
        ctx.symlink(dirs[0], "include")
    ctx.file("WORKSPACE", "workspace(name = \"{}\")\n".format(ctx.attr.label_name))
    ctx.symlink(ctx.attr.build_file, "BUILD.bazel")
    for package, targets in ctx.attr.forward.items():
        lines = [
            "# Generated: names of a source build, all of them the system library.",
            "package(default_visibility = [\"//visibility:public\"])",
        ]
        lines += ["alias(name = \"{}\", actual = \"//:system\")".format(t) for t in targets]
        ctx.file(package + "/BUILD.bazel", "\n".join(lines) + "\n")

system_library = repository_rule(
    implementation = _system_library_impl,
    doc = "A library from the distribution, under the name of its source repository.",
    attrs = {
        "build_file": attr.label(mandatory = True, doc = "BUILD file of the repository."),
        "debian_package": attr.string(mandatory = True, doc = "Package to name when a part is missing."),
        "forward": attr.string_list_dict(doc = "Package -> targets that stand for //:system."),
        "headers": attr.string_list(doc = "Headers that must be on the default include path."),
        "include_dir_from": attr.string_list(doc = "Command that prints include folders."),
        "include_dir_header": attr.string(doc = "Header that tells which of those folders is meant."),
        "label_name": attr.string(doc = "Repository name for messages."),
        "programs": attr.string_list(doc = "Programs to offer as files of the repository."),
    },
    local = True,
    configure = True,
)

def _library(name, build_file, debian_package, **kwargs):
    return dict(
        name = name,
        label_name = name,
        build_file = Label(build_file),
        debian_package = debian_package,
        **kwargs
    )

SYSTEM_LIBRARIES = [
    _library(
        "com_google_absl",
        "//third_party/absl:absl.BUILD",
        "libabsl-dev",
        headers = ["absl/status/statusor.h"],
        forward = ABSL_PACKAGES,
    ),
    _library(
        "com_google_protobuf",
        "//third_party/protobuf:protobuf.BUILD",
        "libprotobuf-dev protobuf-compiler",
        headers = ["google/protobuf/message.h"],
        programs = ["protoc"],
    ),
    _library(
        "com_google_googletest",
        "//third_party/googletest:googletest.BUILD",
        "libgtest-dev libgmock-dev",
        headers = ["gtest/gtest.h", "gmock/gmock.h"],
    ),
    _library(
        "com_github_google_benchmark",
        "//third_party/benchmark:benchmark.BUILD",
        "libbenchmark-dev",
        headers = ["benchmark/benchmark.h"],
    ),
    _library(
        "com_github_gflags_gflags",
        "//third_party/gflags:gflags.BUILD",
        "libgflags-dev",
        headers = ["gflags/gflags.h"],
    ),
    _library(
        "onednn",
        "//third_party/onednn:onednn.BUILD",
        "libdnnl-dev",
        headers = ["oneapi/dnnl/dnnl.hpp"],
    ),
    _library(
        "openmpi",
        "//third_party/openmpi:openmpi.BUILD",
        "libopenmpi-dev",
        include_dir_from = ["mpicxx", "--showme:incdirs"],
        include_dir_header = "mpi.h",
    ),
    _library(
        "nlohmann_json",
        "//third_party/nlohmann_json:nlohmann_json.BUILD",
        "nlohmann-json3-dev",
        headers = ["nlohmann/json.hpp"],
    ),
    _library(
        "xxhash",
        "//third_party/xxhash:xxhash.BUILD",
        "libxxhash-dev",
        headers = ["xxhash.h"],
    ),
]
