"""Inputs of a trace: a batch of any size, from a function, an example or what a model says of itself; and precisions.

Floating-point inputs are meta tensors, integer and boolean ones real.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import chain, filterfalse
from typing import Any, overload

import torch

from latpred.errors import LatpredError, TraceError, UsageError, is_stop, one_line
from latpred.query import AMP, whole_number
from latpred.sandbox.untouched import SPREAD, copied
from latpred.zoo.user_files import NO_GPU

Tensor = torch.Tensor


DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    **dict.fromkeys(AMP, torch.float32),
}
AUTOCAST = {name: DTYPES[half] for name, half in AMP.items()}  # what torch.autocast casts to
_NAMES = {dtype: name for name, dtype in DTYPES.items() if name not in ("tf32", *AMP)}


def precision_name(dtype: torch.dtype) -> str:
    """Name of the precision that a model with weights of a dtype has: the dtype's own where it has no other."""
    return _NAMES.get(dtype, str(dtype).rpartition(".")[2])


@overload
def dtype_of(precision: str) -> torch.dtype: ...
@overload
def dtype_of(precision: None) -> None: ...
def dtype_of(precision: str | None) -> torch.dtype | None:
    """Floating-point dtype of weights and inputs in a precision; None for None, which leaves them their own."""
    if precision is None:
        return None
    if not isinstance(precision, str) or precision not in DTYPES:
        raise UsageError(f"precision {precision!r} is not known; choose one of {', '.join(DTYPES)}")
    return DTYPES[precision]


def refuse_autocast(precision: str | None, what: str) -> None:
    """Refuse a precision under torch.autocast where that is not predicted."""
    if precision in AMP:
        raise UsageError(f"{what} is not predicted under autocast; ask for precision={AMP[precision]!r} instead.")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a model is called with."""

    make: Callable[[int], Any]  # a batch of some size: a tensor, a tuple of positional or a dict of keyword arguments
    kind: str  # "seq", "image", "audio" or "custom"
    size: int  # tokens, pixels or samples; 0 for custom inputs
    batch: int = 0  # samples of the example that was given; 0 where none was


def from_example(example: Any) -> Inputs:
    """Inputs of any batch size from one example.

    The first dimension of the first tensor is the batch, and so is that of every tensor which shares its size.
    """
    if callable(example) and not isinstance(example, Tensor):
        return Inputs(partial(_asked, example), "custom", 0)
    if isinstance(example, list):
        example = tuple(example)
    given = tensors_in(example)
    for tensor in given:
        demand_dense(tensor, "inputs hold")
    sizes = [tensor.shape[0] for tensor in given if tensor.dim()]
    if not sizes or sizes[0] < 1:
        raise UsageError(
            "inputs hold no tensor whose first dimension could be the batch; give tensors such as "
            "inputs=torch.zeros(1, 3, 224, 224), or a function inputs=lambda batch: ..."
        )
    return Inputs(lambda batch: _resized(example, sizes[0], batch), "custom", 0, sizes[0])


def _asked(function: Callable[[int], Any], batch: int) -> Any:
    """What a user's function gives for a batch size; where it raises, an error that says so."""
    try:
        return function(batch)
    except Exception as error:
        if isinstance(error, LatpredError) or is_stop(error):
            raise
        raise TraceError(
            f"the function of inputs failed at batch {batch}: {type(error).__name__}: {one_line(error)}; let it give a "
            "batch of any size, as lambda batch: torch.zeros(batch, 3, 224, 224) does"
        ) from error


SEQUENCE_FIRST = (
    "{} has batch_first=False, so the second dimension of its inputs is its batch, and the first was taken for it: "
    "build it with batch_first=True, or give inputs= as a function of the batch"
)
CHANNELS_LAST = (
    "the model's weights lie channels last, but its kernels are priced as contiguous ones: ask for "
    "memory_format='channels_last' (--channels-last), or give latpred.trace(model, memory_format='channels_last')"
)


def lies_channels_last(model: torch.nn.Module) -> bool:
    """Whether weights of convolutions were brought to the channels_last format; those of one pixel lie in both."""
    weights = (weight for weight in model.parameters() if weight.dim() == 4 and not weight.is_contiguous())
    return any(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)


def sequence_first(model: torch.nn.Module) -> bool:
    """Whether one of PyTorch's own sequence models, given by itself, takes the batch in the second dimension."""
    if isinstance(model, (torch.nn.TransformerEncoder, torch.nn.TransformerDecoder)):
        model = model.layers[0] if len(model.layers) else model
    kinds = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
    part = getattr(model, "self_attn", None) if isinstance(model, kinds) else model
    if not isinstance(part, (torch.nn.MultiheadAttention, torch.nn.RNNBase, torch.nn.Transformer)):
        return False
    return not part.batch_first


def demand_dense(tensor: Tensor, holder: str) -> None:
    """Refuse tensors that have no one shape, or no strides."""
    if tensor.is_nested:
        raise UsageError(
            f"{holder} a nested tensor, which is no rectangle; give a padded one, or say lengths=[...] with "
            "execution='nested'"
        )
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise UsageError(f"{holder} a tensor of layout {layout}, whose ops have no formula; give it dense: .to_dense()")


def arguments(
    inputs: Inputs, batch: int, dtype: torch.dtype, channels_last: bool, kept: frozenset[torch.dtype]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one pass. To be called in inference mode, which marks them as activations."""
    settled = _settled(as_arguments(inputs.make(batch)), dtype, channels_last, kept)
    return ((), settled) if isinstance(settled, dict) else (settled, {})


def kept_dtypes(inputs: Inputs, model: torch.nn.Module) -> frozenset[torch.dtype]:
    """Dtypes that inputs of the user's stay in, since the model has weights of them; of all others it has its own."""
    if inputs.kind != "custom":
        return frozenset()
    return frozenset(tensor.dtype for tensor in chain(model.parameters(), model.buffers()) if has_precision(tensor))


def has_precision(tensor: Tensor) -> bool:
    """Whether a tensor of a model is in the precision asked for, as numbers of 8 bits and complex ones are not."""
    return tensor.is_floating_point() and tensor.itemsize > 1


def nbytes(args: tuple[Any, ...], options: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors_in((args, options)))


def tensors_in(inputs: Any) -> list[Tensor]:
    """The tensors in inputs, those that objects hold included."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    copied(inputs, note)
    return found


def as_arguments(value: Any) -> dict[str, Any] | tuple[Any, ...]:
    """Inputs as keyword arguments, whatever mapping they are in, or as a tuple of positional ones."""
    if isinstance(value, Mapping):
        return dict(value)
    return value if isinstance(value, tuple) else (value,)


def _resized(example: Any, given: int, batch: int) -> Any:
    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != given:
            return tensor
        if tensor.is_meta or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            shape = (batch, *tensor.shape[1:])
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        return tensor[torch.arange(batch, device=tensor.device) % given]

    return copied(example, resize)


def _settled(value: Any, dtype: torch.dtype, channels_last: bool, kept: frozenset[torch.dtype]) -> Any:
    def settle(tensor: Tensor) -> Tensor:
        demand_dense(tensor, "inputs hold")
        layout = torch.channels_last if channels_last and tensor.dim() == 4 else torch.contiguous_format
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            wanted = dtype if tensor.dtype.is_floating_point and tensor.dtype not in kept else tensor.dtype
            return torch.empty(tensor.shape, dtype=wanted, device="meta", memory_format=layout)
        if tensor.is_meta:
            # Integers are read by Python and index tables: ones are safe for both.
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return tensor.detach().to("cpu", copy=True)

    return copied(value, settle)


def placed(value: Any, device: str) -> Any:
    """The same inputs on a device; meta tensors become zeros there, and on "meta" nothing moves."""
    if device == "meta":
        return value

    def place(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.to(device)

    return copied(value, place)


def cast(value: Any, dtype: torch.dtype, kept: frozenset[torch.dtype] = frozenset()) -> Any:
    def follow(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype.is_floating_point and tensor.dtype not in kept else tensor

    return copied(value, follow)


def real(
    value: Any, dtype: torch.dtype, channels_last: bool = False, kept: frozenset[torch.dtype] = frozenset()
) -> Any:
    """The same inputs on the CPU, with normal noise of a dtype in place of floating-point meta tensors; ids stay."""
    generator = torch.Generator().manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True)  # the model may write into it

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else own(tensor)
        filled = torch.randn(tensor.shape, generator=generator) if tensor.is_meta else own(tensor)
        wanted = tensor.dtype if tensor.dtype in kept else dtype
        return filled.to(wanted).contiguous(memory_format=layout if tensor.dim() == 4 else torch.contiguous_format)

    return copied(as_arguments(value), fill)


TOKENS = 128
PIXELS = 224
SAMPLES = 32_000  # two seconds at 16 kHz
_TOKEN = 5
_KINDS = {  # of inputs, each with an example; of an image's height and width
    "input_ids": "torch.ones(1, 16, dtype=torch.long)",
    "pixel_values": "torch.zeros(1, 3, {}, {})",
    "input_values": f"torch.zeros(1, {SAMPLES})",
    "input_features": "torch.zeros(1, 80, 3000)",
    "decoder_input_ids": "torch.ones(1, 1, dtype=torch.long)",
}
_HINT = (
    "say what it is called with: inputs=torch.zeros(1, 3, 224, 224), a tuple, a dict of keyword arguments, "
    "or a function of the batch; what takes no inputs= takes path/file.py:function, which gives a model and an example"
)


def unspread(model: torch.nn.Module) -> torch.nn.Module:
    """The model that a wrapper spreads over devices; any other as it is."""
    return model.module if isinstance(model, SPREAD) else model


def derived(model: torch.nn.Module, seq: int | None = None, image: int | None = None) -> Inputs:
    """Inputs for a model that was given without any."""
    model = unspread(model)
    config = getattr(model, "config", None)
    described = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if config is not None and hasattr(config, "model_type"):
        inputs = _from_config(model, config, seq, image)
    elif isinstance(described, dict) and described.get("input_size"):
        channels, height, width = described["input_size"]
        inputs = _values("image", (channels, image or height, image or width))
    else:
        inputs = _from_first_layer(model, image)
    demand_used(type(model).__name__, inputs.kind, seq, image)
    return inputs


def demand_used(name: str, kind: str, seq: int | None, image: int | None) -> None:
    """Refuse a size that is none, or that a model's inputs do not have."""
    whole_sizes(seq, image)
    if kind == "image" and seq is not None:
        raise UsageError(f"{name} takes images, of which seq={seq} says nothing; leave it out, or give image=")
    if kind in ("seq", "audio") and image is not None:
        taken = "tokens" if kind == "seq" else "audio"
        raise UsageError(f"{name} takes {taken}, of which image={image} says nothing; leave it out, or give seq=")
    if kind == "custom" and (seq is not None or image is not None):
        raise UsageError(f"{name} takes inputs of one size, of which seq= and image= say nothing; leave them out")


def diagnosis(error: Exception) -> str:
    """What an error of a forward pass says, on one line, and what to do about it; part of a sentence."""
    message = re.split(" and mode <| You may have run into", one_line(error))[0]
    return f"{type(error).__name__}: {message.rstrip('.')}; {_remedy(message)}"


def _remedy(message: str) -> str:
    """What to do about an error, by what it says."""
    if any(words in message for words in NO_GPU):
        return "the model's code asks for a GPU, which no trace needs: have it use the device of its inputs, x.device"
    if "_nested_tensor_from_mask" in message:
        return (
            "PyTorch's encoder makes nested tensors of the mask: give lengths=[...] in its place, with "
            "execution='nested', or build the encoder with enable_nested_tensor=False"
        )
    if "NestedTensor" in message:
        return "nested tensors have no meta kernels: give padded ones, or lengths=[...] with execution='nested'"
    if re.search(r"aten::\w*sparse|Sparse(TensorImpl|Meta|Csr)|[Ss]parse (CSR |CSC )?tensors", message):
        return "ops of sparse tensors have no formula: compute with dense ones"
    if "no fake impl or Meta kernel" in message:
        return "tell PyTorch the shape of what it gives, by torch.library.register_fake or impl, or leave the op out"
    said = "check the model and the shapes of its inputs (inputs=, seq=, image=), whose first dimension is taken as "
    said += "the batch unless inputs= is a function of it"
    if any(words in message for words in ("got an unexpected keyword", "given")):
        said += "; a dict of inputs stands for keyword arguments, a list or tuple for positional ones; where the model "
        said += "takes it as one argument, put it into a tuple: inputs=(example,)"
    return said


def whole_sizes(seq: Any, image: Any) -> tuple[int | None, int | None]:
    """Tokens and pixels as whole numbers, where they were given."""
    length = None if seq is None else whole_number("seq", seq, "length")
    if isinstance(image, (list, tuple)):
        raise UsageError(
            f"image={image!r} is not a length: it is one side of a square; for another shape give an example, "
            "inputs=torch.zeros(1, 3, 480, 640)"
        )
    side = None if image is None else whole_number("image", image, "length")
    return length, side


def demand_one(inputs: Any, seq: int | None, image: int | None) -> None:
    """Refuse sizes beside inputs that have their own."""
    extra = [name for name, value in (("seq", seq), ("image", image)) if value is not None]
    if inputs is not None and extra:
        raise UsageError(
            f"inputs= says what the model is called with; leave out {' and '.join(extra)} (of a file, inputs= is what "
            "its function gives beside the model)"
        )


def longest(model: torch.nn.Module) -> int | None:
    """The most tokens a model takes: as many as a table of it has positions. None where none limits them."""
    model = unspread(model)
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tables = (part for part in model.modules() if isinstance(part, torch.nn.Embedding))
    # Some tables begin with rows for padding, as many as their `offset`.
    return most if any(part.num_embeddings - getattr(part, "offset", 0) == most for part in tables) else None


def demand_positions(model: torch.nn.Module, length: int) -> None:
    """Refuse more tokens than a model takes."""
    most = longest(model)
    if most is not None and length > most:
        raise UsageError(f"sequences of {length} tokens are too long: {type(model).__name__} takes at most {most}")


def example_tokens(batch: int, length: int, device: str, vocabulary: int | None = None) -> torch.Tensor:
    """Ordinary token ids: spread over the vocabulary on a real device, all the same where only shapes matter."""
    vocabulary = vocabulary or _TOKEN + 1
    if device == "meta" or vocabulary <= _TOKEN + 1:
        return torch.full((batch, length), min(_TOKEN, vocabulary - 1), device="cpu" if device == "meta" else device)
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(_TOKEN, vocabulary, (batch, length), generator=generator).to(device)


def example_values(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.Tensor:
    """Normal noise, always the same, or on "meta" only its shape.

    Zeros would flatter: a CPU pools their maximum in a third of the time, and a GPU draws less power.
    """
    if device == "meta":
        return torch.empty(shape, device=device, dtype=dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu").to(device, dtype)


def example_speech(config: Any, batch: int, device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Speech as a spectrogram of the length that a model is made for, and the first token of its text."""
    shape = (batch, _number(config, "num_mel_bins", 80), 2 * _number(config, "max_source_positions", 1500))
    spectrogram = example_values(shape, device, dtype)
    return {"input_features": spectrogram, "decoder_input_ids": example_tokens(batch, 1, device)}


def more_inputs(model: torch.nn.Module, inputs: Inputs) -> tuple[str, str]:
    """What a model takes beside the inputs that follow from it, and a call with all; "" where it takes no more."""
    try:
        parameters = list(signature(model.forward).parameters)
    except (TypeError, ValueError):
        parameters = []
    made: Any = {} if inputs.kind == "custom" else inputs.make(1)
    given = made if isinstance(made, dict) else parameters[: len(made) if isinstance(made, tuple) else 1]
    taken = [*filter(parameters.__contains__, _KINDS)]
    more = " and ".join(filterfalse(given.__contains__, taken))
    if inputs.kind == "custom" or not more:
        return "", ""
    sides = _image_size(getattr(model, "config", None))
    return more, "inputs={" + ", ".join(f'"{name}": {_KINDS[name].format(*sides)}' for name in taken) + "}"


def _values(kind: str, shape: tuple[int, ...], name: str = "") -> Inputs:
    """Samples of a shape, as a keyword argument or, without a name of one, positional."""

    def make(batch: int) -> Any:
        values = torch.empty((batch, *shape), device="meta", dtype=torch.float32)
        return {name: values} if name else (values,)

    return Inputs(make, kind, shape[-1])


def _from_config(model: torch.nn.Module, config: Any, seq: int | None, image: int | None) -> Inputs:
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        sides = (image, image) if image else _image_size(config)
        return _values("image", (_number(config, "num_channels", 3), *sides), main)
    if main == "input_values":
        return _values("audio", (seq or SAMPLES,), main)
    if main == "input_features":
        frames = seq or 2 * _number(config, "max_source_positions", 1500)
        return _values("audio", (_number(config, "num_mel_bins", 80), frames), main)
    if main == "input_ids":
        encodes = "Encoder" in type(model).__name__ and "Decoder" not in type(model).__name__
        both = getattr(config, "is_encoder_decoder", False) and not encodes
        names = ("input_ids", "decoder_input_ids") if both else ("input_ids",)
        most, vocabulary = longest(model), getattr(config, "vocab_size", None)
        length = seq or min(TOKENS, most or TOKENS)

        def make(batch: int) -> Any:
            return {name: example_tokens(batch, length, "meta", vocabulary) for name in names}

        return Inputs(make, "seq", length)
    raise UsageError(f"{type(model).__name__} takes {main!r}, for which no shape can be guessed; {_HINT}")


def _number(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else default


def _image_size(config: Any) -> tuple[int, int]:
    """Height and width of the images that a model is made for."""
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", None)
    if isinstance(size, (list, tuple)):
        return int(size[0]), int(size[-1])
    side = size if isinstance(size, int) else PIXELS
    return side, side


def _from_first_layer(model: torch.nn.Module, image: int | None) -> Inputs:
    first = next((m for m in model.modules() if next(m.children(), None) is None), None)
    convolution = next((m for m in model.modules() if isinstance(m, torch.nn.Conv2d)), None)
    if convolution is None or isinstance(first, torch.nn.Embedding):
        raise UsageError(
            f"nothing tells what {type(model).__name__} takes: it has no transformers config, no default_cfg and no "
            f"first 2-d convolution; {_HINT}"
        )
    return _values("image", (convolution.in_channels, image or PIXELS, image or PIXELS))
