"""The arrows of the house: which room may use which.

    third_party <- runtime <- comm <- { moe , zero3 } <- testing <- tools

Every macro of build_defs.bzl calls check_arrows(), so a dep against an arrow
stops the build while it loads, naming both ends. An allowed direct dep never
reaches a forbidden room by a detour, because the table is transitive:
check_table() proves that each time //tools/arrows loads.
"""

ROOMS = {
    "third_party": [],
    "runtime": [],
    "comm": ["runtime"],
    "moe": ["comm", "runtime"],
    "zero3": ["comm", "runtime"],
    "testing": ["comm", "moe", "runtime", "zero3"],
    "tools": ["comm", "moe", "runtime", "testing", "zero3"],
}

def _room(package):
    room = package.split("/")[0]
    return room if room in ROOMS else None

def _package_of(label, from_package):
    """The package in Evenkeel that a label names, None for another repository's."""
    if label.startswith("@evenkeel//"):
        label = label[len("@evenkeel"):]
    elif label.startswith("@//"):
        label = label[1:]
    if label.startswith("@"):
        return None
    if not label.startswith("//"):
        return from_package
    return label[2:].split(":")[0]

def against_arrow(from_package, label):
    """True when a target of from_package must not depend on label."""
    package = _package_of(label, from_package)
    from_room = _room(from_package)
    to_room = _room(package) if package != None else None
    if not from_room or not to_room or to_room == "third_party":
        return False
    return from_room != to_room and to_room not in ROOMS[from_room]

def check_arrows(package, name, labels):
    """Fails when target `name` of `package` depends on a room it must not see.

    Args:
      package: package of the target.
      name: name of the target.
      labels: its deps; a select() is left to the query tests.
    """
    if type(labels) != "list":
        return
    for label in labels:
        if against_arrow(package, str(label)):
            fail("//{}:{} must not depend on {}: arrows are {}".format(
                package,
                name,
                label,
                "third_party <- runtime <- comm <- { moe , zero3 } <- testing <- tools",
            ))

def check_table():
    """Fails unless the table is transitive and the checks below hold."""
    for room, seen in ROOMS.items():
        for other in seen:
            for far in ROOMS[other]:
                if far not in seen:
                    fail("{} sees {} sees {}, but not {}".format(room, other, far, far))
    forbidden = [
        ("runtime/base", "//comm"),
        ("runtime", "//moe:order"),
        ("comm", "//moe"),
        ("comm/mpi", "//zero3:layout"),
        ("comm", "@evenkeel//testing:parity"),
        ("moe", "//zero3"),
        ("moe/deep", "@//zero3:layout"),
        ("zero3", "//moe"),
        ("zero3", "//testing"),
        ("testing", "//tools:parity"),
    ]
    allowed = [
        ("runtime/ops", "//runtime/base:clock"),
        ("comm", ":mesh"),
        ("comm", "//third_party/cuda:enable"),
        ("moe", "//comm/testing:run_ranks"),
        ("zero3", "@com_google_absl//absl/status"),
        ("testing", "//zero3"),
        ("tools", "//testing:parity"),
    ]
    for package, label in forbidden:
        if not against_arrow(package, label):
            fail("arrow check lets //{} use {}".format(package, label))
    for package, label in allowed:
        if against_arrow(package, label):
            fail("arrow check keeps //{} from {}".format(package, label))

def arrow_test(name, top, forbidden):
    """A test that the closed graph below `top` holds nothing of `forbidden`.

    Args:
      name: name of the test.
      top: labels whose whole dependency graph is looked at.
      forbidden: rooms none of whose targets may be in it.
    """
    native.genquery(
        name = name + "_found",
        testonly = True,
        expression = "filter('^(@evenkeel)?//({})[:/]', deps(set({})))".format(
            "|".join(forbidden),
            " ".join(top),
        ),
        scope = top,
    )
    native.sh_test(
        name = name,
        size = "small",
        srcs = [Label("//tools/arrows:nothing_found.sh")],
        args = ["$(location :{}_found)".format(name)],
        data = [":{}_found".format(name)],
    )
