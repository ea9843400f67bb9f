"""How one whole-batch value relates to its shards: the specifications, and the split and merge that follow them.

A specification is either :class:`SpecShard` (the value is cut) or :class:`SpecReplicate` (every shard sees all of it).
Specifications form a tree with the structure of the value; one leaf may stand for a whole subtree.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ShardingSpecLeaf", "SpecReplicate", "SpecShard"]


@dataclass(frozen=True, slots=True)
class SpecShard:
    """The value is cut into shards.

    Attributes:
        dim: Dim of a tensor that is cut. Lists and tuples that stand under one leaf are cut along their length.
        do_stack: Each shard is one element of ``dim``, with the dim removed; merging stacks the shards.
    """

    dim: int = 0
    do_stack: bool = False


@dataclass(frozen=True, slots=True)
class SpecReplicate:
    """Every shard sees the whole value."""


ShardingSpecLeaf = SpecShard | SpecReplicate
"""What may stand at a leaf of a specification tree."""
