"""The system libraries as a module extension, for Bazel with modules.

The same list as in the WORKSPACE: see system_library.bzl.
"""

load("//third_party:system_library.bzl", "SYSTEM_LIBRARIES", "system_library")
load("//third_party/cuda:cuda_toolkit.bzl", "cuda_toolkit")

def _system_libraries_impl(_ctx):
    for library in SYSTEM_LIBRARIES:
        system_library(**library)
    cuda_toolkit(name = "local_cuda")

system_libraries = module_extension(implementation = _system_libraries_impl)
