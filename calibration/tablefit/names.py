"""What models are called in the framework-tax measurements, and by which of latpred's names they are walked."""

from __future__ import annotations

MODELS = {
    "albert": "albert-base-v2",
    "bert": "bert-base-uncased",
    "deberta": "deberta-base",
    "distilbert": "distilbert-base-uncased",
    "longformer": "longformer-base-4096",
    "roberta": "roberta-base",
    "squeeze_bert": "squeezebert-uncased",
    "alexnet": "torchvision:alexnet",
    "googlenet": "torchvision:googlenet",
    "inception": "torchvision:inception_v3",
    "mobilenet_v2": "torchvision:quantized_mobilenet_v2",  # in floating point, with ReLU for ReLU6
    "resnet18": "torchvision:resnet18",
    "resnet50": "torchvision:resnet50",
    "resnet152": "torchvision:resnet152",
    "resnext50_32x4d": "torchvision:resnext50_32x4d",
    "shufflenet": "torchvision:shufflenet_v2_x1_0",
    "squeezenet": "torchvision:squeezenet1_0",
    "wide_resnet50_2": "torchvision:wide_resnet50_2",
    "efficientnet_lite": "timm:efficientnet_lite1",
    "gernet": "timm:gernet_m",
}
