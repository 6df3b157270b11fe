"""What stands between this machine and a prediction: each finding with what to do about it. Measures nothing."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

from latpred import host, storage
from latpred.errors import DeviceError, ProfileError, one_line
from latpred.profile import store
from latpred.profile.document import THREADS, DeviceProfile
from latpred.profile.store import caveat
from latpred.runtimes.onnx import onnx_session

LEAST_TORCH = (2, 11)
INSTALL_TORCH = "python -m pip install 'torch>=2.11'"
PACKAGES = ("transformers", "numpy", "scikit-learn", "scipy", "pandas")
MODULES = {"scikit-learn": "sklearn"}
OPTIONAL = {
    "matplotlib": "plots: python -m pip install 'latpred[plot]'",
    "torchvision": "models called torchvision:NAME",
    "timm": "models called timm:NAME",
}
STOP = "stop other work before calibrating or measuring"
UNWATCHED = "but nothing tells whether they throttle, or whether other processes use them, while they are calibrated"
POWER = "before calibrating, plug the machine in and set its processors to performance"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    topic: str
    verdict: str  # "ok", "note" (works, with a reservation) or "fail" (predicting or calibrating will not work)
    detail: str
    advice: str = ""  # what to do; "" when nothing needs doing


def examine() -> list[Finding]:
    """Look at Python, packages, devices, directories and profiles, in that order."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    findings = [Finding("python", "ok", python), _torch()]
    findings += [_package(name) for name in PACKAGES]
    findings += [_package(name, purpose) for name, purpose in OPTIONAL.items()]
    findings += [_onnxruntime(), _processor(), _cuda()]
    findings += [_directory("profiles", storage.profiles_dir()), _directory("cache", storage.cache_dir())]
    return findings + _profiles()


def _torch() -> Finding:
    try:
        import torch
    except Exception as error:  # a build that does not find its CUDA libraries raises what it likes
        return Finding("torch", "fail", f"cannot be imported: {error}", INSTALL_TORCH)
    version = str(torch.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_TORCH:
        return Finding("torch", "fail", f"{version} is too old", INSTALL_TORCH)
    return Finding("torch", "ok", version)


def _package(name: str, purpose: str = "") -> Finding:
    """A package that is needed, or that is for one purpose only; to be installed does not mean that it can be used."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        if purpose:
            return Finding(name, "ok", f"not installed; needed for {purpose}")
        return Finding(name, "fail", "not installed", f"python -m pip install {name}")
    try:
        import_module(MODULES.get(name, name))
    except Exception as error:  # compiled parts that do not fit raise what they like
        said = f"{version}, but cannot be imported: {one_line(error)}"
        return Finding(name, "note" if purpose else "fail", said, f"python -m pip install -U {name}")
    return Finding(name, "ok", version)


def _onnxruntime() -> Finding:
    """One distribution of it at most: they install one package, each over the other."""
    topic, packages, lacking = "onnxruntime", onnx_session.installed(), onnx_session.missing()
    versions = " and ".join(f"{name} {version}" for name, version in packages.items())
    if len(packages) > 1:
        keep = next(name for name in packages if name != topic)
        advice = f"pip uninstall -y {' '.join(packages)} && pip install {keep} (or {topic}, where there is no GPU)"
        return Finding(topic, "note", f"{versions} are both installed and overwrite each other's files", advice)
    if lacking is None:
        return Finding(topic, "ok", versions or "installed")
    said, _, advice = lacking.rpartition("; run: ")
    if onnx_session.absent():
        return Finding(topic, "ok", f"{said}; needed for the onnxruntime runtime: {advice}")
    return Finding(topic, "note", said, advice)


def _processor() -> Finding:
    from latpred.calibration.timing.disturbance import busy_now

    cores, usable = host.cores(), host.usable_cores()
    detail = f"{host.cpu_name()}, {cores} core{'s' * (cores > 1)}"
    if usable < cores:
        detail += f", {usable} of them for this process"
    busy, power, torch = busy_now(), host.power_notes(), sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else 1
    crowd = f"PyTorch uses {threads} threads, which wait for one another" if threads > usable else ""
    advice = {busy: STOP, crowd: f"set OMP_NUM_THREADS={usable}", "; ".join(power): POWER}
    notes = list(filter(None, advice))
    verdict = "note" if notes else "ok"
    return Finding("cpu", verdict, "; ".join([detail, *notes]), "; ".join(advice[note] for note in notes))


def _cuda() -> Finding:
    try:
        import torch
    except Exception:
        return Finding("cuda", "ok", "unknown without torch")
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "no usable GPU or driver"
        return Finding("cuda", "ok", f"none ({built}); predictions are for the CPU or for a named profile")
    from latpred.calibration.devices.cuda import OTHER_BUILD, unsupported

    gpus = range(torch.cuda.device_count())
    names = ", ".join(map(torch.cuda.get_device_name, gpus))
    lacking = [said for said in map(unsupported, gpus) if said]
    if lacking:
        return Finding("cuda", "note", "; ".join([names, *lacking]), OTHER_BUILD)
    try:
        import_module("pynvml")
    except ImportError:
        return Finding("cuda", "note", f"{names}, {UNWATCHED}", "python -m pip install nvidia-ml-py")
    return Finding("cuda", "ok", names)


def _directory(topic: str, folder: Path) -> Finding:
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Finding(f"{topic} directory", "ok", str(folder))
    advice = f"make it writable, or choose another with {storage.VARIABLE}=DIR"
    return Finding(f"{topic} directory", "fail", f"{folder} cannot be written", advice)


def _profiles() -> list[Finding]:
    findings = [
        Finding(f"profile {entry.name}", "fail", entry.problem, f"delete {entry.path} or calibrate again")
        for entry in store.listing()
        if entry.problem
    ]
    try:
        profile = store.find()
    except ProfileError as error:
        return [*findings, Finding("profile", "note", str(error).partition(". ")[0], "latpred calibrate")]
    return [*findings, _fit_of(profile)]


def _fit_of(profile: DeviceProfile) -> Finding:
    topic, again = f"profile {profile.name}", store.calibration(profile)
    try:
        from latpred.calibration.devices import conditions, open_device

        options = conditions.Options.of(profile)
        if THREADS not in profile.protocol:
            options = options._replace(threads=None)  # as many as PyTorch uses, which predictions count on
        differing = conditions.changes(profile, open_device(store.live_name(profile)), options)
    except DeviceError as error:
        return Finding(topic, "note", f"its device is not here: {error}")
    except Exception as error:  # a torch that cannot be imported, which has a finding of its own
        return Finding(topic, "note", f"it cannot be told whether it fits this machine: {error}")
    if differing:
        return Finding(topic, "note", "; ".join(differing), f"{again} --fresh")
    if not profile.acceptance.passed:
        advice = "; ".join(profile.acceptance.advice) or f"{again} --fresh"
        return Finding(topic, "note", "its calibration did not pass the acceptance gate", advice)
    foreign = caveat(profile)
    if foreign:
        return Finding(topic, "note", foreign, again)
    return Finding(topic, "ok", f"{profile.device.kind}, calibrated {profile.created}, fits this machine")
