"""Where the content of a tensor comes from."""

from __future__ import annotations

import torch

from d9d_lightning.partition.provenance import Provenance
from d9d_lightning.values import ValueId

ONE, TWO = ValueId(0, 0), ValueId(1, 0)


def marked(provenance: Provenance, value: ValueId, *shape: int) -> torch.Tensor:
    tensor = torch.ones(shape)
    provenance.mark_value(tensor, value, {value})
    return tensor


def test_results_come_from_all_their_arguments() -> None:
    """Provenance adds up through operators, and a tensor of the batch has none."""
    provenance = Provenance()
    one, two, batch = marked(provenance, ONE, 3), marked(provenance, TWO, 3), torch.ones(3)
    with provenance:
        total = one * batch + two.sum()
        other = batch * 2
    assert provenance.sources(total) == {ONE, TWO}
    assert provenance.sources(other) == frozenset()
    assert provenance.sources({"a": [other, one]}) == {ONE}


def test_a_write_through_a_view_marks_the_base() -> None:
    """Provenance belongs to the memory: whoever shares it shares the mark."""
    provenance = Provenance()
    one, base = marked(provenance, ONE, 2), torch.zeros(3, 2)
    row = base[1]
    with provenance:
        row.copy_(one)
    assert provenance.sources(base) == provenance.sources(base[0]) == {ONE}


def test_overwritten_values_are_noted() -> None:
    """A value that glue changes in place, directly or through a view, is noted, and one that it copies is not."""
    provenance = Provenance()
    one, two = marked(provenance, ONE, 4), marked(provenance, TWO, 4)
    with provenance:
        one.view(2, 2)[0].mul_(2)
        (two + 0).mul_(2)
    assert provenance.overwritten == {ONE}


def test_reads_are_noted() -> None:
    """Whatever decides what glue does is needed by every later call, as are shapes that depend on values."""
    provenance = Provenance()
    one, two = marked(provenance, ONE, 4), marked(provenance, TWO, 4)
    with provenance:
        if one.sum() > 0:
            two.add(1)
    assert provenance.read == {ONE}
    with provenance:
        two[two > 0].sum()
    assert provenance.read == {ONE, TWO}


def test_draws_that_depend_on_values_are_reads() -> None:
    """After a Poisson draw the next random number depends on the rates."""
    provenance = Provenance()
    one = marked(provenance, ONE, 4)
    with provenance:
        torch.poisson(one)
    assert provenance.read == {ONE}


def test_writes_into_watched_tensors_are_reported() -> None:
    """A watched tensor's new content is reported with its sources, and reading it is no write."""
    provenance = Provenance()
    one, watched, quiet = marked(provenance, ONE, 2), torch.zeros(2), torch.zeros(2)
    provenance.watch(watched, "average")
    provenance.watch(quiet, "quiet")
    with provenance:
        watched.mul_(0.9).add_(one, alpha=0.1)
        quiet.sum()
    assert provenance.writes == {"average": frozenset({ONE})}


def test_sparse_tensors_have_an_identity_of_their_own() -> None:
    """Tensors without one storage are followed by identity."""
    provenance = Provenance()
    sparse = torch.eye(3).to_sparse()
    provenance.mark_value(sparse, ONE, {ONE})
    with provenance:
        product = torch.sparse.mm(sparse, torch.ones(3, 1))
    assert provenance.sources(product) == {ONE}
