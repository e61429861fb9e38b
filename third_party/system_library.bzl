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
    if ctx.attr.include_dir_command:
        # Headers outside the default path: the compiler wrapper knows where.
        output = ctx.execute(ctx.attr.include_dir_command).stdout
        dirs = [d for d in output.replace("\n", " ").split(" ") if d]
        dirs = [d for d in dirs if ctx.path(d + "/" + ctx.attr.include_dir_header).exists]
        if not dirs:
            fail("@{}: no {} in the folders that '{}' prints".format(
                ctx.attr.library,
                ctx.attr.include_dir_header,
                " ".join(ctx.attr.include_dir_command),
            ))
        ctx.symlink(dirs[0], "include")
    if ctx.attr.shared_object_prefix:
        ctx.file("shared_objects.bzl", "\"\"\"Generated: the shared objects found.\"\"\"\n\nSHARED_OBJECTS = {}\n".format(
            _shared_objects(ctx, ctx.attr.shared_object_prefix),
        ))
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
        "forward": attr.string_list_dict(doc = "Package -> targets that stand for //:system."),
        "include_dir_command": attr.string_list(doc = "Prints include folders off the default path."),
        "include_dir_header": attr.string(doc = "Header that tells which of those folders is meant."),
        "library": attr.string(mandatory = True, doc = "Repository name in packages.txt."),
        "shared_object_prefix": attr.string(doc = "Lists lib<prefix>*.so for the BUILD file."),
        "packages": attr.label(default = Label("//third_party:packages.txt")),
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
        include_dir_command = ["mpicxx", "--showme:incdirs"],
        include_dir_header = "mpi.h",
    ),
    _library("nlohmann_json", "nlohmann_json"),
    _library("xxhash", "xxhash"),
]
