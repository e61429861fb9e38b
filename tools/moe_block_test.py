#!/usr/bin/env python3
"""moe_block as a user of another framework meets it: sharded checkpoints written here, its output against plain Python.

Everything below the files (routing, experts, mixing) is computed once more in doubles by loops.
"""

import json
import math
import os
import random
import struct
import subprocess
import sys
import unittest

HIDDEN, FFN, EXPERTS, TOKENS = 8, 6, 4, 5
TMP = os.environ["TEST_TMPDIR"]


def to_bf16(value):
    """The bits of the nearest bf16, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def from_bf16(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def write_safetensors(path, tensors, dtype):
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        if dtype == "BF16":
            raw = struct.pack(f"<{len(values)}H", *[to_bf16(v) for v in values])
        else:
            raw = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    with open(path, "rb") as file:
        raw = file.read()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = list(struct.unpack(f"<{(end - begin) // 4}f", raw[begin:end]))
    return tensors


class Checkpoint:
    """Tensors by name as a published checkpoint has them, with the values that survive their dtype."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.tensors = {}
        self.random = random.Random(7)

    def add(self, name, rows, columns):
        values = [struct.unpack("<f", struct.pack("<f", self.random.gauss(0, 0.5)))[0] for _ in range(rows * columns)]
        if self.dtype == "BF16":
            values = [from_bf16(to_bf16(v)) for v in values]
        self.tensors[name] = ([rows, columns], values)

    def add_mlp(self, prefix, gate, up, down, ffn):
        self.add(f"{prefix}{gate}.weight", ffn, HIDDEN)
        self.add(f"{prefix}{up}.weight", ffn, HIDDEN)
        self.add(f"{prefix}{down}.weight", HIDDEN, ffn)

    def write(self, folder, config, shards=3):
        """In `shards` files with an index, beside a file that is no part of the model."""
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        names = list(self.tensors)
        weight_map = {}
        for shard in range(shards):
            name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = names[shard * len(names) // shards:(shard + 1) * len(names) // shards]
            write_safetensors(os.path.join(folder, name), {n: self.tensors[n] for n in part}, self.dtype)
            weight_map.update({n: name for n in part})
        write_safetensors(os.path.join(folder, "consolidated.safetensors"), {names[0]: ([1], [1.0])}, "F32")
        self.index = {"metadata": {}, "weight_map": weight_map}
        self.write_index(folder)

    def write_index(self, folder):
        with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
            json.dump(self.index, file)

    def multiply(self, name, x):
        (rows, columns), values = self.tensors[name]
        return [sum(values[r * columns + c] * x[c] for c in range(columns)) for r in range(rows)]

    def mlp(self, prefix, gate, up, down, x):
        g, u = self.multiply(f"{prefix}{gate}.weight", x), self.multiply(f"{prefix}{up}.weight", x)
        return self.multiply(f"{prefix}{down}.weight", [a / (1 + math.exp(-a)) * b for a, b in zip(g, u)])


def routed(checkpoint, at, names, x, top_k):
    logits = checkpoint.multiply(at + "gate.weight", x)
    scores = [math.exp(v) for v in logits]
    best = sorted(range(EXPERTS), key=lambda e: -logits[e])[:top_k]
    y = [0.0] * HIDDEN
    for e in best:
        out = checkpoint.mlp(f"{at}experts.{e}.", *names, x)
        for i in range(HIDDEN):
            y[i] += scores[e] / sum(scores[b] for b in best) * out[i]
    return y


def mixtral(dtype):
    at, names = "model.layers.3.block_sparse_moe.", ("w1", "w3", "w2")
    checkpoint = Checkpoint(dtype)
    checkpoint.add(at + "gate.weight", EXPERTS, HIDDEN)
    for e in range(EXPERTS):
        checkpoint.add_mlp(f"{at}experts.{e}.", *names, FFN)
    config = {"model_type": "mixtral", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_local_experts": EXPERTS,
              "num_experts_per_tok": 2, "hidden_act": "silu"}
    return checkpoint, config, lambda x: routed(checkpoint, at, names, x, 2)


def qwen(dtype):
    at, names = "model.layers.3.mlp.", ("gate_proj", "up_proj", "down_proj")
    checkpoint = Checkpoint(dtype)
    checkpoint.add(at + "gate.weight", EXPERTS, HIDDEN)
    for e in range(EXPERTS):
        checkpoint.add_mlp(f"{at}experts.{e}.", *names, FFN)
    checkpoint.add_mlp(at + "shared_expert.", *names, 2 * FFN)
    checkpoint.add(at + "shared_expert_gate.weight", 1, HIDDEN)
    config = {"model_type": "qwen2_moe", "hidden_size": HIDDEN, "moe_intermediate_size": FFN, "num_experts": EXPERTS,
              "num_experts_per_tok": 2, "norm_topk_prob": True, "shared_expert_intermediate_size": 2 * FFN}

    def block(x):
        gate = 1 / (1 + math.exp(-checkpoint.multiply(at + "shared_expert_gate.weight", x)[0]))
        shared = checkpoint.mlp(at + "shared_expert.", *names, x)
        return [a + gate * b for a, b in zip(routed(checkpoint, at, names, x, 2), shared)]
    return checkpoint, config, block


def run(*words):
    return subprocess.run(["tools/moe_block", *words], capture_output=True, text=True, check=False)


class MoeBlockTest(unittest.TestCase):

    def compare(self, made, name):
        checkpoint, config, block = made
        folder = os.path.join(TMP, name)
        checkpoint.write(folder, config)
        source = random.Random(11)
        x = [struct.unpack("<f", struct.pack("<f", source.gauss(0, 1)))[0] for _ in range(TOKENS * HIDDEN)]
        inputs, outputs = os.path.join(folder, "x.in"), os.path.join(folder, "y.out")
        write_safetensors(inputs, {"x": ([TOKENS, HIDDEN], x)}, "F32")
        done = run(folder, "--layer=3", f"--input={inputs}", f"--output={outputs}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"y \[5, 8\] xxh3 [0-9a-f]{16}")
        found = read_safetensors(outputs)
        self.assertEqual(found["x"], x)
        for t in range(TOKENS):
            for got, wanted in zip(found["y"][t * HIDDEN:(t + 1) * HIDDEN], block(x[t * HIDDEN:(t + 1) * HIDDEN])):
                self.assertAlmostEqual(got, wanted, delta=1e-5 * (1 + abs(wanted)))
        again = run(folder, "--layer=3", f"--input={inputs}")
        self.assertEqual(again.stdout, done.stdout)

    def test_outputs_are_those_of_plain_python(self):
        for dtype in ("F32", "BF16"):
            self.compare(mixtral(dtype), "mixtral_" + dtype)
            self.compare(qwen(dtype), "qwen_" + dtype)

    def refused(self, folder, code, *texts, flags=()):
        done = run(folder, "--layer=3", *flags)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for text in texts:
            self.assertIn(text, done.stderr)

    def test_says_what_is_missing(self):
        checkpoint, config, _ = mixtral("F32")
        folder = os.path.join(TMP, "broken")
        last = "model.layers.3.block_sparse_moe.experts.3.w2.weight"
        shard = "model-00003-of-00003.safetensors"
        checkpoint.write(folder, config)
        os.rename(os.path.join(folder, shard), os.path.join(folder, "elsewhere"))
        self.refused(folder, 2, shard, "is missing", "index.json")
        checkpoint.write(folder, config)
        checkpoint.index["weight_map"][last] = "model-00001-of-00003.safetensors"
        checkpoint.write_index(folder)
        self.refused(folder, 2, f"{last} is not in model-00001-of-00003.safetensors")
        checkpoint.index["weight_map"][last] = "../consolidated.safetensors"
        checkpoint.write_index(folder)
        self.refused(folder, 2, "is no safetensors file of the folder")
        checkpoint.index = {"weight_map": []}
        checkpoint.write_index(folder)
        self.refused(folder, 2, "has no object weight_map")
        del checkpoint.tensors[last]
        checkpoint.write(folder, config)
        self.refused(folder, 2, f"no tensor {last}")
        self.refused(os.path.join(TMP, "nowhere"), 2, "nowhere")

    def test_refuses_flags_that_make_no_sense(self):
        checkpoint, config, _ = mixtral("F32")
        folder = os.path.join(TMP, "flags")
        checkpoint.write(folder, config)
        inputs, taken = os.path.join(folder, "x.in"), os.path.join(folder, "taken")
        write_safetensors(inputs, {"x": ([1, HIDDEN], [0.5] * HIDDEN)}, "F32")
        open(taken, "w").close()
        self.refused(folder, 2, "unknown family 'llama'; known: mixtral, qwen_moe, deepseek", flags=["--family=llama"])
        self.refused(folder, 2, "--tokens=7 beside --input", flags=["--tokens=7", f"--input={inputs}"])
        self.refused(folder, 2, "no length field", flags=[f"--input={taken}"])
        self.refused(folder, 2, "File exists", flags=[f"--output={taken}"])
        self.refused(folder, 2, "nowhere/y", flags=["--output=nowhere/y"])
        done = run(folder, "--layer=3", f"--output={taken}")
        self.assertEqual(done.stdout, "", "the output is checked before the work")


if __name__ == "__main__":
    sys.exit(unittest.main())
