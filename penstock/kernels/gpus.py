"""The families of GPUs that kernels are compiled for, and what each family can and cannot do. Knows neither torch nor
Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

OLDEST = 80  # the first compute capability with bfloat16 tensor cores and asynchronous copies


@dataclass(frozen=True, slots=True)
class Family:
    """GPUs that take the same machine code, and what a program may use on them."""

    name: str
    arch: int | str  # the first compute capability, 10 × major + minor; or AMD's name of the chip
    chips: str
    shared_bytes: int  # for one program
    has_overlap: bool = False  # programmatic dependent launch
    has_float8: bool = False  # e4m3 on tensor cores, and instructions that convert it


FAMILIES = (
    Family("Ampere", 80, "A100, A30", 163 << 10),
    Family("Ampere, small", 86, "A10, A40, RTX 30", 99 << 10),
    Family("Ampere, embedded", 87, "Orin", 163 << 10),
    Family("Ada", 89, "L4, L40, RTX 40", 99 << 10, has_float8=True),
    Family("Hopper", 90, "H100, H200", 227 << 10, has_overlap=True, has_float8=True),
    Family("Blackwell", 100, "B200, GB200", 227 << 10, has_overlap=True, has_float8=True),
    Family("Blackwell, small", 120, "RTX 50, RTX PRO", 99 << 10, has_overlap=True, has_float8=True),
    Family("CDNA 3", "gfx942", "MI300", 64 << 10),
)
HOPPER = FAMILIES[4]


def family_of(backend: str, arch: int | str) -> Family:
    """Return the family of a target as Triton names it. A chip that is newer than the table is treated as the family
    before it, with the least shared memory of all."""
    if backend == "cuda":
        known = [family for family in FAMILIES if isinstance(family.arch, int) and family.arch <= int(arch)]
        if known:
            newest = max(known, key=lambda family: int(family.arch))
            is_known = int(arch) < int(newest.arch) + 10
            return newest if is_known else replace(newest, shared_bytes=99 << 10)
    for family in FAMILIES:
        if family.arch == arch:
            return family
    raise ValueError(f"Penstock has no kernels for {backend} {arch}")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as torch describes it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int

    @property
    def arch(self) -> int:
        return 10 * self.capability[0] + self.capability[1]

    @property
    def is_too_old(self) -> bool:
        return self.arch < OLDEST

    @property
    def has_float8(self) -> bool:
        return not self.is_too_old and family_of("cuda", self.arch).has_float8

    def describe(self) -> str:
        """One sentence: the GPU, and what runs on it in another way than on the newest ones."""
        major, minor = self.capability
        known = f"{self.name}, compute capability {major}.{minor}, {self.memory_bytes / 2**30:.0f} GiB"
        if self.is_too_old:
            return f"{known}: too old, kernels need compute capability 8.0 (A100, RTX 30) or newer"
        family = family_of("cuda", self.arch)
        if family.has_float8:
            float8 = "fp8 products and KV cache"
        else:
            float8 = "no fp8 products (fp8 weights are widened to the compute type), no fp8 KV cache (int8 instead)"
        overlap = "kernels overlap" if family.has_overlap else "kernels run one after the other"
        return f"{known} ({family.name}): {float8}; {overlap}"
