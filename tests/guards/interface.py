"""What users call: names, parameters and defaults of all that latpred exports, and every verb with its options.

Types are left out, so that moving or renaming one changes nothing here.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

import latpred
from latpred import calibration, plot, report, runtimes
from latpred.cli import main
from latpred.profile import store

KEPT = Path(__file__).with_name("interface.txt")
MODULES = (latpred, calibration, plot, report, runtimes)


def present() -> str:
    """Today's interface."""
    lines = []
    for module in MODULES:
        lines += [f"# {module.__name__}", ""]
        for name in sorted(getattr(module, "__all__", ())):
            lines += [*_of(f"{module.__name__}.{name}", getattr(module, name))]
        lines.append("")
    lines += ["# latpred.profile.store", ""]
    for name in ("find", "load", "listing", "save"):
        lines += _of(f"latpred.profile.store.{name}", getattr(store, name))
    lines += ["", "# latpred on the command line", ""]
    # With the program's own settings, since a verb keeps the first form of --help that it is asked for.
    lines += _verb(main, click.Context(main, info_name="latpred", **main.context_settings))
    return "\n".join(lines) + "\n"


def _of(name: str, value: Any) -> Iterator[str]:
    """A name with its signature, and of a class its public attributes and methods."""
    if not inspect.isclass(value):
        yield f"{name}{_signature(value) if callable(value) else ''}"
        return
    public = [base for base in value.__bases__ if base is not object and not base.__name__.startswith("_")]
    bases = ", ".join(base.__name__ for base in public)
    yield f"class {name}({bases})"
    if not issubclass(value, BaseException):
        yield f"    __init__{_signature(value)}"
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    own = [part for part in value.__mro__ if part is value or part.__name__.startswith("_")]
    for attribute, member in sorted({name: one for part in reversed(own) for name, one in vars(part).items()}.items()):
        if attribute.startswith("_") or attribute in fields:
            continue
        if isinstance(member, property):
            yield f"    {attribute}: property"
        elif isinstance(member, classmethod | staticmethod):
            yield f"    {attribute}{_signature(member.__func__)}"
        elif inspect.isfunction(member):
            yield f"    {attribute}{_signature(member)}"


def _signature(value: Callable[..., Any]) -> str:
    try:
        found = inspect.signature(value)
    except ValueError:
        return "(...)"
    bare = [parameter.replace(annotation=parameter.empty) for parameter in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def _verb(command: click.Command, context: click.Context) -> Iterator[str]:
    """A command with its parameters, then its own commands."""
    yield f"{context.command_path}"
    for parameter in command.get_params(context):
        yield f"    {_parameter(parameter)}"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _verb(inner, click.Context(inner, info_name=name, parent=context))


def _parameter(parameter: click.Parameter) -> str:
    names = " ".join([*parameter.opts, *parameter.secondary_opts])
    kind = parameter.type.name
    if isinstance(parameter.type, click.Choice):
        kind = "|".join(map(str, parameter.type.choices))
    several = " several" if parameter.multiple or parameter.nargs != 1 else ""  # type: ignore[attr-defined]
    flag = " flag" if getattr(parameter, "is_flag", False) else f" {kind}"
    required = " required" if parameter.required else ""
    default = parameter.default if isinstance(parameter.default, str | int | float | bool) else None
    return f"{names}{flag}{several}{required}" + (f" default {default}" if default not in (None, False) else "")


def kept() -> str:
    """The interface that is kept."""
    return KEPT.read_text()


def keep() -> None:
    """Write today's interface."""
    KEPT.write_text(present())
