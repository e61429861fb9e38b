"""One repository rule that turns a distribution package into Bazel labels.

The headers stay where the compiler finds them by itself, so a library costs
no symlinks and no sandbox set-up. What a repository needs to find, and the
package that has it, stands in packages.txt; a missing part stops the build
with the name of its package. The list of libraries below is walked by the
WORKSPACE (deps.bzl) and by the module extension (extensions.bzl).
"""

load("//third_party/absl:targets.bzl", "ABSL_PACKAGES")

_INCLUDE_DIRS = [
    "/usr/local/include",
    "/usr/include",
    "/usr/include/x86_64-linux-gnu",
    "/usr/include/aarch64-linux-gnu",
]

_LIBRARY_DIRS = [
    "/usr/local/lib",
    "/usr/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
]

def _shared_objects(ctx, prefix):
    """Names, as -l wants them, of lib<prefix>*.so on the default library path."""
    names = {}
    for folder in _LIBRARY_DIRS:
        if not ctx.path(folder).exists:
            continue
        for file in ctx.path(folder).readdir():
            if file.basename.startswith("lib" + prefix) and file.basename.endswith(".so"):
                names[file.basename[len("lib"):-len(".so")]] = True
    return sorted(names)

def _folders(ctx, option):
    """The folders that the compiler wrapper prints."""
    printed = ctx.execute([ctx.attr.compiler_wrapper, option]).stdout
    return [d for d in printed.replace("\n", " ").split(" ") if d]

def _write_list(ctx, name, values):
    """Makes found.bzl, which the BUILD file of the repository loads."""
    ctx.file("found.bzl", "\"\"\"Generated: what was found on this machine.\"\"\"\n\n{} = {}\n".format(name, values))

def _require_part(ctx, package, part):
    """Fails where `part` is not there; offers a program as a file of the repository."""
    if part.startswith("<"):
        header = part[1:-1]
        if [d for d in _INCLUDE_DIRS if ctx.path(d + "/" + header).exists]:
            return
    else:
        program = ctx.which(part)
        if program:
            ctx.symlink(program, part)
            return
    fail("@{library} needs {part}, which is in the package {package}: apt-get install {package}".format(
        library = ctx.attr.library,
        package = package,
        part = part,
    ))

def _system_library_impl(ctx):
    for line in ctx.read(ctx.attr.packages).split("\n"):
        words = [word for word in line.split(" ") if word]
        if words and words[0] == "@" + ctx.attr.library:
            _require_part(ctx, words[1], words[2])
    if ctx.attr.compiler_wrapper:
        include_dirs = [
            d
            for d in _folders(ctx, "--showme:incdirs")
            if ctx.path(d + "/" + ctx.attr.wrapper_header).exists
        ]
        if not include_dirs:
            fail("@{}: {} names no folder with {}".format(
                ctx.attr.library,
                ctx.attr.compiler_wrapper,
                ctx.attr.wrapper_header,
            ))
        ctx.symlink(include_dirs[0], "include")
        _write_list(ctx, "LIBRARY_DIRS", _folders(ctx, "--showme:libdirs"))
    if ctx.attr.shared_object_prefix:
        _write_list(ctx, "SHARED_OBJECTS", _shared_objects(ctx, ctx.attr.shared_object_prefix))
    ctx.file("WORKSPACE", "workspace(name = \"{}\")\n".format(ctx.attr.library))
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
        "compiler_wrapper": attr.string(doc = "Program that knows folders off the default paths."),
        "forward": attr.string_list_dict(doc = "Package -> targets that stand for //:system."),
        "library": attr.string(mandatory = True, doc = "Repository name in packages.txt."),
        "shared_object_prefix": attr.string(doc = "Lists lib<prefix>*.so for the BUILD file."),
        "packages": attr.label(default = Label("//third_party:packages.txt")),
        "wrapper_header": attr.string(doc = "Header that tells which of those folders is meant."),
    },
    local = True,
    configure = True,
)

def _library(name, folder, **kwargs):
    return dict(
        name = name,
        library = name,
        build_file = Label("//third_party/{0}:{0}.BUILD".format(folder)),
        **kwargs
    )

SYSTEM_LIBRARIES = [
    _library("com_google_absl", "absl", forward = ABSL_PACKAGES, shared_object_prefix = "absl_"),
    _library("com_google_protobuf", "protobuf"),
    _library("com_google_googletest", "googletest"),
    _library("com_github_google_benchmark", "benchmark"),
    _library("com_github_gflags_gflags", "gflags"),
    _library("onednn", "onednn"),
    _library(
        "openmpi",
        "openmpi",
        compiler_wrapper = "mpicxx",
        wrapper_header = "mpi.h",
    ),
    _library("nlohmann_json", "nlohmann_json"),
    _library("xxhash", "xxhash"),
    _library("gloo", "gloo"),
]
