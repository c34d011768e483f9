"""Environment: a machine as data, so that a plan for it can be made anywhere."""

import enum
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated

from capture_planner.errors import Problem
from capture_planner.records._base import ByteCount, Count, Name, Pattern, field, record
from capture_planner.records.spec import SCHEMA_VERSION, SchemaVersion

Capability = Annotated[str, Pattern(r"[0-9]{1,2}\.[0-9]", 'text, a compute capability in quotes such as "9.0"')]
Version = Annotated[str, Pattern(r"[0-9][0-9A-Za-z.+-]{0,63}", "a version such as 2.13.0")]


class DeviceKind(enum.Enum):
    """What runs the model."""

    CUDA = "cuda"
    CPU = "cpu"


@record
class Device:
    """One accelerator, or the host's processor."""

    kind: DeviceKind = field("cuda or cpu")
    name: Name = field("the device's own name")
    capability: Capability | None = field('CUDA compute capability, text in quotes such as "9.0"', default=None)
    memory: ByteCount = field("memory of one device, as in 80GiB")
    multiprocessors: Count | None = field("streaming multiprocessors", default=None)

    def _problems(self) -> Iterator[Problem]:
        for name in ("capability", "multiprocessors"):
            # Backends answer by both: what a GPU supports, and how much workspace it needs.
            if self.kind is DeviceKind.CUDA and getattr(self, name) is None:
                yield Problem(path=(name,), message="required for a cuda device")

    @property
    def sm(self) -> tuple[int, int]:
        """The compute capability as numbers, (9, 0) for "9.0"; (0, 0) without one."""
        major, _, minor = (self.capability or "0.0").partition(".")
        return int(major), int(minor)


def by_name(packages: Mapping[str, str]) -> dict[str, str]:
    """Return versions of packages in the order of their names."""
    return dict(sorted(packages.items()))


@record
class Environment:
    """A machine: its device and the versions of what runs on it."""

    version: SchemaVersion = field("version of this file's schema", default=SCHEMA_VERSION)
    name: Name = field("the environment's name, used on the command line")
    device: Device = field("the device each rank has")
    driver: Version | None = field("version of the device driver", default=None)
    cuda: Version | None = field("version of the CUDA runtime", default=None)
    packages: Mapping[Name, Version] = field(
        "versions of the installed packages that backends depend on", factory=dict, converter=by_name, hash=False
    )

    def package(self, name: str) -> tuple[int, ...] | None:
        """Return the leading numbers of an installed package's version, or None where it is absent."""
        text = self.packages.get(name)
        if text is None:
            return None
        # "2.13.0+cu130" and "2.13.0rc1" are (2, 13, 0); a part that begins with a letter ends the version.
        leading = (re.sub(r"[^0-9].*", "", part) for part in text.split("."))
        return tuple(map(int, itertools.takewhile(bool, leading)))
