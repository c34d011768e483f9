"""Drafter heads as they are published, and what they compute, written out."""

import json
import math

import torch
from safetensors.torch import save_file

from capture_planner.records.model import DraftModel, Method, Speculative

HIDDEN, HEADS, KV_HEADS, WIDTH, MLP, VOCAB, DRAFTED, EPS, THETA = 24, 4, 2, 8, 20, 50, 11, 1e-5, 500.0
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
}


def random_tensor(*shape):
    """Return numbers of about 1 / sqrt(width), so that no layer is idle."""
    return torch.randn(*shape, dtype=torch.float64) / shape[-1] ** 0.5


def published(method, layers=1, *, reduced=True, embeddings=False, bias=False, attention_bias=False):
    """Return the tensors of a published head."""
    is_third = method is Method.EAGLE3
    tensors = {"fc.weight": random_tensor(HIDDEN, (3 if is_third else 2) * HIDDEN)}
    for layer in range(layers):
        prefix = "midlayer" if is_third and layer == 0 else f"layers.{layer}"
        width = 2 * HIDDEN if is_third and layer == 0 else HIDDEN
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = random_tensor(rows * WIDTH, width)
            if attention_bias:
                tensors[f"{prefix}.self_attn.{name}_proj.bias"] = random_tensor(rows * WIDTH)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = random_tensor(HIDDEN, HEADS * WIDTH)
        tensors[f"{prefix}.mlp.gate_proj.weight"] = random_tensor(MLP, HIDDEN)
        tensors[f"{prefix}.mlp.up_proj.weight"] = random_tensor(MLP, HIDDEN)
        tensors[f"{prefix}.mlp.down_proj.weight"] = random_tensor(HIDDEN, MLP)
        norms = ["post_attention_layernorm"] + ["input_layernorm"] * (is_third or layer > 0)
        for norm in norms + ["hidden_norm"] * (is_third and layer == 0):
            tensors[f"{prefix}.{norm}.weight"] = 1 + random_tensor(HIDDEN)
    if is_third:
        rows = DRAFTED if reduced else VOCAB
        chosen = torch.randperm(VOCAB)[:rows].sort().values
        tensors["norm.weight"] = 1 + random_tensor(HIDDEN)
        tensors["lm_head.weight"] = random_tensor(rows, HIDDEN)
        tensors["d2t"] = chosen - torch.arange(rows)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    if embeddings:
        tensors["embed_tokens.weight"] = random_tensor(VOCAB, HIDDEN)
    if bias:
        tensors["fc.bias"] = random_tensor(HIDDEN)
    return tensors


def published_modules(first, count, *, own_heads=False, embeddings=False):
    """Return the tensors of MTP modules, after a target of ``first`` layers, with one of the target's next to them."""
    tensors = {"model.layers.0.self_attn.q_proj.weight": random_tensor(3, 3), "lm_head.weight": random_tensor(VOCAB, 3)}
    for number in range(first, first + count):
        layer = {name: tensor for name, tensor in published(Method.EAGLE, 2).items() if name.startswith("layers.1.")}
        prefix = f"model.layers.{number}."
        tensors |= {prefix + name.removeprefix("layers.1."): tensor for name, tensor in layer.items()}
        tensors[f"{prefix}eh_proj.weight"] = random_tensor(HIDDEN, 2 * HIDDEN)
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}{norm}.weight"] = 1 + random_tensor(HIDDEN)
        if own_heads:
            tensors[f"{prefix}shared_head.head.weight"] = random_tensor(VOCAB, HIDDEN)
        if embeddings:
            tensors[f"{prefix}embed_tokens.weight"] = tensors.get(
                f"model.layers.{first}.embed_tokens.weight", random_tensor(VOCAB, HIDDEN)
            ).clone()
    return tensors


def write(folder, tensors, **changes):
    """Write a head as it is published."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


def speculative(method, num_tokens=3, parallel_drafting=False, **model):
    """Return what a plan says about a drafter."""
    return Speculative(
        method=method, num_tokens=num_tokens, model=DraftModel(**model), parallel_drafting=parallel_drafting
    )


class WrittenHead:
    """A head written out: one token after the other, one head after the other."""

    def __init__(self, method, tensors, embed, norm_before_residual=False):
        self.is_third, self.embed, self.normed_residual = method is Method.EAGLE3, embed, norm_before_residual
        self.tensors = {name.replace("midlayer", "layers.0"): value for name, value in tensors.items()}

    def linear(self, name, vector):
        """Multiply, and add the bias if there is one."""
        out = self.tensors[f"{name}.weight"] @ vector
        return out + self.tensors.get(f"{name}.bias", 0.0)

    def norm(self, name, vector):
        """Divide by the root mean square."""
        return vector / torch.sqrt((vector**2).mean() + EPS) * self.tensors[f"{name}.weight"]

    def turn(self, head, position):
        """Turn pairs of numbers, half a head apart."""
        out, half = head.clone(), WIDTH // 2
        for index in range(half):
            angle = position * THETA ** (-2 * index / WIDTH)
            a, b = head[index], head[index + half]
            out[index] = a * math.cos(angle) - b * math.sin(angle)
            out[index + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def attend(self, layer, inputs, positions):
        """Attend to all tokens before, for each head by itself."""
        name = f"layers.{layer}.self_attn"
        rows = {
            kind: [self.linear(f"{name}.{kind}_proj", vector).view(-1, WIDTH) for vector in inputs] for kind in "qkv"
        }
        outs = []
        for last, position in enumerate(positions):
            heads = []
            for head in range(HEADS):
                shared = head * KV_HEADS // HEADS
                query = self.turn(rows["q"][last][head], position)
                keys = [self.turn(rows["k"][i][shared], positions[i]) for i in range(last + 1)]
                weights = torch.stack([query @ key for key in keys]).div(WIDTH**0.5).softmax(dim=0)
                heads.append(sum(weights[i] * rows["v"][i][shared] for i in range(last + 1)))
            outs.append(self.linear(f"{name}.o_proj", torch.cat(heads)))
        return outs

    def forward(self, tokens, positions, hidden):
        """Return hidden states of all tokens."""
        layers = len({name.split(".")[1] for name in self.tensors if name.startswith("layers.")})
        embedded, stream = [self.embed[token] for token in tokens], list(hidden)
        if not self.is_third:
            pairs = zip(embedded, stream, strict=True)
            stream = [self.linear("fc", torch.cat([vector, state])) for vector, state in pairs]
        return torch.stack(self.through(stream, positions, range(layers), embedded))

    def module(self, number, tokens, positions, hidden):
        """Return what one MTP module makes of all tokens, after its final norm."""
        name, stream = f"layers.{number}", []
        for token, position, state in zip(tokens, positions, hidden, strict=True):
            word = self.embed[token] if position else torch.zeros_like(self.embed[token])
            pair = (self.norm(f"{name}.enorm", word), self.norm(f"{name}.hnorm", state))
            stream.append(self.linear(f"{name}.eh_proj", torch.cat(pair)))
        stream = self.through(stream, positions, [number], None)
        return torch.stack([self.norm(f"{name}.shared_head.norm", state) for state in stream])

    def through(self, stream, positions, layers, embedded):
        """Return the stream after some layers; without ``embedded`` the first one is as the others."""
        for layer in layers:
            name = f"layers.{layer}"
            if layer > 0 or embedded is None:
                inputs = [self.norm(f"{name}.input_layernorm", state) for state in stream]
            elif self.is_third:
                normed = [self.norm(f"{name}.hidden_norm", state) for state in stream]
                words = [self.norm(f"{name}.input_layernorm", vector) for vector in embedded]
                inputs = [torch.cat(pair) for pair in zip(words, normed, strict=True)]
                stream = normed if self.normed_residual else stream
            else:
                inputs = stream
            attended = self.attend(layer, inputs, positions)
            stream = [state + out for state, out in zip(stream, attended, strict=True)]
            for index, state in enumerate(stream):
                read = self.norm(f"{name}.post_attention_layernorm", state)
                gate, up = (self.linear(f"{name}.mlp.{kind}_proj", read) for kind in ("gate", "up"))
                stream[index] = state + self.linear(f"{name}.mlp.down_proj", gate * gate.sigmoid() * up)
        return stream
