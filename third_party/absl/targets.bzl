"""Names of Abseil's own targets, package by package, that Evenkeel may use."""

ABSL_PACKAGES = {
    "absl/algorithm": ["algorithm", "container"],
    "absl/base": ["base", "config", "core_headers", "dynamic_annotations", "endian", "log_severity", "prefetch"],
    "absl/cleanup": ["cleanup"],
    "absl/container": [
        "btree",
        "fixed_array",
        "flat_hash_map",
        "flat_hash_set",
        "inlined_vector",
        "node_hash_map",
        "node_hash_set",
    ],
    "absl/debugging": ["failure_signal_handler", "leak_check", "stacktrace", "symbolize"],
    "absl/functional": ["any_invocable", "bind_front", "function_ref"],
    "absl/hash": ["hash", "hash_testing"],
    "absl/memory": ["memory"],
    "absl/meta": ["type_traits"],
    "absl/numeric": ["bits", "int128"],
    "absl/random": ["bit_gen_ref", "distributions", "random", "seed_gen_exception", "seed_sequences"],
    "absl/status": ["status", "statusor"],
    "absl/strings": ["cord", "str_format", "strings"],
    "absl/synchronization": ["synchronization"],
    "absl/time": ["time"],
    "absl/types": ["any", "compare", "optional", "span", "variant"],
    "absl/utility": ["utility"],
}
