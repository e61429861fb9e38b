"""A boolean build flag; the same as bazel-skylib's bool_flag, without the dependency."""

def _flag_impl(_ctx):
    return []

bool_flag = rule(
    implementation = _flag_impl,
    build_setting = config.bool(flag = True),
)
