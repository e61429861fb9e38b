"""The rule repositories, for building Evenkeel itself without a network.

A consumer has its own; deps.bzl never calls this. The paths are those of the
distribution's packages bazel-rules-java, bazel-skylib and bazel-platforms, and
for its Bazel 7 bazel-features, bazel-rules-license and bazel-rules-python.
"""

_DISTRIBUTION = "/usr/share/bazel"

def evenkeel_rules(root = "."):
    """Declares the rule repositories that are not declared yet.

    Args:
      root: path of Evenkeel's root folder, seen from the calling workspace.
    """
    repositories = {
        # The distribution's own do not load under its Bazel: rules_cc in
        # Debian 12, rules_proto in later ones.
        "rules_cc": root + "/third_party/rules_cc",
        "rules_proto": root + "/third_party/rules_proto",
        # Bazel wants this name in every test rule; coverage is not used here.
        "remote_coverage_tools": root + "/third_party/remote_coverage_tools",
        "rules_java": _DISTRIBUTION + "/rules/java",
        "bazel_skylib": _DISTRIBUTION + "/tools/skylib",
        "platforms": _DISTRIBUTION + "/tools/platforms",
        # Asked for by Bazel 7 only.
        "bazel_features": _DISTRIBUTION + "/tools/features",
        "rules_license": _DISTRIBUTION + "/rules/license",
        "rules_python": _DISTRIBUTION + "/rules/python",
    }
    for name, path in repositories.items():
        if name not in native.existing_rules():
            native.local_repository(name = name, path = path)
