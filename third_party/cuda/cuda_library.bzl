"""Compiles CUDA sources with nvcc; attribute names are those of rules_cuda.

Off by default: targets made here are incompatible, which Bazel reports as
SKIPPED, unless --//third_party/cuda:enable is given and a toolkit is found.
Load ek_cuda_library and ek_gpu_test from //tools:build_defs.bzl.
"""

load("@local_cuda//:toolkit.bzl", "CUDA_ROOT")

# compatible_with for everything that needs CUDA.
REQUIRES_CUDA = select({
    str(Label("//third_party/cuda:enabled")): [],
    "//conditions:default": ["@platforms//:incompatible"],
})

_NVCC_FLAGS = [
    "-std=c++20",
    "-O2",
    "-lineinfo",
    # One rounding per operation, on the device as on the host.
    "--fmad=false",
    "-Xcompiler=-fPIC,-Wall,-Wextra,-ffp-contract=off",
    "--Werror=all-warnings",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=[sm_90,compute_90]",
]

def _cuda_objects_impl(ctx):
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    objects = []
    for source in ctx.files.srcs:
        if source.extension != "cu":
            continue
        object = ctx.actions.declare_file("_cuda/{}/{}.pic.o".format(ctx.label.name, source.basename))
        args = ctx.actions.args()
        args.add_all(["-c", source, "-o", object])
        args.add_all(_NVCC_FLAGS)
        args.add_all(context.defines, format_each = "-D%s")
        args.add("-I.")
        args.add_all(context.includes, format_each = "-I%s")
        args.add_all(context.quote_includes, format_each = "-I%s")
        args.add_all(context.system_includes, format_each = "-isystem=%s")
        args.add_all(ctx.attr.copts)
        ctx.actions.run(
            executable = CUDA_ROOT + "/bin/nvcc",
            arguments = [args],
            inputs = depset(ctx.files.srcs + ctx.files.hdrs, transitive = [context.headers]),
            outputs = [object],
            mnemonic = "CudaCompile",
            progress_message = "Compiling %s" % source.short_path,
            use_default_shell_env = True,
        )
        objects.append(object)
    return [DefaultInfo(files = depset(objects))]

cuda_objects = rule(
    implementation = _cuda_objects_impl,
    doc = "Object files from CUDA sources.",
    attrs = {
        "copts": attr.string_list(doc = "Further options of nvcc."),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh"]),
        "srcs": attr.label_list(allow_files = [".cu", ".cuh", ".h"]),
    },
)
