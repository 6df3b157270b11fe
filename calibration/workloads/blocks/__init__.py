"""Building blocks of the generated calibration networks: the layer types that published architectures share."""

from __future__ import annotations

from latpred.calibration.workloads.blocks.call_chains import FunctionChain, ModuleChain
from latpred.calibration.workloads.blocks.convolution_blocks import (
    Classifier,
    DenseBlock,
    FireBlock,
    InvertedResidual,
    PlainBlock,
    ResidualBlock,
    ShuffleBlock,
    conv_norm,
)
from latpred.calibration.workloads.blocks.mixed_blocks import (
    AudioNetwork,
    ConvNextBlock,
    MixerNetwork,
    MlpNetwork,
    PatchMap,
    PatchNetwork,
    Recurrence,
    RecurrentNetwork,
    WindowBlock,
)
from latpred.calibration.workloads.blocks.token_blocks import VOCABULARY, DecoderLayer, EncoderLayer, TokenNetwork

__all__ = [
    "VOCABULARY",
    "AudioNetwork",
    "Classifier",
    "ConvNextBlock",
    "DecoderLayer",
    "DenseBlock",
    "EncoderLayer",
    "FireBlock",
    "FunctionChain",
    "InvertedResidual",
    "MixerNetwork",
    "MlpNetwork",
    "ModuleChain",
    "PatchMap",
    "PatchNetwork",
    "PlainBlock",
    "Recurrence",
    "RecurrentNetwork",
    "ResidualBlock",
    "ShuffleBlock",
    "TokenNetwork",
    "WindowBlock",
    "conv_norm",
]
