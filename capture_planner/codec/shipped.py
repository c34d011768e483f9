"""The environments and profiles that ship with the package, and how one is chosen."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import attrs

from capture_planner import codec
from capture_planner.errors import CapturePlannerError
from capture_planner.modes import Role
from capture_planner.records.environment import Environment
from capture_planner.records.measurements import Measurements
from capture_planner.records.model import Model
from capture_planner.records.profile import Profile
from capture_planner.records.spec import Parallel
from capture_planner.records.text import counted

DEFAULT_ENVIRONMENT = "h100"

_PACKAGE = Path(__file__).parent.parent
_CHECKOUT = _PACKAGE.parent / "plans"


def _shipped(kind: str) -> dict[str, Path]:
    """Return the files of a folder that the package has, or else the checkout that it runs from."""
    folder = _PACKAGE / kind if (_PACKAGE / kind).is_dir() else _CHECKOUT / kind
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def shipped_environments() -> dict[str, Path]:
    """Return the files of the shipped environments by name."""
    return _shipped("environments")


def shipped_profiles() -> dict[str, Path]:
    """Return the files of the shipped profiles by name."""
    return _shipped("profiles")


_environment = functools.cache(codec.load_environment)
_profile = functools.cache(codec.load_profile)


def environments() -> list[Environment]:
    """Return the shipped environments in the order of their names. What ships is read once in a process."""
    return [_environment(path) for path in shipped_environments().values()]


def environment_of_device(name: str | None) -> Environment | None:
    """Return the first shipped environment of a device; None where none has it."""
    return next((each for each in environments() if each.device.name == name), None)


@attrs.frozen
class NearProfile:
    """A profile for a deployment, and how far it is from it."""

    name: str
    profile: Profile
    factor: float
    """Size of the larger of the two models over that of the smaller one; 1: the same shape."""
    distance: str
    """Distance in words, as decisions have it."""


def find_profile(
    environment: Environment, model: Model, profiles: Mapping[str, Profile] | None = None
) -> NearProfile | None:
    """Return the profile that was measured on this device with the model of the nearest size; None without any.

    The size of a model is what its layers read for a token: layers times the squared width. Nothing is known of the
    widths of feed-forward parts, so a mixture of experts is as near as a dense model of its width.

    :param profiles: by name; None: those that ship.
    """
    near = [each for each in _near(model, profiles) if each.profile.device.name == environment.device.name]
    # This very model first: another one of its shape has a factor of 1 too.
    return min(near, key=lambda each: (each.profile.model.name != model.name, each.factor), default=None)


def nearest_profile(
    environment: Environment, model: Model, profiles: Mapping[str, Profile] | None = None
) -> NearProfile | None:
    """Return the profile of the device that is nearest, and of its models the nearest in size; None without any.

    Devices are near by their kind, their generation, and the number of their multiprocessors.

    :param profiles: as in ``find_profile``.
    """
    own = environment.device

    def place(near: NearProfile) -> tuple[object, ...]:
        device = near.profile.device
        # By logarithm below, where half and twice are as far.
        sizes = (device.multiprocessors or 1) / (own.multiprocessors or 1)
        memory = round(math.log2(device.memory / own.memory), 1)
        apart = (abs(device.sm[0] - own.sm[0]), abs(math.log(sizes)), abs(memory))
        return *apart, near.profile.model.name != model.name, near.factor, near.name

    near = [each for each in _near(model, profiles) if each.profile.device.kind is own.kind]
    return min(near, key=place, default=None)


def _near(model: Model, profiles: Mapping[str, Profile] | None) -> Iterator[NearProfile]:
    """Yield the profiles by name, each with its distance from a model; None: those that ship."""
    if profiles is None:
        profiles = {name: _profile(path) for name, path in shipped_profiles().items()}
    for name, profile in sorted(profiles.items()):
        factor = size_factor(profile.model, model)
        yield NearProfile(name, profile, factor, _distance(profile, model, factor))


def foreign_costs(
    name: str, profile: Profile, environment: Environment, model: Model, parallel: Parallel
) -> str | None:
    """Return in words how far a profile that was given is from a deployment; None where it is of the same."""
    if profile.device.name != environment.device.name:
        return f"the costs of {name} were measured on {profile.device.name}, and this is {environment.device.name}"
    # Ranks share each pass, so its time depends on their number.
    own, theirs = parallel.tensor, profile.parallel.tensor
    ranks = f"with {counted(theirs, 'tensor-parallel rank')}, and this has {own}" if own != theirs else None
    if profile.model.name == model.name:
        return ranks and f"the costs of {name} were measured {ranks}"
    distance = _distance(profile, model, size_factor(profile.model, model))
    return f"the costs of {name} were {distance}{f'; {ranks}' if ranks else ''}"


MOST_FACTOR = 2.0
"""How much larger or smaller a profiled model may be for the policy default to go by its times."""


def near_measurements(environment: Environment, model: Model) -> Measurements | None:
    """Return the shipped profile that fits a deployment, without traffic; None where none is near."""
    near = find_profile(environment, model)
    if near is None or near.factor > MOST_FACTOR:
        return None
    return Measurements(profile=near.profile, source=f"by the shipped profile {near.name}, {near.distance}")


def capture_costs(environment: Environment, model: Model, roles: Collection[Role]) -> NearProfile | None:
    """Return the shipped profile by which the capture of a deployment is estimated; None where none is near.

    :param roles: the roles whose graphs it has the costs of.
    """
    profiles = {name: _profile(path) for name, path in shipped_profiles().items()}
    known = {name: each for name, each in profiles.items() if {cost.role for cost in each.graphs}.issuperset(roles)}
    near = find_profile(environment, model, known)
    return None if near is None or near.factor > MOST_FACTOR else near


def size_factor(one: Model, other: Model) -> float:
    """Return how many times the larger of two models has the size of the smaller one, as ``find_profile`` has it."""
    small, large = sorted(map(_size, (one, other)))
    return large / small


def _size(model: Model) -> int:
    return model.num_layers * (model.hidden_size or model.num_heads * model.head_dim) ** 2


def _distance(profile: Profile, model: Model, factor: float) -> str:
    measured = f"measured with {profile.model.name} on {profile.device.name} on {profile.date[:10]}"
    if profile.model.name == model.name:
        return f"{measured}: this model"
    return f"{measured}: a model of the same shape" if factor == 1 else f"{measured}: a factor of {factor:.1f} in size"


def load_environment(name: str | Path) -> Environment:
    """Return a shipped environment by its name, or any environment by its file, as ``find_environment`` does."""
    return find_environment(str(name))


def find_environment(name: str) -> Environment:
    """Return a shipped environment by its name, in any case and with any separators, or any environment by its file.

    Raises ``CapturePlannerError`` where it is neither or empty, ``InvalidDocument`` where the file is wrong.
    """
    shipped = shipped_environments()
    choices = f"shipped are {', '.join(shipped)}, and a path to a file works too"
    if not name.strip():
        raise CapturePlannerError(f"the environment {name!r} names no machine; {choices}")
    if name in shipped:
        return _environment(shipped[name])
    # A suffix means a file, also one that is missing: the error is then about the file.
    if Path(name).suffix or Path(name).exists():
        return codec.load_environment(name)
    spelled = {_plain(each): each for each in shipped}
    if _plain(name) in spelled:
        return _environment(shipped[spelled[_plain(name)]])
    meant = [each for plain, each in spelled.items() if _is_slip(_plain(name), plain)]
    # Of two machines that are equally near, either would be a guess.
    hint = f"; did you mean {meant[0]}?" if len(meant) == 1 else ";"
    raise CapturePlannerError(f"no environment is named {name!r}{hint} {choices}")


_OTHER_GPUS = frozenset({"a1000", "rtx500"})
"""GPUs that do not ship and whose names are one slip from one that does (RTX A1000, RTX 500 Ada)."""


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


def _is_slip(typed: str, name: str) -> bool:
    """Whether a name was typed with one character left out, twice, or swapped with the next.

    Another character makes the name of another GPU, now or next year: h20, h800 and gb200 are no h200.
    """
    if len(typed) < 2 or typed in _OTHER_GPUS:
        return False
    for at in range(len(name)):
        left_out = name[:at] + name[at + 1 :]
        twice = name[: at + 1] + name[at:]
        swapped = name[:at] + name[at : at + 2][::-1] + name[at + 2 :]
        if typed in (left_out, twice, swapped):
            return True
    return False


def environment_of_output(output: str | None) -> str | None:
    """Return the environment that a file name states: ``qwen3-8b.h100.yaml`` is for h100."""
    stated = Path(Path(output or "").stem).suffix.removeprefix(".")
    return stated if stated in shipped_environments() else None
