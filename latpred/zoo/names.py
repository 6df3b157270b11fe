"""Models by name: published architectures, torchvision's, timm's, and functions in a user's own file.

Models are built from sizes alone: nothing is downloaded and weights are random. On the meta device they are not even
initialised, which makes building take milliseconds.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.resources import files
from inspect import signature
from itertools import chain
from pathlib import Path
from types import MethodType
from typing import Any

import msgspec
import torch

from latpred.errors import MissingPackageError, UnknownModelError, UsageError, chain_of, one_line
from latpred.query import SPACES
from latpred.sandbox.untouched import package
from latpred.tracing.inputs import (
    as_arguments,
    cast,
    demand_one,
    demand_used,
    derived,
    dtype_of,
    example_speech,
    example_tokens,
    example_values,
    from_example,
    kept_dtypes,
    placed,
    real,
)
from latpred.tracing.meta_module import Unweighted, cast_weights
from latpred.zoo import spaces

# Files that somebody may take for a model. A name may have a dot as well: "Qwen/Qwen2.5-0.5B".
_SUFFIXES = {".py", ".json", ".yaml", ".yml", ".onnx", ".pt", ".pt2", ".pth", ".ckpt", ".bin", ".pkl", ".safetensors"}
_PATHS = ("/", "./", "../", "~/")


def _from_file(
    name: str, seq: int | None, image: int | None, dtype: torch.dtype | None, device: str, asked: Any
) -> Built:
    """What the function that "path/file.py:function" names builds, to be called with inputs that were asked for."""
    from latpred.zoo.user_files import errors_of, function_of

    path, _, function = name.rpartition(":")
    build = function_of(Path(path), function)
    with errors_of(name, "the function"):
        made = build if isinstance(build, torch.nn.Module) else unweighted(build, device)
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{name} returned {type(model).__name__}; it must return an nn.Module, or a module and an example of its "
            "inputs"
        )
    example = example if asked is None else asked
    demand_one(example, seq, image)
    given = derived(model, seq, image) if example is None else from_example(example)
    taken, kept = dtype or _own_dtype(model), frozenset() if dtype else kept_dtypes(given, model)

    def inputs(batch: int, where: str) -> Any:
        values = given.make(batch)
        if where != "meta":
            return placed(real(values, taken, kept=kept), where)
        return cast(as_arguments(values), taken, kept)

    return Built(_settled(model, dtype, device), inputs, name, given.kind, given.size, given.batch)


def _demand_there(path: str) -> None:
    """Refuse the path of a file that is not there."""
    if not Path(path).exists():
        raise UnknownModelError(f"there is no file {path!r}; check the path, and the folder that it starts from")


def _demand_no_path(name: str) -> None:
    """Refuse what is no name but the path of a file, there or not."""
    path = Path(name)
    if path.suffix.lower() not in _SUFFIXES and not name.startswith(_PATHS):
        return
    _demand_there(name)
    if path.suffix == ".py":
        raise UnknownModelError(
            f"{name!r} is a Python file, of which one function builds the model; give one that returns it, as "
            f"{name}:build"
        )
    raise UnknownModelError(
        f"{name!r} is nothing that latpred can read a model from; give the function that builds the model, as "
        "path/file.py:function, or an .onnx file"
    )


def unweighted(build: Callable[[], Any], device: str = "meta") -> Any:
    """What a function builds; for the meta device without memory and without initialising weights, where it can do so.

    What needs values of its own tensors, as RegNet does for its widths, is called once more as usual, since the meta
    device holds none. What it then says counts.
    """
    if device == "meta":
        with suppress(Exception, SystemExit), Unweighted():
            return build()
    return build()


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published model."""

    model: str  # transformers class of the network; its config class follows from it
    kind: str = msgspec.field(name="takes")  # "seq", "image", "audio", or "custom" for what has several inputs
    size: int  # tokens, pixels or samples that it is measured with unless asked otherwise
    config: dict[str, Any] = {}  # arguments of the config class
    aliases: tuple[str, ...] = ()


class _Zoo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    architectures: dict[str, Architecture]
    of_libraries: dict[str, str] = msgspec.field(name="of libraries")


_ZOO = msgspec.json.decode((files("latpred.models") / "architectures.json").read_bytes(), type=_Zoo)
ARCHITECTURES, SHORT = _ZOO.architectures, _ZOO.of_libraries


def canonical(name: str) -> str:
    """A name as it is looked up: case, and whether parts are joined by - or _, make no difference.

    >>> canonical("MobileNet_V2")
    'mobilenet-v2'
    """
    return name.lower().replace("_", "-")


_ALIASES = {canonical(alias): name for name, row in ARCHITECTURES.items() for alias in (name, *row.aliases)}
_LIBRARIES = {"torchvision": "torchvision.models", "timm": "timm"}  # and what to import of them
# What importing a library raises whose compiled parts do not fit; the second attempt finds it half imported.
_UNFIT = (ImportError, RuntimeError, AttributeError)
_HIDING = threading.RLock()  # what Python has imported is everybody's: one thread at a time hides some of it
_ATTENTION: ContextVar[str | None] = ContextVar("attention", default=None)


@dataclass(frozen=True, slots=True)
class Built:
    """A model built by name, in evaluation mode.

    `inputs` makes a batch of a given size on a device, a tuple or a dict of keyword arguments; on "meta" only
    floating-point tensors are meta tensors, since Python may read the others.
    """

    model: torch.nn.Module
    inputs: Callable[[int, str], Any]
    name: str  # in full
    input_kind: str  # "seq", "image", "audio" or "custom"
    input_size: int  # tokens, pixels or samples; 0 for custom inputs
    batch: int = 0  # samples of the example that a file gives; 0 where none does


def listing(*, libraries: bool = False) -> list[dict[str, Any]]:
    """Every model that goes by name: its name, what it takes, how much of it usually, and its other names.

    `libraries` adds what the installed torchvision and timm have, whose usual sizes are not told (0).
    """
    published: list[dict[str, Any]] = [
        {"name": name, "takes": row.kind, "size": row.size, "aliases": list(row.aliases)}
        for name, row in ARCHITECTURES.items()
    ]
    asked = tuple(_LIBRARIES) if libraries else ()
    listed = {f"{library}:{name}": [name] for library in asked for name in of_library(library)}
    for short, full in SHORT.items():
        listed.setdefault(full, [full.partition(":")[2]]).insert(0, short)
    return published + [
        {"name": name, "takes": "image", "size": 0, "aliases": others} for name, others in listed.items()
    ]


@contextmanager
def attention(implementation: str | None) -> Iterator[None]:
    """Within it, models of transformers built by name have this attention ("eager"); None changes nothing."""
    token = _ATTENTION.set(implementation or _ATTENTION.get())
    try:
        yield
    finally:
        _ATTENTION.reset(token)


def attention_asked() -> str | None:
    """What `attention` asks for."""
    return _ATTENTION.get()


def in_older_parts(model: torch.nn.Module) -> bool:
    """Whether a model has attention in parts, as `attention` asks for, that transformers could call as a whole."""
    able = (part for part in model.modules() if getattr(part, "_supports_sdpa", False))
    built = (getattr(getattr(part, "config", None), "_attn_implementation", None) for part in able)
    return attention_asked() == "eager" and "eager" in built


def build(
    name: str,
    *,
    seq: int | None = None,
    image: int | None = None,
    device: str = "meta",
    precision: str | None = None,
    inputs: Any = None,
) -> Built:
    """Build a model by name, its structure alone on "meta", with random weights elsewhere.

    A name is one of `ARCHITECTURES` or another of its names ("bert-base", "google/mobilebert-uncased"),
    "torchvision:NAME", "timm:NAME", either without its library where nothing else goes by the name, "SPACE:NETWORK" of
    a published space, or "path/file.py:FUNCTION" for a function without arguments that returns a model, or a model and
    an example of its inputs, in place of which `inputs` are taken where they are given. Without a `precision` weights
    stay as they are built, and inputs are of their dtype.
    """
    dtype = dtype_of(precision)
    if name.lower().endswith(".onnx"):
        _demand_there(name)
        raise UnknownModelError(
            f"{name} is an ONNX graph, not a PyTorch model: it can be predicted (--runtime onnxruntime), but not run, "
            "measured or traced for another runtime; give the model that it was exported from, as models.py:build"
        )
    name = SHORT.get(canonical(name), name)
    library, colon, rest = name.partition(":")
    library = library.lower().replace("-", "_")
    if colon and library in (*_LIBRARIES, *SPACES):
        name = f"{library}:{rest}"
        demand_used(name, "image", seq, image)
        of_space = library in SPACES
        model, side = _from_space(name, device) if of_space else _from_library(library, rest, device, image)
        return _built(name, model, "image", image or side, dtype, device)
    if is_file(name):
        return _from_file(name, seq, image, dtype, device, inputs)
    full = full_name(name)
    if full is None:
        _demand_no_path(name)
        return build(_in_a_library(name), seq=seq, image=image, device=device, precision=precision)
    row = ARCHITECTURES[full]
    demand_used(name, row.kind, seq, image)
    size = 0 if row.kind == "custom" else (image if row.kind == "image" else seq) or row.size
    return _built(full, _from_transformers(row, size, device), row.kind, size, dtype, device)


def is_file(name: str) -> bool:
    """Whether a name is that of a function in a file.

    >>> is_file("models.py:build"), is_file("torchvision:resnet50")
    (True, False)
    """
    return ".py:" in name


def full_name(name: str) -> str | None:
    """The name in full of a published architecture; None when it is none.

    >>> full_name("openai-community/gpt2")
    'gpt2'
    """
    return _ALIASES.get(canonical(name))


def build_row(row: Architecture, device: str = "meta", precision: str | None = None) -> torch.nn.Module:
    """A model of an architecture's class and sizes, its size of input the usual one."""
    return _settled(_from_transformers(row, row.size, device), dtype_of(precision), device)


def is_config(value: object) -> bool:
    """Whether a value is a transformers config."""
    of = type(value)  # an object's own attributes may be anything, or raise
    return hasattr(of, "model_type") and hasattr(of, "to_dict") and not issubclass(of, torch.nn.Module)


def build_config(config: Any) -> torch.nn.Module:
    """The base model of a transformers config, on the meta device."""
    mapping = import_module("transformers.models.auto.modeling_auto").MODEL_MAPPING_NAMES
    base = mapping.get(config.model_type)
    if base is None:
        raise UnknownModelError(
            f"transformers has no base model for a {type(config).__name__}; give a function that builds the model"
        )
    model_class = transformers_class(base if isinstance(base, str) else base[0])
    if _ATTENTION.get() is not None:
        config = model_class.config_class.from_dict(config.to_dict(), attn_implementation=_ATTENTION.get())
    else:
        config = copy.deepcopy(config)  # transformers writes into it
    model: torch.nn.Module = unweighted(partial(model_class, config))
    return model.eval()


def _built(name: str, model: torch.nn.Module, kind: str, size: int, dtype: torch.dtype | None, device: str) -> Built:
    config: Any = getattr(model, "config", None)
    taken = dtype or _own_dtype(model)

    def inputs(batch: int, where: str) -> Any:
        if kind == "seq":
            return {"input_ids": example_tokens(batch, size, where, getattr(config, "vocab_size", None))}
        if kind == "custom":
            return example_speech(config, batch, where, taken)
        if kind == "audio":
            return {"input_values": example_values((batch, size), where, taken)}
        pixels = example_values((batch, 3, size, size), where, taken)
        return (pixels,) if config is None else {"pixel_values": pixels}

    return Built(_settled(model, dtype, device), inputs, name, kind, size)


def _own_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype that a model computes in: its first floating-point one but for those of 8 bits, else float32."""
    weights = (t for t in chain(model.parameters(), model.buffers()) if t.is_floating_point() and t.itemsize > 1)
    return next((tensor.dtype for tensor in weights), torch.float32)


def _settled(model: torch.nn.Module, dtype: torch.dtype | None, device: str) -> torch.nn.Module:
    """A model for evaluation on a device, its weights in a dtype where one was asked for."""
    if dtype is not None:
        cast_weights(model, dtype)
    if any(parameter.device.type != device for parameter in model.parameters()):
        model = model.to(device)
    return evaluated(model)


def evaluated(model: torch.nn.Module) -> torch.nn.Module:
    """A model in evaluation mode, which that of an ExportedProgram refuses by methods of its own."""
    for module in model.modules():
        for name in ("train", "eval"):
            if isinstance(vars(module).get(name), MethodType):
                delattr(module, name)
    return model.eval()


# -- transformers --------------------------------------------------------------------------------------------------


def _from_transformers(row: Architecture, size: int, device: str) -> torch.nn.Module:
    model_class, options = transformers_class(row.model), dict(row.config)
    if row.kind == "image" and "Swin" not in row.model:
        fixed = "patch_size" in options and not row.model.startswith("ViT")
        options["image_size"] = options.get("image_size", size) if fixed else size
    if _ATTENTION.get() is not None:
        options["attn_implementation"] = _ATTENTION.get()
    return unweighted(partial(model_class, model_class.config_class(**options)), device)  # type: ignore[no-any-return]


def transformers_class(name: str) -> Any:
    """A class of transformers, which does without a torchvision that is broken."""
    try:
        return getattr(import_module("transformers"), name)
    except _UNFIT as error:
        if _torchvision_broken():
            with suppress(*_UNFIT), _without_torchvision():
                return getattr(import_module("transformers"), name)
        raise broken("transformers", error) from error


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Make a torchvision that cannot be imported look as if it were not there, which transformers can do without."""
    asked: Any = getattr(import_module("transformers.utils.import_utils"), "is_torchvision_available", None)
    with _HIDING:
        hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchvision"}
        for name in hidden:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # which is how Python says that there is none
        try:
            if hasattr(asked, "cache_clear"):
                asked.cache_clear()
                asked()  # transformers remembers the answer
            yield
        finally:
            del sys.modules["torchvision"]
            sys.modules.update(hidden)


def broken(package: str, error: BaseException) -> MissingPackageError:
    """What to raise that says what really keeps a package from being imported."""
    said = [*map(one_line, chain_of(error))]
    rests_on_it = package in ("transformers", *_LIBRARIES)
    if any("torchvision::" in text for text in said) or (rests_on_it and _torchvision_broken()):
        return MissingPackageError(
            f"{package} cannot be used: the installed torchvision does not fit the installed torch (its compiled "
            "operators are missing); reinstall both from one index, for example 'pip install --force-reinstall torch "
            "torchvision --index-url https://download.pytorch.org/whl/cpu', or uninstall torchvision"
        )
    return MissingPackageError(
        f"{package} cannot be imported: {said[-1]}; reinstall it with 'pip install -U {package}'"
    )


def _torchvision_broken() -> bool:
    try:
        import_module("torchvision")
    except ModuleNotFoundError:
        return False
    except _UNFIT:
        return True
    return False


def _from_space(name: str, device: str) -> tuple[torch.nn.Module, int]:
    space, architecture = spaces.named(name)  # type: ignore[misc]  # the name begins with a space's
    encoding = space.encoded(architecture)
    return unweighted(partial(space.build, encoding), device), space.pixels(encoding)


# -- torchvision and timm ------------------------------------------------------------------------------------------


def _from_library(library: str, name: str, device: str, image: int | None) -> tuple[torch.nn.Module, int]:
    try:
        module = import_module(_LIBRARIES[library])
    except _UNFIT as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == library:
            raise MissingPackageError(
                f"'{library}:{name}' needs {library}, which is not installed; run 'pip install {library}'"
            ) from error
        raise broken(library, error) from error
    listed = _listed(module, tagged="." in name)
    if canonical(name) not in listed:
        raise _unknown(f"{library}:{name}", [f"{library}:{other}" for other in listed.values()])
    build_one = _torchvision_model if library == "torchvision" else _timm_model
    return build_one(module, listed[canonical(name)], device, image)


def _listed(module: Any, *, tagged: bool = False) -> dict[str, str]:
    """The names that a library has, by how they are looked up; on demand those with tags of weights, as timm has."""
    tags = module.list_pretrained() if tagged and hasattr(module, "list_pretrained") else ()
    return {canonical(each): each for each in (*module.list_models(), *tags)}


def registered_function(name: str) -> Any:
    """The user's own function that a library builds a model of some name with; None where there is no such function."""
    library, _, rest = SHORT.get(canonical(name), name).partition(":")
    module: Any = sys.modules.get(_LIBRARIES.get(library.lower(), ""))  # else nobody has registered anything
    if module is None:
        return None
    of_timm = library.lower() == "timm"
    # To list timm's names takes 18 ms, as it sorts them: only other spellings are looked up in the list.
    full = rest if of_timm and module.is_model(rest) else _listed(module).get(canonical(rest))
    if full is None:
        return None
    found = module.model_entrypoint(full) if of_timm else module.get_model_builder(full)
    return None if package(found.__module__) == library.lower() else found


def of_library(library: str) -> list[str]:
    """Names of a library's models, without the library; none where it is not there, or cannot be imported."""
    try:
        module = import_module(_LIBRARIES[library])
    except _UNFIT:
        return []
    return list(module.list_models())


def _in_a_library(name: str) -> str:
    """The name in full of a model that only a library knows."""
    listed = {library: of_library(library) for library in _LIBRARIES}
    for library, others in listed.items():
        for other in others:
            if canonical(other) == canonical(name):
                return f"{library}:{other}"
    missing = [library for library, others in listed.items() if not others]
    networks = [f"{space}:0" for space in SPACES]
    raise _unknown(name, [*_ALIASES, *SHORT, *networks, *chain.from_iterable(listed.values())], missing)


def _torchvision_model(module: Any, name: str, device: str, image: int | None) -> tuple[torch.nn.Module, int]:
    accepted = signature(module.get_model_builder(name)).parameters
    # Without this, detection and segmentation models download the weights of their backbone.
    options: dict[str, Any] = {"weights_backbone": None} if "weights_backbone" in accepted else {}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    if image is not None and name.startswith(("vit_", "maxvit_")):  # whose layers have the image's size in them
        options |= {"image_size": image} if name.startswith("vit_") else {"input_size": (image, image)}
    model = unweighted(partial(module.get_model, name, weights=None, **options), device)
    best = next(iter(module.get_model_weights(name)), None)
    size = getattr(getattr(best, "transforms", None), "keywords", {}).get("crop_size", 224)
    return model, size if isinstance(size, int) else size[0]


def _timm_model(module: Any, name: str, device: str, image: int | None) -> tuple[torch.nn.Module, int]:
    create, model = partial(module.create_model, name, pretrained=False), None
    if image is not None:
        # Of some models the image's size is in the layers; others do not take it, and need not.
        try:
            model = unweighted(partial(create, img_size=image), device)
        except TypeError:
            pass
        except (AssertionError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"timm:{name} cannot be built for images of {image} pixels: "
                f"{' '.join(str(error).split()) or type(error).__name__}; ask for another size (image=, --image)"
            ) from error
    if model is None:
        model = unweighted(create, device)
    described = getattr(model, "pretrained_cfg", None) or {}
    return model, described.get("input_size", (3, 224, 224))[-1]


def _unknown(name: str, names: list[str], missing: Sequence[str] = ()) -> UnknownModelError:
    names = list(dict.fromkeys(names))  # several libraries have some of them
    near = get_close_matches(canonical(name), names, n=4, cutoff=0.5)
    near += [other for other in names if canonical(name) in canonical(other) and other not in near][: 4 - len(near)]
    hint = f"; did you mean {', '.join(near)}?" if near else "."
    unseen = f"; {' and '.join(missing)} could not be looked into (see: latpred doctor)" if missing else ""
    return UnknownModelError(
        f"no model is called {name!r}{hint} List the names with: latpred models "
        f"(torchvision's and timm's names work too, your own models as path/file.py:function){unseen}"
    )
