"""Images of requests: what is refused before it costs anything, what is refused after decoding, and how images are
fetched by URL without a way into the internal network."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from penstock.core.errors import InvalidRequest, NotFound, RateLimited
from penstock.core.gateway_config import GatewayConfig
from penstock.core.shares import Holding, Shares
from penstock.gateway.blobs.blobs import FileFolder
from penstock.gateway.external.models import _content
from penstock.gateway.files import FileStore
from penstock.gateway.images import ImageFetcher, ImageLoader, check_images, checked_image, decode_data_url
from penstock.gateway.prompts import ChatMessage, ChatPrompt, ImagePart, TextPart, image_parts
from penstock.gateway.store.database import Database
from penstock.gateway.turns import working_for
from penstock.models.vision import open_image
from tests.models.tiny_vision import picture, png

CONFIG = GatewayConfig()
PART = ImagePart(url="data:", param="messages[0].content")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def held(capacity: int = 1 << 30) -> Holding:
    return Holding(Shares(capacity), "w", "too many bytes")


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def bomb(width: int, height: int) -> bytes:
    """A small PNG file whose header promises more pixels than anybody should decode."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_formats(kind: str) -> None:
    loaded = checked_image(PART, encoded(picture(40, 30), kind), CONFIG)
    assert (loaded.width, loaded.height) == (40, 30)


def test_a_lying_photograph_is_measured_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    loaded = checked_image(PART, encoded(picture(40, 30), "JPEG", exif=exif), CONFIG)
    assert (loaded.width, loaded.height) == (30, 40)


def test_an_animation_counts_as_its_first_frame() -> None:
    frames = [picture(20, 20, seed) for seed in range(3)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert checked_image(PART, data, CONFIG).width == 20


def _odd_files() -> dict[str, bytes]:
    plain = picture(60, 40)
    deep = Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60) * 27)
    shaded = plain.convert("RGBA")
    shaded.putalpha(Image.linear_gradient("L").resize(plain.size))
    frames: dict[str, Any] = {"save_all": True, "append_images": [picture(60, 40, 1)]}
    turned = Image.Exif()
    turned[0x0112] = 7
    return {
        "16 bits": encoded(deep, "PNG"),
        "1 bit": encoded(plain.convert("1"), "PNG"),
        "CMYK": encoded(plain.convert("CMYK"), "JPEG"),
        "palette": encoded(plain.quantize(16), "PNG", transparency=3),
        "gray and alpha": encoded(shaded.convert("LA"), "PNG"),
        "alpha": encoded(shaded, "WEBP"),
        "several photographs": encoded(plain, "MPO", **frames),
        "moving PNG": encoded(plain, "PNG", **frames),
        "moving WebP": encoded(plain, "WEBP", **frames),
        "progressive": encoded(plain, "JPEG", progressive=True),
        "mirrored and lying": encoded(plain, "PNG", exif=turned),
        "one line": encoded(picture(4000, 1), "PNG"),
    }


@pytest.mark.parametrize("name", _odd_files())
def test_odd_files_are_read_as_transformers_reads_them(name: str) -> None:
    data = _odd_files()[name]
    expected = load_image(Image.open(io.BytesIO(data)))
    loaded = checked_image(PART, data, CONFIG)
    assert (loaded.width, loaded.height) == expected.size
    assert np.array_equal(np.asarray(open_image(data)), np.asarray(expected))


@pytest.mark.parametrize(
    ("data", "config", "says"),
    [
        pytest.param(b"", CONFIG, "is empty", id="empty"),
        pytest.param(b"<svg/>", CONFIG, "in no format", id="svg"),
        pytest.param(encoded(picture(8, 8), "BMP"), CONFIG, "in no format", id="bmp"),
        pytest.param(encoded(picture(8, 8), "TIFF"), CONFIG, "in no format", id="tiff"),
        pytest.param(png(picture(300, 300))[:2000], CONFIG, "is damaged", id="cut"),
        pytest.param(encoded(picture(300, 300), "JPEG")[:900], CONFIG, "is damaged", id="cut-jpeg"),
        pytest.param(bomb(60_000, 60_000), CONFIG, "more than the 40,000,000 pixels", id="bomb"),
        pytest.param(bomb(9_000, 9_000), CONFIG, "9000 × 9000 pixels", id="large"),
        pytest.param(bomb(1, 65_536), CONFIG, "at most 65,535 are allowed in a line", id="tall"),
        pytest.param(
            png(picture(64, 64)), GatewayConfig(max_image_bytes=100), "more than the 100", id="bytes"
        ),
        pytest.param(png(picture(64, 64)), GatewayConfig(max_image_pixels=64), "64 × 64 pixels", id="pixels"),
    ],
)
def test_bad_images_are_refused_with_their_place(data: bytes, config: GatewayConfig, says: str) -> None:
    with pytest.raises(InvalidRequest, match="image") as refused:
        checked_image(PART, data, config)
    assert says in refused.value.message
    assert refused.value.param == PART.param


@pytest.mark.parametrize("text", ["aGVsbG8h\naGk=\r\n", " aGVsbG8haGk", "aGVsbG8haGk=="])
def test_base64_with_broken_lines_and_other_padding(text: str) -> None:
    part = msgspec.structs.replace(PART, url=f"data:image/png;base64,{text}")
    assert decode_data_url(part) == b"hello!hi"


@pytest.mark.parametrize(
    "url", ["data:image/png,abc", "data:image/png;base64,a*b", "data:image/png;base64,abcde"]
)
def test_bad_data_urls(url: str) -> None:
    with pytest.raises(InvalidRequest):
        decode_data_url(msgspec.structs.replace(PART, url=url))


def chat(*parts: TextPart) -> ChatPrompt:
    return ChatPrompt(messages=(ChatMessage("user", parts),))


def test_cheap_checks_come_before_reading() -> None:
    prompt = chat(*[PART] * 3, TextPart("hi"))
    with pytest.raises(InvalidRequest, match="takes text only"):
        check_images([prompt], "m", CONFIG, sees=False)
    with pytest.raises(InvalidRequest) as caught:
        check_images([prompt], "m", CONFIG, sees=False, hint="Name a file with --mmproj.")
    assert caught.value.hint == "Name a file with --mmproj."
    with pytest.raises(InvalidRequest, match="has 3 images, and at most 2"):
        check_images([prompt], "m", GatewayConfig(max_images=2), sees=True)
    long = chat(ImagePart(url="data:image/png;base64," + "A" * 4000))
    with pytest.raises(InvalidRequest, match="more than the 100 bytes"):
        check_images([long], "m", GatewayConfig(max_image_bytes=100), sees=True)
    # A model of texts reads a note in place of an image that came out of a tool.
    check_images([chat(ImagePart(url="data:", stand_in="[An image]"))], "m", CONFIG, sees=False)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        if name == "elsewhere":
            return self._answer(302, b"", location="http://other.example/cat.png")
        if name == "moved":
            return self._answer(302, b"", location="/cat.png")
        if name == "astray":
            return self._answer(302, b"", location="http://[")
        if name == "loop":
            return self._answer(302, b"", location="/loop")
        if name == "nowhere":
            return self._answer(304, b"")
        if name == "page":
            return self._answer(200, b"<html>", kind="text/html")
        if name == "large":
            return self._answer(200, b"x" * 5000)
        if name == "slow":
            self.server.released.wait(60)  # type: ignore[attr-defined]
        if name != "cat.png":
            return self._answer(404, b"")
        return self._answer(200, png(picture(20, 10)))

    def _answer(self, status: int, body: bytes, kind: str = "image/png", location: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if location is not None:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.released = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.released.set()  # type: ignore[attr-defined]
    server.shutdown()


def fetch(url: str, **settings: Any) -> bytes:
    config = GatewayConfig(**{"allowed_image_hosts": ("127.0.0.1",), **settings})
    return asyncio.run(ImageFetcher(config).fetch(ImagePart(url=url)))


def test_an_image_is_fetched_from_a_named_host(host: str) -> None:
    assert fetch(f"http://{host}/cat.png") == png(picture(20, 10))
    assert fetch(f"http://{host}/moved") == png(picture(20, 10))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("none", "status 404"),
        ("nowhere", "status 304"),
        ("page", "text/html"),
        ("elsewhere", "'other.example' may not be fetched"),
        ("astray", "redirected to an address that is not valid"),
        ("loop", "redirected too often"),
        ("large", "more than the 4,000 bytes"),
        ("slow", "took longer than 0.2 s"),
    ],
)
def test_fetches_that_fail(host: str, path: str, says: str) -> None:
    timeout_s = 0.2 if path == "slow" else 60.0
    with pytest.raises(InvalidRequest) as refused:
        fetch(f"http://{host}/{path}", max_image_bytes=4000, image_fetch_timeout_s=timeout_s)
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("url", "hosts", "says"),
    [
        ("http://127.0.0.1/a.png", (), "may not be fetched"),
        ("http://127.0.0.1/a.png", ("images.example",), "may not be fetched"),
        ("http://127.0.0.1/a.png", ("*",), "may not be fetched"),
        ("http://localhost/a.png", ("*",), "leads into an internal network"),
        ("http://evil-images.example/a.png", ("images.example", "*.images.example"), "may not be fetched"),
        ("ftp://images.example/a.png", ("images.example",), "must begin with"),
        ("file:///etc/passwd", ("images.example",), "must begin with"),
        ("http://u:p@images.example/a.png", ("images.example",), "password"),
        ("http://[::1/a.png", ("images.example",), "not valid"),
    ],
)
def test_urls_that_are_never_asked(url: str, hosts: tuple[str, ...], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        fetch(url, allowed_image_hosts=hosts)
    assert says in refused.value.message


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "::1",
        "fe80::1",
        "fd00::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::7f00:1",
        "2002:7f00:1::",
        "::127.0.0.1",
        "::ffff:0:127.0.0.1",
        "fec0::1",
        "192.0.0.192",
        "168.63.129.16",  # of Azure, to each machine its own
    ],
)
def test_a_named_host_with_a_private_address_is_not_asked(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: Any, **__: Any) -> list[Any]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", (address, 80))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(InvalidRequest, match="leads into an internal network"):
        fetch("http://images.example/a.png", allowed_image_hosts=("images.example",))


def test_names_that_resolve_slowly_keep_no_other_work_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def resolve(*_: Any, **__: Any) -> list[Any]:
        released.wait(60)
        return []

    async def ask() -> list[bytes | BaseException]:
        fetcher = ImageFetcher(GatewayConfig(allowed_image_hosts=("*",)))
        parts = [ImagePart(url=f"http://{number}.example/a.png") for number in range(40)]
        asked = [asyncio.ensure_future(fetcher.fetch(part)) for part in parts]
        await asyncio.sleep(0)
        other = asyncio.create_task(asyncio.to_thread(lambda: None))
        await asyncio.wait((other,), timeout=5)  # which it needs only where it is kept waiting
        released.set()
        assert other.done()
        return await asyncio.gather(*asked, return_exceptions=True)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        assert all(isinstance(each, InvalidRequest) for each in asyncio.run(ask()))
    finally:
        released.set()


@pytest.mark.asyncio
async def test_one_workspaces_names_keep_no_other_workspace_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        if host.startswith("slow"):
            released.wait(60)
        return []

    async def ask(workspace_id: str, host: str) -> None:
        working_for.set(workspace_id)
        with pytest.raises(InvalidRequest, match="internal network"):
            await fetcher.fetch(ImagePart(url=f"http://{host}/a.png"))

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    fetcher = ImageFetcher(GatewayConfig(allowed_image_hosts=("*",), image_fetch_timeout_s=60))
    slow = [asyncio.create_task(ask("slow", f"slow{number}.example")) for number in range(8)]
    await asyncio.sleep(0)
    try:
        await asyncio.wait_for(ask("other", "quick.example"), 30)
        assert not any(task.done() for task in slow)
    finally:
        released.set()
        await asyncio.gather(*slow)


def test_all_images_of_a_chat_are_loaded_and_an_error_names_its_place() -> None:
    good = ImagePart(url=data_url(png(picture(20, 10))), param="messages[0].content")
    bad = ImagePart(url=data_url(b"nothing"), param="messages[1].content")
    loader = ImageLoader(CONFIG)
    loaded = asyncio.run(loader.load(chat(good, TextPart("and"), good), "w", held()))
    elsewhere = asyncio.run(loader.load(chat(good), "v", held()))
    digests = [part.loaded.digest for part in (*image_parts(loaded), *image_parts(elsewhere)) if part.loaded]
    assert digests[0] == digests[1] != digests[2], "no workspace may notice the images of another"
    assert [part.loaded.width for part in image_parts(loaded) if part.loaded] == [20, 20]
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(loader.load(chat(good, bad), "w", held()))
    assert refused.value.param == "messages[1].content"
    with pytest.raises(InvalidRequest, match="stores no files"):
        asyncio.run(loader.load(chat(ImagePart(file_id="file-1")), "w", held()))


@pytest.mark.asyncio
async def test_a_workspace_with_many_images_keeps_no_other_workspace_waiting() -> None:
    leaves = threading.Semaphore(0)
    loader = ImageLoader(CONFIG)

    async def read(workspace_id: str, work: Callable[[], bool]) -> bool:
        working_for.set(workspace_id)
        return await loader._in_thread(work)

    many = [asyncio.create_task(read("many", lambda: leaves.acquire(timeout=60))) for _ in range(8)]
    await asyncio.sleep(0)
    few = asyncio.create_task(read("few", lambda: True))
    await asyncio.sleep(0)
    leaves.release()  # one of the first images is read, and the fifth must wait for the other workspace
    try:
        assert await asyncio.wait_for(few, 10)
    finally:
        leaves.release(7)
        await asyncio.gather(*many)


def test_odd_images_leave_nothing_in_the_log_and_in_memory() -> None:
    program = (
        "import sys\n"
        "from PIL import Image\n"
        "from penstock.core.errors import InvalidRequest\n"
        "from penstock.core.gateway_config import GatewayConfig\n"
        "from penstock.gateway.images import checked_image\n"
        "from penstock.gateway.prompts import ImagePart\n"
        "try: checked_image(ImagePart(url=''), bytes.fromhex(sys.argv[1]), GatewayConfig())\n"
        "except InvalidRequest: print(set(vars(Image).get('__warningregistry__', ())) - {'version'})\n"
    )
    huge = bomb(10_000, 10_001).hex()
    done = subprocess.run([sys.executable, "-c", program, huge], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_an_uploaded_file_is_read_within_its_workspace_only(tmp_path: Path) -> None:
    async def load(workspace_id: str, num_images: int = 1, capacity: int = 1 << 30) -> list[ImagePart]:
        store = FileStore(Database(f"sqlite:///{tmp_path / 'penstock.db'}"), FileFolder(tmp_path / "files"))
        upload = await store.upload("w1")
        await upload.write(png(picture(20, 10)))
        file = await store.create(upload, filename="cat.png", purpose="vision")
        loader = ImageLoader(CONFIG)
        loader.files = store
        parts = [ImagePart(file_id=file.id)] * num_images
        return image_parts(await loader.load(chat(*parts), workspace_id, held(capacity)))

    (part,) = asyncio.run(load("w1"))
    with pytest.raises(RateLimited, match="too many bytes"):
        asyncio.run(load("w1", num_images=3, capacity=2 * len(png(picture(20, 10)))))
    assert part.loaded is not None
    assert (part.loaded.width, part.loaded.height) == (20, 10)
    with pytest.raises(NotFound):
        asyncio.run(load("w2"))


def test_external_servers_get_images_as_they_came() -> None:
    content = _content(ChatMessage("user", (ImagePart(url="https://x.example/a.png"), TextPart("what?"))))
    assert content == [
        {"type": "image_url", "image_url": {"url": "https://x.example/a.png"}},
        {"type": "text", "text": "what?"},
    ]
