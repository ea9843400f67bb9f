"""Promises of ``split_batch`` and ``merge_outputs``."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.batch import find_batch_size, split_batch

Pair = namedtuple("Pair", ["image", "label"])


@dataclass(frozen=True)
class Sample:
    ids: torch.Tensor
    name: str
    words: list[str]


class Graph:
    """Like a graph library's batch object: attributes, and no way to tell what a sample is."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def rows(*shape: int) -> torch.Tensor:
    """Numbers that tell every row apart."""
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def boxes(*counts: int) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": rows(count, 4), "labels": torch.arange(count)} for count in counts]


def images(*heights: int) -> list[torch.Tensor]:
    return [rows(3, height, 8) for height in heights]


# ---- how many microbatches, of what size


@pytest.mark.parametrize(
    ("size", "count", "sizes"),
    [(10, 4, (3, 3, 2, 2)), (3, 4, (1, 1, 1)), (1, 4, (1,)), (8, 1, (8,)), (5, 2, (3, 2)), (8, 8, (1,) * 8)],
)
def test_sizes_follow_tensor_split_and_no_microbatch_is_empty(size: int, count: int, sizes: tuple[int, ...]) -> None:
    """Sizes are those of torch.tensor_split, with at most as many microbatches as samples."""
    batch = rows(size, 2)
    split = split_batch(batch, count)
    assert split.size == size
    assert split.sizes == sizes
    assert torch.equal(torch.cat(split.microbatches), batch)
    assert [len(part) for part in split.microbatches] == [len(p) for p in batch.tensor_split(count) if len(p)]
    assert (split.reason is None) == (len(sizes) == count)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "4", None])
def test_a_count_that_is_no_positive_integer_is_refused(count: Any) -> None:
    """A number of microbatches that is not a positive integer is named in the error."""
    with pytest.raises(PipelineConfigurationError, match="num_microbatches is"):
        split_batch(rows(4, 2), count)


def test_an_empty_batch_is_one_microbatch_with_a_reason() -> None:
    """A batch without samples stays whole and says so."""
    split = split_batch({"x": rows(0, 2)}, 2)
    assert (split.size, split.sizes, split.reason) == (0, (0,), "the batch has no samples")


# ---- which parts are cut


def test_strings_of_batch_length_are_cut_and_the_rest_is_replicated() -> None:
    """A list of one string a sample is cut; None, numbers, names and lists of other lengths reach every microbatch."""
    batch = {"x": rows(4, 2), "y": rows(4), "id": list("abcd"), "meta": None, "w": 0.5, "classes": ["p", "q", "r"]}
    first, second = split_batch(batch, 2).microbatches
    assert (first["id"], second["id"]) == (["a", "b"], ["c", "d"])
    assert (first["meta"], second["w"], first["classes"]) == (None, 0.5, ["p", "q", "r"])
    assert torch.equal(second["y"], torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_list_of_batched_tensors_is_a_container(size: int) -> None:
    """``[x, y]`` is cut field by field, also when it has as many fields as there are samples."""
    split = split_batch([rows(size, 5), rows(size)], 2)
    assert split.size == size
    assert [tuple(part[0].shape) for part in split.microbatches] == [(n, 5) for n in split.sizes]
    assert [tuple(part[1].shape) for part in split.microbatches] == [(n,) for n in split.sizes]


def test_source_and_target_of_different_length_are_two_fields() -> None:
    """Two id tensors of unequal length, as default_collate returns them, are cut along dim 0."""
    split = split_batch([torch.ones(4, 16, dtype=torch.long), torch.ones(4, 8, dtype=torch.long)], 2)
    assert split.size == 4


def test_nested_views_of_equal_shape_are_a_container() -> None:
    """Two augmented views beside a label are cut along dim 0, not along the number of views."""
    split = split_batch(([rows(6, 3), rows(6, 3)], rows(6)), 3)
    assert split.size == 6
    assert split.microbatches[0][0][1].shape == (2, 3)


def test_crops_of_several_sizes_beside_labels_are_a_container() -> None:
    """Multi-crop views whose number differs from the batch size are cut along dim 0."""
    split = split_batch(([rows(4, 3, 8), rows(4, 3, 8), rows(4, 3, 4)], rows(4)), 2)
    assert split.size == 4
    assert [len(view) for view in split.microbatches[1][0]] == [2, 2, 2]


@pytest.mark.parametrize("wrap", [list, tuple])
@pytest.mark.parametrize("heights", [(8, 6, 8, 6), (8, 6, 8), (8, 6), (8, 8, 8)])
def test_a_list_of_images_beside_a_list_of_targets_is_a_list_of_samples(wrap: type, heights: tuple[int, ...]) -> None:
    """A detection batch is cut by image, also when it has as many images as an image has channels."""
    targets = boxes(*range(1, len(heights) + 1))
    split = split_batch((wrap(images(*heights)), wrap(targets)), 2)
    assert split.size == len(heights)
    taken = [image for part in split.microbatches for image in part[0]]
    assert [image.shape[1] for image in taken] == list(heights)
    assert [len(t["labels"]) for part in split.microbatches for t in part[1]] == [len(t["labels"]) for t in targets]


def test_a_list_of_dictionaries_is_a_list_of_samples() -> None:
    """Records collated by ``lambda samples: samples`` are cut by record."""
    batch = [{"image": image, "boxes": rows(n, 4)} for n, image in enumerate(images(8, 6, 8, 6), 1)]
    split = split_batch(batch, 2)
    assert split.size == 4
    assert [len(part) for part in split.microbatches] == [2, 2]


def test_records_may_lack_optional_fields() -> None:
    """Targets that do not all have the same keys are still samples."""
    targets = boxes(1, 2, 3, 1)
    targets[2]["masks"] = rows(3, 8, 8)
    split = split_batch({"pixel_values": rows(4, 3, 8, 8), "labels": targets}, 2)
    assert [len(part["labels"]) for part in split.microbatches] == [2, 2]


@pytest.mark.parametrize("size", [2, 8])
def test_a_list_of_two_different_batches_is_a_container(size: int) -> None:
    """A labelled and an unlabelled batch, as a combined loader gives them, are both cut along dim 0."""
    split = split_batch([{"x": rows(size, 2), "y": rows(size)}, {"x": rows(size, 2)}], 2)
    assert split.size == size
    assert [len(part[1]["x"]) for part in split.microbatches] == [size // 2] * 2


def test_targets_with_as_many_boxes_as_samples_stay_with_their_image() -> None:
    """A list of B dictionaries beside tensors is cut by item even when each holds tensors of B rows."""
    split = split_batch({"pixel_values": rows(2, 3, 4, 4), "labels": boxes(2, 2)}, 2)
    assert [len(part["labels"]) for part in split.microbatches] == [1, 1]
    assert split.microbatches[0]["labels"][0]["boxes"].shape == (2, 4)


def test_masks_of_equal_shape_beside_pixels_are_samples() -> None:
    """A list with one mask tensor a sample follows the batch size of its neighbour."""
    batch = {"pixel_values": rows(4, 3, 8, 8), "masks": [rows(2, 8, 8)] * 4, "classes": [torch.arange(2)] * 4}
    split = split_batch(batch, 2)
    assert split.size == 4
    assert [len(part["masks"]) for part in split.microbatches] == [2, 2]


def test_transposed_images_and_numbers_are_samples() -> None:
    """``tuple(zip(*samples))`` of images of several sizes and class numbers is cut by sample."""
    split = split_batch(
        (tuple(images(8, 6, 8, 6)), (torch.tensor(1), torch.tensor(0), torch.tensor(2), torch.tensor(1))), 2
    )
    assert split.size == 4
    assert [len(part[0]) for part in split.microbatches] == [2, 2]


def test_names_beside_clips_tell_samples_from_frames() -> None:
    """Lists of frames in a list of clips are cut by clip where another list has one entry for each clip."""
    clips = [[rows(1 + clip + frame, 2) for frame in range(3)] for clip in range(4)]
    split = split_batch({"clips": clips, "names": list("abcd")}, 2)
    assert split.size == 4
    assert [len(part["clips"]) for part in split.microbatches] == [2, 2]


def test_numpy_arrays_are_cut_beside_tensors() -> None:
    """Arrays with one row a sample, numeric or not, are cut like tensors and lists."""
    names = np.array(["a", "b", "c", "d"], dtype=object)
    split = split_batch({"x": rows(4, 2), "n": np.arange(8).reshape(4, 2), "names": names, "k": np.float32(2)}, 2)
    assert split.microbatches[1]["n"].tolist() == [[4, 5], [6, 7]]
    assert split.microbatches[1]["names"].tolist() == ["c", "d"]


def test_a_tensor_without_dims_is_replicated() -> None:
    """A 0-d tensor reaches every microbatch, and does not make the batch size ambiguous."""
    split = split_batch({"x": rows(4, 2), "temperature": torch.tensor(0.5)}, 2)
    assert [float(part["temperature"]) for part in split.microbatches] == [0.5, 0.5]


# ---- what keeps a batch whole


def make_packed() -> Any:
    return pack_padded_sequence(rows(3, 4, 2), torch.tensor([4, 3, 1]), batch_first=True)


@pytest.mark.parametrize(
    "batch",
    [
        Graph(rows(20, 8)),
        make_packed(),
        (make_packed(), rows(3)),
        (torch.eye(4).to_sparse(), rows(4)),
        torch.nested.nested_tensor([rows(2, 3), rows(4, 3)], layout=torch.jagged),
        iter([rows(4, 2)]),
        {"x": torch.tensor(1.0), "names": ["a", "b"]},
    ],
    ids=["object", "packed", "packed-beside-labels", "sparse", "nested", "iterator", "no-dim"],
)
def test_what_cannot_be_cut_is_one_microbatch_with_a_reason(batch: Any) -> None:
    """A batch whose samples cannot be told apart goes through as one microbatch, and the reason names the part."""
    split = split_batch(batch, 4)
    assert len(split.microbatches) == 1
    assert split.size is None
    assert split.sizes == (1,)
    assert split.reason is not None
    assert "batch" in split.reason
    assert split_batch(copy.copy(batch), 1).reason is None


def test_a_list_of_graphs_is_cut_by_graph() -> None:
    """Objects that cannot be cut themselves are samples when they come in a list."""
    split = split_batch([Graph(rows(n, 2)) for n in (3, 5, 4)], 2)
    assert split.sizes == (2, 1)
    assert [len(graph.x) for graph in split.microbatches[0]] == [3, 5]


# ---- containers


def variants() -> dict[str, Any]:
    x, y = rows(4, 2), torch.arange(4)
    defaults: defaultdict[str, Any] = defaultdict(list, {"x": x, "y": y})
    return {
        "dict": {"x": x, "y": y},
        "ordered": OrderedDict(x=x, y=y),
        "default": defaults,
        "user": UserDict({"x": x, "y": y}),
        "proxy": MappingProxyType({"x": x, "y": y}),
        "tuple": (x, y),
        "list": [x, y],
        "namedtuple": Pair(x, y),
        "dataclass": Sample(x, "s", ["a", "b", "c", "d"]),
        "namespace": SimpleNamespace(x=x, y=y),
        "returned": torch.max(torch.rand(4, 2), dim=1),
    }


@pytest.mark.parametrize("name", variants())
def test_every_container_keeps_its_type(name: str) -> None:
    """Microbatches have the type of the batch, and its pieces in order."""
    batch = variants()[name]
    split = split_batch(batch, 2)
    assert split.size == 4
    assert [type(part) for part in split.microbatches] == [type(batch)] * 2


def test_a_default_factory_and_frozen_fields_survive() -> None:
    """What a container carries beside its items is carried on."""
    assert split_batch(variants()["default"], 2).microbatches[0]["new"] == []
    second = split_batch(variants()["dataclass"], 2).microbatches[1]
    assert (second.name, second.words, second.ids.tolist()) == ("s", ["c", "d"], [[4.0, 5.0], [6.0, 7.0]])


def test_transformers_containers_are_cut() -> None:
    """A BatchEncoding and a ModelOutput are cut field by field and keep their types and attributes."""
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": rows(4, 3), "labels": rows(4)})
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=rows(4, 3))
    first = split_batch({"encoding": encoding, "output": output}, 2).microbatches[0]
    assert type(first["encoding"]) is transformers.BatchEncoding
    assert first["encoding"].input_ids.shape == (2, 3)
    assert first["output"].last_hidden_state.shape == (2, 3)
    assert first["output"]["last_hidden_state"].shape == (2, 3)
    assert output.last_hidden_state.shape == (4, 3)


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_may_pop_from_its_microbatch(count: int) -> None:
    """No container is shared with the batch or another microbatch, also when nothing is cut."""
    batch: dict[str, Any] = {"x": rows(4, 2), "inner": {"k": 1, "words": ["a"]}, "pair": [rows(4), {"z"}]}
    for part in split_batch(batch, count).microbatches:
        part.pop("x")
        part["inner"].pop("k")
        part["inner"]["words"].append("b")
        part["pair"][1].add("changed")
        part["pair"].clear()
    assert set(batch) == {"x", "inner", "pair"}
    assert batch["inner"] == {"k": 1, "words": ["a"]}
    assert batch["pair"][1] == {"z"}


def test_an_object_is_copied_so_that_a_step_may_assign_to_it() -> None:
    """A step that replaces an attribute of an object batch leaves the batch as it was."""
    graph = Graph(rows(5, 2))
    part = split_batch(graph, 1).microbatches[0]
    part.x = part.x * 2
    assert torch.equal(graph.x, rows(5, 2))
    assert type(part) is Graph


def test_tensors_are_views() -> None:
    """Cutting copies no tensor."""
    batch = rows(4, 2)
    assert split_batch(batch, 2).microbatches[1].untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()


# ---- bad input


@pytest.mark.parametrize("batch", [None, 3, "text", ["a", "b"], {"x": 1, "y": [2.0]}, (), {}, object()])
@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_with_no_tensor_is_refused(batch: Any, count: int) -> None:
    """A batch with no tensor is one readable error that says what it held and what to do."""
    with pytest.raises(PipelineConfigurationError, match="holds no tensor") as info:
        split_batch(batch, count)
    assert "collate_fn" in str(info.value)


AMBIGUOUS: dict[str, Any] = {
    "two sizes": {"a": rows(4, 3), "b": rows(6, 3)},
    "graph": {"x": rows(20, 8), "edge_index": rows(2, 40), "y": rows(4)},
    "images only": {"images": images(8, 6, 8, 6)},
    "list of images": images(8, 6, 8, 6),
    "records of one size": [{"image": rows(3, 8, 8)} for _ in range(4)],
    "pairs of image and class": [(rows(3, 8, 8), 1) for _ in range(4)],
    "views or images": ([rows(3, 8, 8), rows(3, 6, 8), rows(3, 8, 8)], rows(3)),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_two_readings_are_an_error_that_asks_for_batch_spec(name: str) -> None:
    """A batch that can be read in two ways is refused with a remedy, unless it need not be cut."""
    with pytest.raises(PipelineConfigurationError, match="batch_spec"):
        split_batch(AMBIGUOUS[name], 2)
    whole = split_batch(AMBIGUOUS[name], 1)
    assert len(whole.microbatches) == 1
    size, reason = find_batch_size(AMBIGUOUS[name])
    assert size is None
    assert reason is not None


def test_the_error_names_sizes_and_fields() -> None:
    """The error says which field has which size."""
    with pytest.raises(PipelineConfigurationError, match=r"batch\['a'\] has 4, batch\['b'\] has 6"):
        split_batch({"a": rows(4, 3), "b": rows(6, 3)}, 2)
