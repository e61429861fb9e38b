"""parity_test: a user's own order, under the proof that the built-in ones pass.

    load("@evenkeel//testing:parity.bzl", "parity_test")

    parity_test(
        name = "my_order_parity_test",
        candidates = ["//orders:mine.textproto", "fused"],
        tp = 2,
        ep = 2,
        dp = 2,
        options = {"score": "sigmoid", "drop": "position"},
    )

Trains a small language model on the licence texts with one thread per rank, steps the reference and each candidate in
turn, and compares loss, activations, every gradient and every parameter: bit by bit where the layout is the same, inside
the derived bound of a naive run in double where it is not. Fails on the first difference and says where it is.
"""

load("//tools:build_defs.bzl", "ek_cc_test")

def parity_test(
        name,
        candidates,
        reference = "reference",
        policies = ["flat"],
        tp = 2,
        ep = 2,
        dp = 2,
        experts = 4,
        top_k = 2,
        capacity_factor = "1.25",
        dtype = "f32",
        steps = 3,
        seed = 1,
        expect = "holds",
        options = {},
        ranks_per_node = 0,
        baseline_layout = "",
        deps = [],
        size = "small",
        **kwargs):
    """A test that passes when every candidate is equal to the reference (or bounded, in another layout).

    Args:
      name: of the test.
      candidates: order names, or labels of order textprotos (with a colon in them).
      reference: likewise, or "dense" for the naive run in double.
      policies: zero3 fetch policies; each order runs under each of them.
      tp: tensor-parallel size.
      ep: expert-parallel size.
      dp: data-parallel replicas; the world is tp * dp ranks.
      experts: experts of a layer.
      top_k: routes per token.
      capacity_factor: decimal text; "0" drops nothing.
      dtype: "f32", "f64", "bf16" or "f16".
      steps: training steps.
      seed: of weights and batches.
      expect: "holds", or "mismatch" for an order that is known to be wrong.
      options: further options of the training run by name, as the flags of //tools:parity: {"score": "sigmoid",
        "numerics": "canonical"}. testing/training_options.cc lists them; an unknown one fails the test.
      ranks_per_node: consecutive ranks on each (virtual) node, for orders by levels; 0: one node.
      baseline_layout: in canonical numerics the layout of the reference, such as "tp=1,ep=1,dp=4", with which the
        candidates are compared bit by bit; default: their own.
      deps: alwayslink libraries that register orders, routers or fetch policies.
      size: Bazel's test size.
      **kwargs: passed to the test.
    """
    files = [order for order in candidates + [reference] if ":" in order]
    words = ["$(rootpath {})".format(order) if ":" in order else order for order in candidates]
    ek_cc_test(
        name = name,
        size = size,
        srcs = [],
        args = [
            "--reference=" + ("$(rootpath {})".format(reference) if ":" in reference else reference),
            "--candidates=" + ",".join(words),
            "--policies=" + ",".join(policies),
            "--tp={}".format(tp),
            "--ep={}".format(ep),
            "--dp={}".format(dp),
            "--experts={}".format(experts),
            "--top_k={}".format(top_k),
            "--capacity_factor=" + capacity_factor,
            "--dtype=" + dtype,
            "--steps={}".format(steps),
            "--seed={}".format(seed),
            "--expect=" + expect,
            "--options=" + ";".join([name + "=" + value for name, value in sorted(options.items())]),
            "--ranks_per_node={}".format(ranks_per_node),
            "--baseline_layout=" + baseline_layout,
        ],
        data = files,
        gtest_main = False,
        deps = [Label("//testing:parity_test_main")] + deps,
        **kwargs
    )
