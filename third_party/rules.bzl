"""The rule repositories, for building Evenkeel itself without a network.

A consumer has its own; deps.bzl never calls this. The paths are those of the
distribution's packages bazel-rules-java, bazel-rules-proto, bazel-skylib and
bazel-platforms.
"""

_DISTRIBUTION = "/usr/share/bazel"

def evenkeel_rules(root = "."):
    """Declares the rule repositories that are not declared yet.

    Args:
      root: path of Evenkeel's root folder, seen from the calling workspace.
    """
    repositories = {
        # The distribution's bazel-rules-cc does not load under its Bazel.
        "rules_cc": root + "/third_party/rules_cc",
        # Bazel wants this name in every test rule; coverage is not used here.
        "remote_coverage_tools": root + "/third_party/remote_coverage_tools",
        "rules_java": _DISTRIBUTION + "/rules/java",
        "rules_proto": _DISTRIBUTION + "/rules/proto",
        "bazel_skylib": _DISTRIBUTION + "/tools/skylib",
        "platforms": _DISTRIBUTION + "/tools/platforms",
    }
    for name, path in repositories.items():
        if name not in native.existing_rules():
            native.local_repository(name = name, path = path)
