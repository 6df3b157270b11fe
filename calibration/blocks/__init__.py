"""Building blocks of the generated calibration networks: the layer types that published architectures share."""

from __future__ import annotations

from latpred.calibration.blocks.chains import FunctionChain, ModuleChain
from latpred.calibration.blocks.convolutions import (
    Classifier,
    DenseBlock,
    FireBlock,
    InvertedResidual,
    PlainBlock,
    ResidualBlock,
    ShuffleBlock,
    conv_norm,
)
from latpred.calibration.blocks.mixed import (
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
from latpred.calibration.blocks.tokens import VOCABULARY, DecoderLayer, EncoderLayer, TokenNetwork

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
