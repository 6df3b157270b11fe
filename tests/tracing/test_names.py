"""Models by name: published ones, other libraries' and a user's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import latpred
from latpred.errors import MissingPackageError, TraceError, UnknownModelError, UsageError
from latpred.runtimes.source import source_of
from latpred.zoo import names

SIZES = {
    "bert-base-uncased": 109_482_240,
    "google-bert/bert-large-uncased": 335_141_888,
    "t5-small": 35_330_816,
    "microsoft/resnet-50": 25_557_032,
    "vit-base-16": 86_567_656,
    "wav2vec2-base": 94_371_712,
    "mistral-7b": 7_110_660_096,
    "torchvision:resnet50": 25_557_032,
    "timm:mobilenetv3_large_100": 5_483_032,
    "timm:resnet50.a1_in1k": 25_557_032,
}


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name: str) -> None:
    built = names.build(name)
    assert sum(p.numel() for p in built.model.parameters()) == SIZES[name]
    assert all(p.is_meta for p in built.model.parameters())
    assert not built.model.training


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bert-base-uncase", "did you mean .*bert-base-uncased"),
        ("resnet-51", "did you mean .*resnet-50"),
        ("torchvision:resnet5", "did you mean .*torchvision:resnet50"),
        ("timm:resnet5", "did you mean .*timm:resnet50"),
        ("timm:resnet50.a1_in2k", "did you mean timm:resnet50.a1_in1k"),
        ("nasbench-201:9", "did you mean .*nasbench201:0"),
        ("xyzzy-0123456789", r"List the names with: latpred models \("),
    ],
)
def test_unknown_names(name: str, said: str) -> None:
    with pytest.raises(UnknownModelError, match=f"no model is called '{name}'.*{said}") as caught:
        names.build(name)
    assert "latpred." not in str(caught.value)


# Among them keys of the public code of "The Framework Tax" (2023).
TYPED = {
    "bert": "bert-base-uncased",
    "funnel_transformer": "funnel-transformer-small",
    "mobile_bert": "mobilebert-uncased",
    "vit16": "vit-base-patch16-224",
    "efficientnet_lite": "timm:efficientnet_lite1",
    "gernet": "timm:gernet_m",
    "vgg16": "torchvision:vgg16",
    "inception": "torchvision:inception_v3",
    "resnext50_32x4d": "torchvision:resnext50_32x4d",
    "vit_base_patch16_224": "vit-base-patch16-224",
    "MobileNet-V2": "mobilenet-v2",
    "llama_3_8b": "llama-3-8b",
    "clip": "clip-vit-base-patch32-vision",
    "whisper": "whisper-tiny",
    "mobilevitv2-050": "timm:mobilevitv2_050",
    "torchvision:mobilenet-v3-small": "torchvision:mobilenet-v3-small",
    "once-for-all:0": "once_for_all:0",
    "FBNet:C": "fbnet:C",
    "vit-b-16": "torchvision:vit_b_16",
}


@pytest.mark.parametrize("name", TYPED)
def test_names_that_people_type(name: str) -> None:
    assert names.build(name).name == TYPED[name]


@pytest.mark.parametrize("name", ["timm:vit_tiny_patch16_224", "torchvision:maxvit_t", "timm:resnet18"])
def test_models_with_the_image_s_size_in_their_layers_take_another(name: str) -> None:
    larger = latpred.trace(name, image=448)
    assert larger.input_size == 448
    assert larger.macs() > 3 * latpred.trace(name).macs()


def test_a_model_of_two_inputs_is_told_how_to_be_called() -> None:
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(text_config=small, vision_config={**small, "image_size": 64})
    model = CLIPModel(config)
    with pytest.raises(TraceError, match="it may need several, as in inputs=") as caught:
        latpred.trace(model)
    call = str(caught.value).partition("as in inputs=")[2]
    assert "torch.zeros(1, 3, 64, 64)" in call
    assert latpred.trace(model, eval(call, {"torch": torch})).macs() > 0


def test_images_that_a_model_also_takes_are_said_to_be_left_out() -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**small, "model_type": "llama", "num_key_value_heads": 2, "vocab_size": 100}
    sight = {**small, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 16}
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=sight, image_token_id=9))
    (note,) = latpred.trace(model).notes
    assert "also takes pixel_values, beside or in place of what it was traced with" in note
    ids = torch.tensor([[9] * 4 + [5] * 4])
    assert latpred.trace(model, {"input_ids": ids, "pixel_values": torch.zeros(1, 3, 32, 32)}).notes == ()


def test_all_names_can_be_listed() -> None:
    listed = {row["name"]: row for row in names.listing(libraries=True)}
    assert set(names.ARCHITECTURES) < set(listed)
    assert listed["torchvision:densenet161"]["aliases"] == ["densenet", "densenet161"]
    assert listed["timm:gernet_m"]["takes"] == "image"


def test_sizes_and_precisions_are_chosen() -> None:
    assert names.build("bert-base", seq=32).inputs(3, "cpu")["input_ids"].shape == (3, 32)
    assert names.build("torchvision:resnet18", image=64).inputs(2, "cpu")[0].shape == (2, 3, 64, 64)
    assert names.build("hubert", seq=8000).inputs(1, "cpu")["input_values"].shape == (1, 8000)
    assert latpred.trace("vit-base-16", image=64).macs() < latpred.trace("vit-base-16").macs() / 10
    assert names.build("timm:convnext_tiny.fb_in22k_ft_in1k_384").input_size == 384  # as its weights are for
    half = names.build("resnet-18", image=64, precision="fp16")
    assert half.input_size == 64
    assert {p.dtype for p in half.model.parameters()} == {torch.float16}
    assert half.inputs(1, "meta")["pixel_values"].dtype is torch.float16


def test_nothing_is_downloaded_for_a_backbone() -> None:
    assert latpred.trace("torchvision:fcn_resnet50", image=64).coverage().launches == 1.0


def test_tokens_are_ordinary_and_the_same_each_time() -> None:
    built = names.build("bert-base", seq=64)
    ids = built.inputs(2, "cpu")["input_ids"]
    assert torch.equal(ids, built.inputs(2, "cpu")["input_ids"])
    assert int(ids.min()) >= 5
    assert len(ids.unique()) > 60


@pytest.mark.parametrize(
    ("name", "size"), [("torchvision:resnet18", {"image": 64}), ("hubert", {"seq": 8000}), ("whisper-tiny", {})]
)
def test_other_inputs_are_noise_and_the_same_each_time(name: str, size: dict[str, int]) -> None:
    built = names.build(name, device="meta", **size)
    values, again = (
        next(iter(made.values())) if isinstance(made, dict) else made[0]
        for made in map(built.inputs, (2, 2), ("cpu", "cpu"))
    )
    assert torch.equal(values, again)
    assert float(values.std()) == pytest.approx(1.0, abs=0.05)  # zeros pool and branch faster than any image does


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def half():\n    return torch.nn.Conv2d(3, 4, 3, dtype=torch.bfloat16)\n"
        "def plain():\n    return torch.nn.Conv2d(3, 4, 3)\n"
        "def paired():\n    return torch.nn.Linear(6, 2), torch.zeros(1, 6)\n"
        "def reading():\n"
        "    return torch.nn.Linear(int(torch.tensor(6).item()), 2), torch.zeros(1, 6)\n"
        "def sequences():\n    return torch.nn.LSTM(8, 8), torch.zeros(10, 1, 8)\n"
        "def any_batch():\n    return torch.nn.LSTM(8, 8), lambda batch: torch.zeros(10, batch, 8)\n"
        "class Four(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x.view(4, 6) * 2\n"
        "def four():\n    return Four(), torch.zeros(4, 6)\n"
        "from collections import UserDict\n"
        "def mapped():\n    return torch.nn.Linear(6, 2), UserDict(input=torch.zeros(1, 6))\n"
        "def mixed():\n    layers = torch.nn.Linear(6, 2), torch.nn.Linear(6, 2).half()\n"
        "    return torch.nn.ModuleList(layers), torch.zeros(1, 6).half()\n"
        "def wrong():\n    return 12\n"
        "def failing():\n    raise ValueError('no such size')\n"
        "def on_gpu():\n    raise AssertionError('Torch not compiled with CUDA enabled')\n"
        "network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))\n"
        "layer = torch.nn.Linear(6, 2)\n"
    )
    return path


def test_a_file_of_one_s_own(file: Path) -> None:
    for model in ("plain", "network"):
        assert latpred.trace(f"{file}:{model}", image=10).macs() == 64 * 4 * 27
    for function in ("paired", "mapped", "reading"):
        assert latpred.trace(f"{file}:{function}").macs(5) == 60
    assert "batch_first=False" in latpred.trace(f"{file}:sequences").notes[0]
    assert not latpred.trace(f"{file}:any_batch").notes
    assert latpred.trace(f"{file}:four").only == (4,)
    built = names.build(f"{file}:paired", device="cpu")
    assert built.model(*built.inputs(3, "cpu")).shape == (3, 2)


def test_a_file_s_model_is_called_with_the_inputs_asked_for(file: Path) -> None:
    for model in ("layer", "paired"):
        assert latpred.trace(f"{file}:{model}", torch.zeros(1, 5, 6)).macs() == 60
    assert source_of(f"{file}:layer", torch.zeros(1, 6)).model().out_features == 2
    with pytest.raises(UsageError, match="leave out image"):
        latpred.trace(f"{file}:network", torch.zeros(1, 3, 8, 8), image=10)


@pytest.mark.parametrize(
    ("function", "precision", "dtype"),
    [
        ("half", None, torch.bfloat16),
        ("half", "fp32", torch.float32),
        ("half", "amp-fp16", torch.float32),
        ("plain", None, torch.float32),
        ("plain", "fp64", torch.float64),
    ],
)
def test_a_model_keeps_its_own_dtype(file: Path, function: str, precision: str | None, dtype: torch.dtype) -> None:
    built = names.build(f"{file}:{function}", device="cpu", precision=precision)
    (values,) = built.inputs(1, "cpu")
    assert {values.dtype, *(weight.dtype for weight in built.model.parameters())} == {dtype}
    assert built.inputs(1, "meta")[0].dtype is dtype
    source = source_of(f"{file}:{function}", image=8, precision=precision)
    assert {source.inputs(1)[0].dtype, *(weight.dtype for weight in source.model().parameters())} == {dtype}


@pytest.mark.parametrize("where", ["meta", "cpu"])
def test_an_example_of_a_file_stays_in_a_dtype_that_the_model_has_weights_of(file: Path, where: str) -> None:
    assert names.build(f"{file}:mixed", device=where).inputs(1, where)[0].dtype is torch.float16


POSTPONED = """
from __future__ import annotations
import dataclasses
import sys
import torch

@dataclasses.dataclass
class Size:
    width: int = {width}

def build():
    assert vars(sys.modules[Size.__module__])["Size"] is Size
    return torch.nn.Linear(Size().width, 2), torch.zeros(1, Size().width)
"""


def test_a_file_is_a_module_that_python_knows(tmp_path: Path) -> None:
    for folder, width in (("a", 6), ("b", 8)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(POSTPONED.format(width=width))
    first, second = (names.build(f"{tmp_path}/{folder}/mine.py:build").model for folder in "ab")
    assert (first.in_features, second.in_features) == (6, 8)
    broken = tmp_path / "broken.py"
    broken.write_text("def build(): ...\nraise ValueError('no')")
    with pytest.raises(UsageError, match="ValueError: no"):
        names.build(f"{broken}:build")
    with pytest.raises(UnknownModelError, match=r"it offers Size, build$"):  # and not what it imports
        names.build(f"{tmp_path}/a/mine.py:buidl")
    assert [name for name in sys.modules if name.startswith("latpred_user_broken")] == []


def test_a_file_runs_as_it_is_written_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for width in (6, 8):
        file.write_text(POSTPONED.format(width=width))
        os.utime(file, (0, 0))  # an edit within the second
        assert names.build(f"{file}:build").model.in_features == width


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("mine.py:nothing", UnknownModelError, "has no function 'nothing'; it offers half, plain"),
        ("mine.py:wrong", UsageError, "returned int; it must return an nn.Module, or a module and an example"),
        ("mine.py:failing", UsageError, "failed: ValueError: no such size; check the function"),
        ("mine.py:on_gpu", UsageError, "CUDA enabled; no prediction needs the GPU that it asks for"),
        ("missing.py:build", UnknownModelError, r"there is no file '.*missing.py'; give path/file.py:function"),
    ],
)
def test_a_file_that_does_not_help(file: Path, function: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        latpred.trace(f"{file.parent}/{function}")


@pytest.mark.parametrize(
    "name",
    ["nosuch.py", "./folder/nosuch.py", "nosuch.json", "nosuch.onnx", "nosuch.PT", "../nosuch", "/no/such/model"],
)
def test_the_path_of_a_file_that_is_not_there_is_no_unknown_name(name: str) -> None:
    with pytest.raises(UnknownModelError, match=f"there is no file '{name}'; check the path"):
        names.build(name)


def test_a_file_that_does_not_say_what_of_it_is_the_model(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=rf"give one that returns it, as {file}:build$"):
        names.build(str(file))
    weights = tmp_path / "weights.safetensors"
    weights.touch()
    with pytest.raises(UnknownModelError, match="is nothing that latpred can read a model from; give the function"):
        names.build(str(weights))


UNFIT = RuntimeError("operator torchvision::nms does not exist")
HALF_IMPORTED = AttributeError("partially initialized module 'torchvision' has no attribute 'extension'")


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        (
            "timm:resnet50",
            ModuleNotFoundError(name="timm"),
            "needs timm, which is not installed; run 'pip install timm'",
        ),
        ("torchvision:resnet50", UNFIT, "the installed torchvision does not fit the installed torch"),
        ("torchvision:resnet50", HALF_IMPORTED, "the installed torchvision does not fit the installed torch"),
        ("timm:resnet50", HALF_IMPORTED, "the installed torchvision does not fit the installed torch"),
        ("bert-base", UNFIT, "the installed torchvision does not fit the installed torch"),
    ],
)
def test_a_library_missing_or_unfit(name: str, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "import_module", Mock(side_effect=error))
    with pytest.raises(MissingPackageError, match=said):
        names.build(name)
    assert names.of_library("torchvision") == []
