"""Reads the names of GGUF files: the parts of a split model, and the file to take of several. Opens nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath, PurePosixPath
from typing import TypeVar

from penstock.core.errors import ModelLoadError

AnyPath = TypeVar("AnyPath", bound=PurePath)

_PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_TYPE = re.compile(
    r"(?<![A-Za-z0-9])((?:I?Q|TQ)\d+(?:_[A-Z0-9]+)*|B?F16|F32|MXFP4(?:_MOE)?)(?![A-Za-z0-9])", re.IGNORECASE
)
# Good answers for their size come first.
_PREFERRED = (
    "Q4_K_M", "Q4_K_XL", "Q4_K_S", "Q4_K_L", "Q4_K", "IQ4_XS", "IQ4_NL", "MXFP4", "Q4_1", "Q4_0", "Q5_K_M", "Q5_K_S",
    "Q5_1", "Q5_0", "Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "IQ3_M", "IQ3_S", "Q3_K_S", "IQ3_XXS", "Q2_K", "IQ2_M",
    "BF16", "F16", "F32",
)  # fmt: skip
_BESIDE_NAME = re.compile(r"-\d{5}-of-\d{5}|UD|[-._]")  # of a part, of a way to choose types
# Files beside a model that are no models: of importance, of drafts; and of images, which may have any first letters.
_BESIDE = ("imatrix", "mtp-")
_MMPROJ = "mmproj"
_MMPROJ_TYPES = ("F16", "BF16", "Q8_0", "F32")  # the preferred ones first
_NOT_OF_MMPROJ_NAMES = re.compile(r"mmproj|model|fp16|fp32|\.gguf$", re.IGNORECASE)


def split_parts(path: AnyPath) -> tuple[AnyPath, ...]:
    """Return all parts of the model that a file belongs to, by its name; the file alone if it is no part."""
    match = _PART.match(path.name)
    if match is None:
        return (path,)
    stem, count = match["stem"], int(match["count"])
    return tuple(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))


def choose_gguf(files: Iterable[AnyPath], where: str, wanted: str | None = None) -> AnyPath:
    """Return the file to load of several versions of one model, of a split model the first part. `wanted` is a type,
    such as Q8_0. Raises ModelLoadError if the names do not tell which one."""
    firsts = sorted({split_parts(file)[0] for file in files if _is_model(file.name)})
    if wanted is not None:
        matching = [file for file in firsts if type_in_name(file.name) == wanted.upper()]
        if not matching:
            known = ", ".join(sorted({type_in_name(file.name) or file.name for file in firsts}))
            raise ModelLoadError(
                f"{where} has no .gguf file of the type {wanted}; there are {known or 'none'}."
            )
        firsts = matching
    if len(firsts) == 1:
        return firsts[0]
    if not firsts:
        raise ModelLoadError(f"{where} has no .gguf file.")
    versions = {_BESIDE_NAME.sub("", _TYPE.sub("", file.name)) for file in firsts}
    ranked = [file for name in _PREFERRED for file in firsts if type_in_name(file.name) == name]
    if len(versions) > 1 or not ranked:
        raise ModelLoadError(
            f"{where} has {len(firsts)} .gguf files.", hint=f"Name one of them, such as {firsts[0]}."
        )
    return ranked[0]


def type_in_name(name: str) -> str | None:
    """Return the type of weights that a name has, such as Q8_0; None if it has none."""
    found = _TYPE.findall(name)
    return found[-1].upper() if found else None


def choose_mmproj(model: PurePath, files: Iterable[AnyPath]) -> AnyPath | None:
    """Return the file of the vision part of a model, by the names of the files beside the model. None if there is
    none, or if there are several and the names do not tell which one."""
    found = sorted(file for file in files if file.name.endswith(".gguf") and _MMPROJ in file.name.lower())
    named = {file: _plain_name(file.name) for file in found}
    own = _plain_name(model.name)
    if len(set(named.values())) > 1:  # of several models, or of one model and of none in particular
        fitting = [name for name in named.values() if own.startswith(name)]
        if not fitting:
            return None
        found = [file for file in found if named[file] == max(fitting, key=len)]
    return min(found, key=lambda file: _mmproj_rank(file.name), default=None)


def folders_of_mmproj(model: AnyPath) -> list[AnyPath]:
    """Return where the vision part of a model may lie: beside the model, or above a folder for a type of weights."""
    folders = [model.parent]
    if type_in_name(model.parent.name):
        folders.append(model.parent.parent)
    return folders


def files_of_model(model: PurePosixPath, listed: Iterable[str]) -> list[str]:
    """Return the files of a repository that belong to a model: all parts, and the vision part if there is one."""
    files = [PurePosixPath(each) for each in listed]
    for folder in folders_of_mmproj(model):
        vision = choose_mmproj(model, [file for file in files if file.parent == folder])
        if vision is not None:
            return [*map(str, split_parts(model)), str(vision)]
    return [str(part) for part in split_parts(model)]


def _is_model(name: str) -> bool:
    return not name.lower().startswith(_BESIDE) and _MMPROJ not in name.lower()


def _plain_name(name: str) -> str:
    """Return the name of a model in the name of a file."""
    return _BESIDE_NAME.sub("", _NOT_OF_MMPROJ_NAMES.sub("", _TYPE.sub("", name))).lower()


def _mmproj_rank(name: str) -> int:
    kind = (type_in_name(name) or "F16").replace("FP", "F")
    return _MMPROJ_TYPES.index(kind) if kind in _MMPROJ_TYPES else len(_MMPROJ_TYPES)
