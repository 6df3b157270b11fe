"""Whether the machine that a profile was measured on is the one at hand, is like it, or is another.

Host and processor names do not tell: virtual machines are called "vm" or "runner", and clouds call several generations
of processors "Intel(R) Xeon(R) Processor".
"""

from __future__ import annotations

from enum import Enum

from latpred import host
from latpred.profile import Machine

MEMORY_TOLERANCE = 0.03  # kernels keep more or less of it to themselves


class Owner(Enum):
    """Whose a machine is."""

    THIS = "this machine"
    ALIKE = "the same hardware as far as is known, but perhaps another machine"
    ANOTHER = "another machine"


def owner(machine: Machine) -> Owner:
    """Whose a profile's machine is.

    The hardware must agree: the processor with its model and vector instructions, the number of cores, the memory. An
    id that differs makes it another machine of the same hardware, as nodes of a cluster are; so may be the machine of
    an older profile, which has neither model nor id.
    """
    if difference(machine):
        return Owner.ANOTHER
    here = host.machine_id()
    if not machine.cpu_model or (machine.machine_id and here and machine.machine_id != here):
        return Owner.ALIKE
    return Owner.THIS


def difference(machine: Machine) -> str:
    """The first thing about the hardware that is not as here, as "here …"; "" where all that is known agrees."""
    if machine.cpu != host.cpu_name():
        return f"here {host.cpu_name()}"
    if machine.cpu_model and machine.cpu_model != host.cpu_model():
        return f"model {machine.cpu_model}, here {host.cpu_model()}"
    if machine.cores != host.cores():
        return f"{machine.cores} cores, here {host.cores()}"
    memory = host.memory_bytes()
    if abs(machine.memory_bytes - memory) > MEMORY_TOLERANCE * max(memory, machine.memory_bytes):
        return f"{machine.memory_bytes / 2**30:.1f} GiB of memory, here {memory / 2**30:.1f}"
    return ""


def caveat(machine: Machine) -> str:
    """What predictions from a profile say where its machine is not certainly this one; "" where it is."""
    whose = owner(machine)
    if whose is Owner.THIS:
        return ""
    if whose is Owner.ANOTHER:
        where = machine.accelerator or machine.cpu
        return (
            f"measured on another machine ({machine.cpu}, {difference(machine)}): kernel times hold on {where}, "
            "dispatch costs may differ"
        )
    if machine.cpu_model:
        return f"measured on another machine of the same hardware ({machine.cpu}, {machine.cores} cores)"
    return (
        "perhaps measured on another machine: names, cores and memory are those of this one, and older profiles say "
        "no more. Make sure with: latpred calibrate"
    )
