"""Named suites of whole models for validation. No model of a suite is ever used in a fit or in a choice.

"cpu" holds published architectures, narrowed or shortened until two slow cores run them at batch 32; "unseen", "fresh",
"blind", "ordinary" and then "sealed" hold others that came later, for a verdict on models that nothing was chosen by,
the last two everyday networks in plain torch; "heldout" names full-size models for GPUs. Suites are recipes: nothing
is built until it is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from latpred.calibration.workloads import blind_models as blind
from latpred.calibration.workloads import ordinary_models as ordinary
from latpred.calibration.workloads import published_models as fresh
from latpred.calibration.workloads import published_models as made
from latpred.calibration.workloads import published_models as unseen
from latpred.calibration.workloads import sealed_models as sealed
from latpred.calibration.workloads.base import Inputs, Workload, dense_inputs, seeded, token_inputs, workloads_of
from latpred.errors import UsageError
from latpred.zoo.names import settle_transformers

Make = Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class Suite:
    """Models to validate on, at these batch sizes; `names` are built by name, `ready` from recipes of its own."""

    name: str
    purpose: str
    batches: tuple[int, ...]
    ready: tuple[Workload, ...] = ()
    names: tuple[str, ...] = ()

    def workloads(self) -> tuple[Workload, ...]:
        """Recipes of all models.

        Raises
        ------
        UnknownModelError
            When a name needs a package that is not installed.
        """
        settle_transformers()  # recipes import its classes themselves
        return (*self.ready, *(workloads_of(self.names) if self.names else ()))


def get(name: str) -> Suite:
    """A suite by name.

    Raises
    ------
    UsageError
        For an unknown name.

    Examples
    --------
    >>> len(get("cpu").ready)
    22
    """
    if name not in _SUITES:
        raise UsageError(f"There is no suite {name!r}. Use one of {', '.join(_SUITES)}.")
    return _SUITES[name]


def names() -> tuple[str, ...]:
    """Names of all suites."""
    return tuple(_SUITES)


def _tokens(name: str, family: str, length: int, make: Make) -> Workload:
    def build(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        return seeded(make, device, precision), token_inputs(length, made.VOCABULARY)

    return Workload(name, "seq", length, build, family)


def _image(name: str, family: str, side: int, make: Make) -> Workload:
    return _dense(name, family, "image", (3, side, side), make)


def _audio(name: str, family: str, samples: int, make: Make) -> Workload:
    return _dense(name, family, "audio", (samples,), make)


def _dense(name: str, family: str, kind: str, shape: tuple[int, ...], make: Make) -> Workload:
    """A model of images or sound; its input size is the last length of its shape."""

    def build(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        return seeded(make, device, precision), dense_inputs(shape, precision)

    return Workload(name, kind, shape[-1], build, family)


def _custom(name: str, family: str, shape: tuple[int, ...], make: Make, *, ids: int = 0) -> Workload:
    """A model of features of a shape, and of so many ids for each sample."""

    def build(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        features, tokens = dense_inputs(shape, precision), token_inputs(ids, made.VOCABULARY)

        def inputs(batch: int, where: Any) -> tuple[torch.Tensor, ...]:
            return (*features(batch, where), *(tokens(batch, where) if ids else ()))

        return seeded(make, device, precision), inputs

    return Workload(name, "custom", 0, build, family)


def _named(name: str, family: str, side: int, known: str) -> Workload:
    """A network of torchvision or timm, built by its name there once it is asked for."""

    def build(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        return workloads_of(known, image=side)[0].make(device, precision)

    return Workload(name, "image", side, build, family)


_CPU = Suite(
    name="cpu",
    purpose="small whole models of many families, for a CPU with two slow cores",
    batches=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    ready=(
        _tokens("cpu/bert", "bert", 24, made.bert),
        _tokens("cpu/distilbert", "distilbert", 16, made.distilbert),
        _tokens("cpu/albert", "albert", 24, made.albert),
        _tokens("cpu/mobilebert", "mobilebert", 16, made.mobilebert),
        _tokens("cpu/squeezebert", "squeezebert", 24, made.squeezebert),
        _tokens("cpu/funnel", "funnel", 32, made.funnel),
        _tokens("cpu/electra", "electra", 48, made.electra),
        _tokens("cpu/deberta", "deberta", 24, made.deberta),
        _tokens("cpu/fnet", "fnet", 32, made.fnet),
        _tokens("cpu/gpt2", "gpt2", 40, made.gpt2),
        _tokens("cpu/llama", "llama", 20, made.llama),
        _tokens("cpu/t5-encoder", "t5", 40, made.t5_encoder),
        _image("cpu/vit", "vit", 48, made.vit),
        _image("cpu/swin", "swin", 64, made.swin),
        _image("cpu/convnext", "convnext", 64, made.convnext),
        _image("cpu/resnet-18", "resnet", 64, made.resnet18),
        _image("cpu/resnet-50", "resnet", 56, made.resnet50),
        _image("cpu/mobilenet-v2", "mobilenet", 96, made.mobilenet_v2),
        _image("cpu/efficientnet-b0", "efficientnet", 64, made.efficientnet_b0),
        _image("cpu/regnet-y", "regnet", 80, made.regnet_y),
        _image("cpu/vgg-11", "vgg", 40, made.vgg11),
        _audio("cpu/wav2vec2", "wav2vec2", 6400, made.wav2vec2),
    ),
)

_UNSEEN = Suite(
    name="unseen",
    purpose="small whole models that played no part while latpred was built, for the same CPU",
    batches=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    ready=(
        _tokens("unseen/bart-encoder", "bart", 32, unseen.bart_encoder),
        _tokens("unseen/opt", "opt", 24, unseen.opt),
        _tokens("unseen/bloom", "bloom", 20, unseen.bloom),
        _tokens("unseen/qwen2", "qwen2", 36, unseen.qwen2),
        _tokens("unseen/mpnet", "mpnet", 28, unseen.mpnet),
        _tokens("unseen/convbert", "convbert", 32, unseen.convbert),
        _tokens("unseen/xlnet", "xlnet", 24, unseen.xlnet),
        _dense("unseen/whisper-encoder", "whisper", "audio", (80, 96), unseen.whisper_encoder),
        _image("unseen/dinov2", "dinov2", 70, unseen.dinov2),
        _image("unseen/segformer", "segformer", 64, unseen.segformer),
        _image("unseen/poolformer", "poolformer", 64, unseen.poolformer),
        _image("unseen/mobilevit", "mobilevit", 96, unseen.mobilevit),
        _image("unseen/mobilenet-v1", "mobilenet_v1", 96, unseen.mobilenet_v1),
        _image("unseen/levit", "levit", 96, unseen.levit),
        _image("unseen/convnext-v2", "convnext_v2", 64, unseen.convnext_v2),
        _image("unseen/densenet", "densenet", 64, unseen.densenet),
    ),
)

_FRESH = Suite(
    name="fresh",
    purpose="the same again, of models first measured when all else was done",
    batches=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    ready=(
        _tokens("fresh/gpt-neox", "gpt_neox", 28, fresh.gpt_neox),
        _tokens("fresh/phi", "phi", 24, fresh.phi),
        _tokens("fresh/roformer", "roformer", 40, fresh.roformer),
        _tokens("fresh/camembert", "camembert", 20, fresh.camembert),
        _image("fresh/beit", "beit", 80, fresh.beit),
        _image("fresh/bit", "bit", 64, fresh.bit),
        _image("fresh/pvt-v2", "pvt_v2", 96, fresh.pvt_v2),
        _image("fresh/focalnet", "focalnet", 64, fresh.focalnet),
        _image("fresh/swin-v2", "swin_v2", 64, fresh.swin_v2),
        _image("fresh/resnext", "resnext", 64, fresh.resnext),
        _audio("fresh/hubert", "hubert", 6400, fresh.hubert),
    ),
)

_BLIND = Suite(
    name="blind",
    purpose="ordinary models of which no prediction was ever held against a measurement before a release",
    batches=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
    ready=(
        _tokens("blind/mistral", "mistral", 24, blind.mistral),
        _tokens("blind/qwen3", "qwen3", 32, blind.qwen3),
        _tokens("blind/gemma2", "gemma2", 20, blind.gemma2),
        _tokens("blind/phi3", "phi3", 24, blind.phi3),
        _tokens("blind/falcon", "falcon", 28, blind.falcon),
        _tokens("blind/gpt-j", "gptj", 20, blind.gpt_j),
        _tokens("blind/modernbert", "modernbert", 40, blind.modernbert),
        _tokens("blind/deberta-v3", "deberta_v2", 32, blind.deberta_v3),
        _tokens("blind/marian", "marian", 20, blind.marian),
        _tokens("blind/clip-text", "clip", 24, blind.clip_text),
        _tokens("blind/lstm-tagger", "lstm", 24, blind.lstm_tagger),
        _image("blind/siglip-vision", "siglip", 80, blind.siglip_vision),
        _image("blind/unet", "unet", 48, blind.unet),
        _named("blind/mnasnet", "mnasnet", 96, "torchvision:mnasnet1_0"),
        _named("blind/mobilenet-v4", "mobilenet_v4", 128, "timm:mobilenetv4_conv_small"),
        _named("blind/rexnet", "rexnet", 96, "timm:rexnet_100"),
        _named("blind/fastvit", "fastvit", 96, "timm:fastvit_t8"),
        _named("blind/dla", "dla", 128, "timm:dla46_c"),
        _named("blind/repvgg", "repvgg", 80, "timm:repvgg_a0"),
        _named("blind/ghostnet", "ghostnet", 128, "timm:ghostnet_100"),
        _named("blind/efficientnet-v2", "efficientnet_v2", 96, "timm:tf_efficientnetv2_b0"),
        _named("blind/vovnet", "vovnet", 96, "timm:ese_vovnet19b_dw"),
        _named("blind/edgenext", "edgenext", 96, "timm:edgenext_x_small"),
        _named("blind/hrnet", "hrnet", 64, "timm:hrnet_w18_small"),
        _dense("blind/audio-spectrogram", "ast", "audio", (96, 64), blind.audio_spectrogram),
        _audio("blind/speech-conformer", "conformer", 4800, blind.speech_conformer),
    ),
)

_ORDINARY = Suite(
    name="ordinary",
    purpose="everyday networks in plain torch, many of them small, that nothing was chosen by",
    batches=(1, 2, 4, 8, 16, 32),
    ready=(
        _custom("ordinary/tabular-mlp", "mlp", (128,), ordinary.tabular_mlp),
        _custom("ordinary/deep-mlp", "mlp", (96,), ordinary.deep_mlp),
        _custom("ordinary/wide-mlp", "mlp", (784,), ordinary.wide_mlp),
        _custom("ordinary/residual-mlp", "mlp", (40,), ordinary.residual_mlp),
        _custom("ordinary/recommender", "dlrm", (13,), ordinary.recommender, ids=16),
        _tokens("ordinary/click-predictor", "deepfm", 10, ordinary.click_predictor),
        _custom("ordinary/two-tower", "two_tower", (24,), ordinary.two_tower, ids=17),
        _dense("ordinary/lenet", "lenet", "image", (1, 28, 28), ordinary.lenet),
        _custom("ordinary/deep-sets", "deep_sets", (50, 8), ordinary.deep_sets),
        _custom("ordinary/pointnet", "pointnet", (3, 256), ordinary.pointnet),
        _dense("ordinary/keyword-spotter", "ds_cnn", "audio", (1, 49, 10), ordinary.keyword_spotter),
        _tokens("ordinary/lstm-sentiment", "lstm", 32, ordinary.lstm_sentiment),
        _custom("ordinary/gru-forecaster", "gru", (48, 7), ordinary.gru_forecaster),
        _tokens("ordinary/bigru-tagger", "gru", 20, ordinary.bigru_tagger),
        _tokens("ordinary/gru-attention", "gru", 40, ordinary.gru_attention),
        _custom("ordinary/temporal-convolution", "tcn", (8, 200), ordinary.temporal_convolution),
        _image("ordinary/shufflenet", "shufflenet", 128, ordinary.shufflenet),
        _image("ordinary/squeezenet", "squeezenet", 96, ordinary.squeezenet),
        _image("ordinary/mlp-mixer", "mixer", 64, ordinary.mlp_mixer),
        _tokens("ordinary/gmlp", "gmlp", 48, ordinary.gmlp),
        _image("ordinary/normalizer-free", "nfnet", 64, ordinary.normalizer_free),
        _image("ordinary/conv-attention", "hybrid", 224, ordinary.conv_attention),
        _image("ordinary/resnet-20", "resnet", 32, ordinary.resnet_20),
        _dense("ordinary/bilinear-unet", "unet", "image", (1, 64, 64), ordinary.bilinear_unet),
        _custom("ordinary/dcgan-generator", "dcgan", (100, 1, 1), ordinary.dcgan_generator),
        _image("ordinary/super-resolution", "espcn", 48, ordinary.super_resolution),
        _image("ordinary/autoencoder", "autoencoder", 64, ordinary.autoencoder),
        _image("ordinary/tiny-vit", "vit", 32, ordinary.tiny_vit),
        _tokens("ordinary/tiny-gpt", "gpt2", 64, ordinary.tiny_gpt),
        _tokens("ordinary/text-classifier", "bert", 32, ordinary.text_classifier),
        _dense("ordinary/audio-tagger", "crnn", "audio", (1, 64, 96), ordinary.audio_tagger),
    ),
)

_SEALED = Suite(
    name="sealed",
    purpose="everyday networks in plain torch that no prediction is held against before a release",
    batches=(1, 2, 4, 8, 16, 32),
    ready=(
        _custom("sealed/policy", "mlp", (48,), sealed.policy),
        _custom("sealed/compressor", "mlp", (256,), sealed.compressor),
        _custom("sealed/highway", "highway", (64,), sealed.highway),
        _custom("sealed/coordinates", "siren", (256, 2), sealed.coordinates),
        _tokens("sealed/wide-and-deep", "wide_deep", 12, sealed.wide_and_deep),
        _custom("sealed/lstm-forecaster", "lstm", (36, 12), sealed.lstm_forecaster),
        _tokens("sealed/bilstm-tagger", "lstm", 24, sealed.bilstm_tagger),
        _tokens("sealed/gru-classifier", "gru", 30, sealed.gru_classifier),
        _dense("sealed/line-reader", "crnn", "image", (1, 32, 96), sealed.line_reader),
        _tokens("sealed/text-convolution", "textcnn", 48, sealed.text_convolution),
        _custom("sealed/wavenet", "wavenet", (1, 400), sealed.wavenet),
        _custom("sealed/raw-audio", "m5", (1, 8000), sealed.raw_audio),
        _dense("sealed/sound-events", "vgg", "audio", (1, 64, 80), sealed.sound_events),
        _image("sealed/shufflenet-v1", "shufflenet", 112, sealed.shufflenet_v1),
        _image("sealed/mobilenet-half", "mobilenet_v2", 96, sealed.mobilenet_half),
        _image("sealed/squeezed-resnet", "resnet", 48, sealed.squeezed_resnet),
        _image("sealed/preactivated", "resnet", 32, sealed.preactivated),
        _image("sealed/densely-joined", "densenet", 32, sealed.densely_joined),
        _image("sealed/convmixer", "convmixer", 64, sealed.convmixer),
        _image("sealed/res-mlp", "resmlp", 112, sealed.res_mlp),
        _image("sealed/normalizer-free-bottlenecks", "nfnet", 64, sealed.normalizer_free_bottlenecks),
        _image("sealed/hybrid", "hybrid", 160, sealed.hybrid_160),
        _image("sealed/compact-transformer", "cct", 32, sealed.compact_transformer),
        _image("sealed/linknet", "linknet", 96, sealed.linknet),
        _image("sealed/residual-super-resolution", "srresnet", 32, sealed.residual_super_resolution),
        _tokens("sealed/translator", "transformer", 20, sealed.translator),
        _custom("sealed/set-attention", "set_transformer", (40, 10), sealed.set_attention),
        _custom("sealed/graph-convolution", "gcn", (24, 16), sealed.graph_convolution),
    ),
)

_HELDOUT = Suite(
    name="heldout",
    purpose="full-size models of families that no fit and no choice has seen, for a GPU",
    batches=(1, 2, 4, 8, 16, 32, 64, 128),
    names=(
        "torchvision:densenet161",
        "torchvision:vgg16",
        "mobilebert",
        "funnel",
        "electra-base",
        "deberta",
        "torchvision:swin_t",
        "torchvision:regnet_y_8gf",
        "wav2vec2-base",
        "t5-base-encoder",
        "torchvision:mobilenet_v3_large",
        "torchvision:convnext_tiny",
    ),
)

_SUITES = {suite.name: suite for suite in (_CPU, _UNSEEN, _FRESH, _BLIND, _ORDINARY, _SEALED, _HELDOUT)}
