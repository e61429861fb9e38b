"""The part of rules_proto that Evenkeel loads, as Bazel's native rules."""

proto_lang_toolchain = native.proto_lang_toolchain
proto_library = native.proto_library
