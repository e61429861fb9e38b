"""Entry for a workspace that links Evenkeel.

evenkeel_dependencies() declares every library Evenkeel uses, under its
canonical repository name, as the distribution's package. A name that the
workspace has declared before the call is left alone, so a source build of
Abseil or protobuf can take the package's place:

    local_repository(name = "evenkeel", path = ...)
    load("@evenkeel//third_party:deps.bzl", "evenkeel_dependencies")
    evenkeel_dependencies()

The workspace brings rules_cc and rules_proto itself.
"""

load("//third_party:system_library.bzl", "SYSTEM_LIBRARIES", "system_library")
load("//third_party/cuda:cuda_toolkit.bzl", "cuda_toolkit")

def evenkeel_dependencies():
    """Declares the libraries that are not declared yet."""
    for library in SYSTEM_LIBRARIES:
        if library["name"] not in native.existing_rules():
            system_library(**library)
    if "local_cuda" not in native.existing_rules():
        cuda_toolkit(name = "local_cuda")
