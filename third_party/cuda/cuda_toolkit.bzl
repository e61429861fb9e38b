"""@local_cuda: finds the CUDA toolkit and NCCL, or makes a stand-in."""

_ROOTS = ["/usr/local/cuda", "/usr/lib/cuda", "/opt/cuda"]

def _cuda_toolkit_impl(ctx):
    root = ""
    for candidate in [ctx.os.environ.get("CUDA_PATH", "")] + _ROOTS:
        if not root and candidate and ctx.path(candidate + "/bin/nvcc").exists:
            root = candidate
    ctx.file("WORKSPACE", "workspace(name = \"local_cuda\")\n")
    ctx.file("toolkit.bzl", "\"\"\"Generated: where the CUDA toolkit is; empty when there is none.\"\"\"\n\n" +
                            "CUDA_ROOT = \"{}\"\n".format(root))
    if root:
        ctx.symlink(root + "/include", "include")
        ctx.symlink(ctx.attr.build_file, "BUILD.bazel")
    else:
        ctx.symlink(ctx.attr.absent_build_file, "BUILD.bazel")

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    doc = "The toolkit where it is found, else targets that are incompatible.",
    attrs = {
        "absent_build_file": attr.label(default = Label("//third_party/cuda:no_cuda.BUILD")),
        "build_file": attr.label(default = Label("//third_party/cuda:cuda.BUILD")),
    },
    environ = ["CUDA_PATH"],
    local = True,
    configure = True,
)
