"""Finds the CUDA toolkit and NCCL, or makes an empty stand-in."""

_ROOTS = ["/usr/local/cuda", "/usr/lib/cuda", "/opt/cuda"]

def _cuda_toolkit_impl(ctx):
    root = None
    for candidate in [ctx.os.environ.get("CUDA_PATH", "")] + _ROOTS:
        if candidate and ctx.path(candidate + "/bin/nvcc").exists:
            root = candidate
            break
    ctx.file("WORKSPACE", "workspace(name = \"local_cuda\")\n")
    if not root:
        ctx.symlink(ctx.attr.absent_build_file, "BUILD.bazel")
        return
    ctx.symlink(root, "cuda")
    ctx.symlink(ctx.attr.build_file, "BUILD.bazel")

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    doc = "@local_cuda: the toolkit where it is found, else targets that say it is not.",
    attrs = {
        "absent_build_file": attr.label(default = Label("//third_party/cuda:no_cuda.BUILD")),
        "build_file": attr.label(default = Label("//third_party/cuda:cuda.BUILD")),
    },
    environ = ["CUDA_PATH"],
    local = True,
    configure = True,
)
