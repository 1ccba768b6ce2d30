"""A pre-norm decoder with grouped-query attention and gated MLP, built from a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from octavo.backends.base import AttentionMeta, ForwardBatch, KVCache
from octavo.backends.kv import KVGroup, group_layers
from octavo.backends.reference import Ops, PackedLinear
from octavo.dist.group import Group
from octavo.layers.attention import Attention
from octavo.layers.embedding import Embedding, OutputMatrix
from octavo.layers.linear import Linear, RowLinear
from octavo.layers.lora import StepAdapters
from octavo.layers.mlp import GatedMLP
from octavo.models.spec import DecoderSpec


class Weights(Protocol):
    """Where a decoder's parameters come from: this rank's share of each, on the device."""

    def tensor(self, name: str) -> Tensor: ...

    def linear(self, name: str, bias: bool) -> PackedLinear:
        """`name`.weight, packed with `name`.bias where asked for."""

    def output_matrix(self) -> PackedLinear:
        """The output matrix, which is the embedding's table if they are tied."""


class Decoder:
    """`rope_table` reaches as far as the longest sequence may."""

    def __init__(self, spec: DecoderSpec, ops: Ops, weights: Weights, rope_table: Tensor, group: Group) -> None:
        self.spec, self.ops = spec, ops
        self.kv_groups: tuple[KVGroup, ...] = group_layers(spec.kv_specs(spec.num_kv_heads // group.size))
        self.weights_bytes = 0
        """of this rank; set by the loader"""
        self.step_adapters = StepAdapters()
        self.kv_scales: dict[int, tuple[Tensor, Tensor]] = {}
        """by layer, float32 [this rank's kv heads] for keys and for values; set by the loader"""
        self.embed = Embedding(ops, weights.tensor("embed.weight"), group)
        group_of = {layer: index for index, kv in enumerate(self.kv_groups) for layer in kv.layers}
        self.layers = [
            DecoderLayer(spec, ops, weights, rope_table, group, layer, group_of[layer])
            for layer in range(spec.num_layers)
        ]
        self.norm = weights.tensor("norm.weight")
        self.output = OutputMatrix(ops, weights.output_matrix(), group, spec.vocab_size)

    def scale_caches(self, kv: Sequence[KVCache]) -> None:
        """Gives caches that have one scale a kv head those of the checkpoint, if it has some. `kv` as in `forward`."""
        for layer, (keys, values) in self.kv_scales.items():
            kv[layer].set_scales(keys, values)

    def forward(self, batch: ForwardBatch, kv: Sequence[KVCache]) -> Tensor:
        """Hidden states after the last norm [T, H]; `kv` holds one cache a layer, written as it goes."""
        self.step_adapters.rows = batch.adapters
        x, residual = self.embed(batch.token_ids), None
        for layer, cache in zip(self.layers, kv, strict=True):
            x, residual = layer(x, residual, batch.positions, cache, batch.attention[layer.kv_group])
        assert residual is not None
        return self.ops.add_rms_norm(x, residual, self.norm, self.spec.rms_eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] to float32 [R, V], the same on every rank."""
        return self.output(hidden)

    def linears(self) -> dict[str, Linear]:
        """The linears of the layers, by the name of the parameter that each computes with."""
        return {f"layers.{i}.{name}": linear for i, layer in enumerate(self.layers) for name, linear in layer.linears()}


class DecoderLayer:
    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        weights: Weights,
        rope_table: Tensor,
        group: Group,
        index: int,
        kv_group: int,
    ) -> None:
        name = f"layers.{index}."
        self.ops, self.eps, self.kv_group = ops, spec.rms_eps, kv_group
        self.attention_norm = weights.tensor(name + "attention_norm.weight")
        qkv = Linear(ops, weights.linear(name + "qkv", spec.qkv_bias))
        output = RowLinear(ops, weights.linear(name + "o", spec.o_bias), group)
        heads, kv_heads = spec.num_heads // group.size, spec.num_kv_heads // group.size
        self.attention = Attention(
            ops, qkv, output, rope_table, heads, kv_heads, spec.head_dim, spec.window(index)
        )  # fmt: skip
        self.mlp_norm = weights.tensor(name + "mlp_norm.weight")
        gate_up = Linear(ops, weights.linear(name + "gate_up", spec.mlp_bias))
        down = RowLinear(ops, weights.linear(name + "down", spec.mlp_bias), group)
        self.mlp = GatedMLP(ops, gate_up, down, spec.activation)

    def linears(self) -> tuple[tuple[str, Linear], ...]:
        attention, mlp = self.attention, self.mlp
        return ("qkv", attention.qkv), ("o", attention.output), ("gate_up", mlp.gate_up), ("down", mlp.down)

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, cache: KVCache, meta: AttentionMeta
    ) -> tuple[Tensor, Tensor]:
        """The MLP's output [T, H] and the residual that is still to be added to it."""
        if residual is None:
            x, residual = self.ops.rms_norm(x, self.attention_norm, self.eps), x
        else:
            x, residual = self.ops.add_rms_norm(x, residual, self.attention_norm, self.eps)
        x = self.attention(x, positions, cache, meta)
        x, residual = self.ops.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        return self.mlp(x), residual
