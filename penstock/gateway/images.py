"""Reads the images of a request and checks them, cheap checks first: number, bytes, format and size in pixels from
the header, then a whole decoding, off the event loop. Knows no model.

An image by URL is fetched only from hosts that the operator has named. The name is resolved once, the addresses are
checked, and the connection goes to a checked address, so that no name leads into the internal network. Redirects stay
on the same host. A URL that an external server will fetch passes the same checks first.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
import ipaddress
import socket
import warnings
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urljoin, urlsplit

import msgspec

from penstock.core.errors import InvalidRequest, PenstockError, quoted
from penstock.core.gateway_config import GatewayConfig
from penstock.core.shares import Holding
from penstock.gateway.files import FileStore
from penstock.gateway.image_bounds import has_too_many_parts
from penstock.gateway.prompts import (
    GenerationRequest,
    ImagePart,
    LoadedImage,
    Prompt,
    are_texts,
    image_parts,
    with_parts,
)
from penstock.gateway.turns import FairSlots

if TYPE_CHECKING:
    import httpx

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MEDIA_TYPES = frozenset({"image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif"})
_MAX_SIDE = (1 << 16) - 1  # pixels, as in JPEG; a PNG of 40 million lines of one pixel takes half a minute
_MAX_REDIRECTS = 3
_MAX_THREADS = 4
_ORIENTATION_TAG = 0x0112
_LYING_ORIENTATIONS = frozenset({5, 6, 7, 8})  # width and height are swapped
# All that is assigned; Python calls unassigned addresses global, too.
_GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")
# Addresses that stand for IPv4 addresses, and addresses of protocols and of a cloud's metadata.
_NEVER = tuple(map(ipaddress.ip_network, ("2002::/16", "2001::/32", "192.0.0.0/24", "168.63.129.16/32")))
_DIGEST_BYTES = 16

# Pillow warns of odd files in texts that clients choose: Python would write each of them to the log, and keep it.
warnings.filterwarnings("ignore", module=r"PIL\.")

Made = TypeVar("Made")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def check_images(
    prompts: Sequence[Prompt], model: str, config: GatewayConfig, *, sees: bool, hint: str = ""
) -> None:
    """Check what can be checked without reading an image. `sees`: the model takes images; `hint`: how it could."""
    parts = [part for prompt in prompts for part in image_parts(prompt) if sees or not part.stand_in]
    if not parts:
        return
    if not sees:
        raise InvalidRequest(
            f"The model {quoted(model)} takes text only, and the request has an image.",
            param=parts[0].param,
            hint=hint or "Send the image to a vision-language model.",
        )
    if len(parts) > config.max_images:
        raise InvalidRequest(
            f"The request has {len(parts)} images, and at most {config.max_images} are allowed.",
            param=parts[config.max_images].param,
        )
    for part in parts:
        if part.url.startswith("data:") and len(part.url) * 3 // 4 > config.max_image_bytes + 1024:
            raise _too_large(part, config.max_image_bytes)


class ImageLoader:
    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.files: FileStore | None = None  # set where there is a store
        self._fetcher = ImageFetcher(config)
        self._threads: ThreadPoolExecutor | None = None
        self._slots = FairSlots(_MAX_THREADS)

    async def load_request(self, request: GenerationRequest, held: Holding) -> GenerationRequest:
        """Return the request with all of its images loaded."""
        return await self._each_prompt(request, held, self.load)

    async def relay_request(self, request: GenerationRequest, model: str, held: Holding) -> GenerationRequest:
        """Return the request for an external server, which fetches URLs by itself: URLs are checked, and uploaded
        files become data URLs. Raises InvalidRequest that names the image's place."""
        if are_texts(request.prompts):
            return request
        check_images(request.prompts, model, self._config, sees=True)
        return await self._each_prompt(request, held, self._relay)

    async def _each_prompt(
        self,
        request: GenerationRequest,
        held: Holding,
        change: Callable[[Prompt, str, Holding], Awaitable[Prompt]],
    ) -> GenerationRequest:
        if not any(image_parts(prompt) for prompt in request.prompts):
            return request
        workspace_id = request.principal.workspace_id
        prompts = [await change(prompt, workspace_id, held) for prompt in request.prompts]
        return msgspec.structs.replace(request, prompts=tuple(prompts))

    async def load(self, prompt: Prompt, workspace_id: str, held: Holding) -> Prompt:
        """Return the prompt with all of its images loaded. Raises InvalidRequest that names the image's place, and
        RateLimited where the workspace holds too many bytes of files."""
        parts = [part for part in image_parts(prompt) if part.loaded is None]
        loaded: dict[int, ImagePart] = {}
        for part in parts:
            data = await self._read(part, workspace_id, held)
            image = await self._in_thread(partial(checked_image, part, data, self._config, workspace_id))
            loaded[id(part)] = msgspec.structs.replace(part, loaded=image)
        return with_parts(prompt, lambda part: loaded.get(id(part), part))

    async def _relay(self, prompt: Prompt, workspace_id: str, held: Holding) -> Prompt:
        inlined: dict[int, ImagePart] = {}
        for part in image_parts(prompt):
            if part.file_id:
                data = await self._read(part, workspace_id, held)
                url = f"data:{_media_type(data)};base64,{base64.b64encode(data).decode()}"
                held.take(len(url))
                inlined[id(part)] = msgspec.structs.replace(part, url=url, file_id="")
            elif not part.url.startswith("data:"):
                await self._fetcher.check(part)
        return with_parts(prompt, lambda part: inlined.get(id(part), part))

    async def _read(self, part: ImagePart, workspace_id: str, held: Holding) -> bytes:
        if part.file_id:
            return await self._read_file(part, workspace_id, held)
        if part.url.startswith("data:"):
            return await self._in_thread(lambda: decode_data_url(part))
        unused = self._config.max_image_bytes
        held.take(unused)
        try:
            data = await self._fetcher.fetch(part)
            unused -= len(data)
        finally:
            held.release(unused)
        return data

    async def _read_file(self, part: ImagePart, workspace_id: str, held: Holding) -> bytes:
        if self.files is None:
            raise InvalidRequest("This server stores no files.", param=part.param)
        file = await self.files.get(workspace_id, part.file_id)
        if file.num_bytes > self._config.max_image_bytes:
            raise _too_large(part, self._config.max_image_bytes)
        held.take(file.num_bytes)
        blobs = self.files.blobs

        def read() -> bytes:
            with blobs.open(file.id) as opened:
                return opened.read()

        try:
            return await self._in_thread(read)
        except OSError as error:
            raise InvalidRequest(f"The file {quoted(part.file_id)} is gone.", param=part.param) from error

    async def _in_thread(self, work: Callable[[], Made]) -> Made:
        """Run work on threads of its own, which workspaces share: decoding must not keep tokenizers waiting."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="image")
        return await self._slots.in_thread(self._threads, work)


def _media_type(data: bytes) -> str:
    starts = {b"\x89PNG": "image/png", b"GIF8": "image/gif", b"RIFF": "image/webp"}
    return starts.get(data[:4], "image/jpeg")


def decode_data_url(part: ImagePart) -> bytes:
    head, comma, body = part.url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InvalidRequest(
            "An image in a data URL must be encoded as base64: data:image/png;base64,….", param=part.param
        )
    text = "".join(body.split()).rstrip("=")  # as browsers read it: lines may be broken, and padding left out
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"The base64 text of an image is damaged: {error}.", param=part.param) from error


def checked_image(
    part: ImagePart, data: bytes, config: GatewayConfig, workspace_id: str = "default"
) -> LoadedImage:
    """Check one image. The size comes from the header, before any pixel is decoded. Digests of different workspaces
    differ, because engines keep encoded images by their digest. Otherwise a workspace could detect the images of
    others by the time of an answer."""
    if len(data) > config.max_image_bytes:
        raise _too_large(part, config.max_image_bytes)
    if not data:
        raise InvalidRequest("An image is empty.", param=part.param)
    if has_too_many_parts(data):
        raise InvalidRequest(
            "An image's file consists of too many parts.",
            param=part.param,
            hint="Save the image again with another program.",
        )
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise PenstockError(
            "This server lacks Pillow, which reads images.", hint="pip install pillow"
        ) from error
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > config.max_image_pixels:
                raise InvalidRequest(
                    f"An image has {width} × {height} pixels, and at most {config.max_image_pixels:,} are allowed.",
                    param=part.param,
                )
            if max(width, height) > _MAX_SIDE:
                raise InvalidRequest(
                    f"An image has {width} × {height} pixels, and at most {_MAX_SIDE:,} are allowed in a line.",
                    param=part.param,
                )
            image.load()
            if image.getexif().get(_ORIENTATION_TAG) in _LYING_ORIENTATIONS:
                width, height = height, width
    except InvalidRequest:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit comes before any size can be read
        limit = min(config.max_image_pixels, 2 * (Image.MAX_IMAGE_PIXELS or config.max_image_pixels))
        raise InvalidRequest(
            f"An image has more than the {limit:,} pixels that are allowed.", param=part.param
        ) from error
    except UnidentifiedImageError as error:
        raise InvalidRequest(
            "An image is in no format that this server reads, which are PNG, JPEG, WebP and GIF.",
            param=part.param,
        ) from error
    except Exception as error:  # decoders raise whatever a damaged file leads to
        raise InvalidRequest(f"An image is damaged: {error}.", param=part.param) from error
    salt = hashlib.blake2b(workspace_id.encode(), digest_size=_DIGEST_BYTES).digest()
    digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=b"image", key=salt).digest()
    return LoadedImage(data, digest, width, height)


def _too_large(part: ImagePart, limit: int) -> InvalidRequest:
    return InvalidRequest(f"An image has more than the {limit:,} bytes that are allowed.", param=part.param)


class ImageFetcher:
    def __init__(self, config: GatewayConfig) -> None:
        self._max_bytes = config.max_image_bytes
        self._timeout_s = config.image_fetch_timeout_s
        self._hosts = [host.lower() for host in config.allowed_image_hosts]
        if self._hosts:
            import_module("httpx")  # now: all requests would wait for it while the first image is fetched
        self._networks = [network for host in self._hosts if (network := _network(host)) is not None]
        self._resolvers: ThreadPoolExecutor | None = None
        self._lookups = FairSlots(_MAX_THREADS, most_each=_MAX_THREADS // 2)

    async def fetch(self, part: ImagePart) -> bytes:
        return await self._in_time(part, self._fetch(part))

    async def check(self, part: ImagePart) -> None:
        """Check a URL that another server will fetch."""
        await self._in_time(part, self._checked(part.url, part))

    async def _in_time(self, part: ImagePart, work: Awaitable[Made]) -> Made:
        import httpx

        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError as error:
            raise _unfetched(part, f"took longer than {self._timeout_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise _unfetched(part, "could not be fetched") from error

    async def _fetch(self, part: ImagePart) -> bytes:
        url = part.url
        first_host: str | None = None
        for _ in range(_MAX_REDIRECTS + 1):
            host, address = await self._checked(url, part)
            if first_host is not None and host != first_host:
                raise _unfetched(part, "is redirected to another host")
            first_host = host
            answer = await self._get(url, host, address, part)
            if isinstance(answer, bytes):
                return answer
            try:
                url = urljoin(url, answer)
            except ValueError as error:
                raise _unfetched(part, "is redirected to an address that is not valid") from error
        raise _unfetched(part, "is redirected too often")

    async def _checked(self, url: str, part: ImagePart) -> tuple[str, Address]:
        """Return the host of a URL, and an address of it that may be connected to."""
        try:
            parsed = urlsplit(url)
            host, port = (parsed.hostname or "").lower(), parsed.port
        except ValueError as error:
            raise InvalidRequest("The URL of an image is not valid.", param=part.param) from error
        if parsed.scheme not in ("http", "https") or not host:
            raise InvalidRequest(
                "The URL of an image must begin with data:, http: or https:.", param=part.param
            )
        if parsed.username is not None or parsed.password is not None:
            raise InvalidRequest("The URL of an image must not hold a password.", param=part.param)
        if not self._allows(host):
            raise InvalidRequest(
                f"Images from {quoted(host)} may not be fetched by this server.",
                param=part.param,
                hint="Send the image itself in a data URL, or ask the operator for --allowed-image-hosts.",
            )
        port = port or (443 if parsed.scheme == "https" else 80)
        found = await self._resolve(host, port)
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        if not addresses or not all(map(self._may_connect, addresses)):
            raise _unfetched(part, "leads into an internal network")
        return host, addresses[0]

    async def _resolve(self, host: str, port: int) -> list[Any]:
        """Look up a name on threads of its own: with wildcards a client names the server that answers, or does not,
        and nothing else may wait for that server, nor other workspaces' lookups. A lookup that has not begun is
        dropped with its request."""
        if self._resolvers is None:
            self._resolvers = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="image-names")
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        return await self._lookups.in_thread(self._resolvers, look_up)

    def _allows(self, host: str) -> bool:
        if (address := _address(host)) is not None:
            return any(address in network for network in self._networks)
        return any(
            allowed in ("*", host) or (allowed[:2] == "*." and host.endswith(allowed[1:]))
            for allowed in self._hosts
        )

    def _may_connect(self, address: Address) -> bool:
        if any(address in network for network in self._networks):
            return True
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if any(address in network for network in _NEVER):
            return False
        if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_IPV6:
            return False
        return address.is_global and not address.is_multicast

    async def _get(self, url: str, host: str, address: Address, part: ImagePart) -> bytes | str:
        """Return the contents of a URL, or the URL that it redirects to."""
        import httpx

        target = httpx.URL(url)
        request_url = target.copy_with(host=str(address))
        headers = {"Host": target.netloc.decode(), "Accept": "image/*", "Accept-Encoding": "identity"}
        extensions = {"sni_hostname": host}
        async with (
            httpx.AsyncClient(trust_env=False, timeout=self._timeout_s) as client,
            client.stream("GET", request_url, headers=headers, extensions=extensions) as answer,
        ):
            if answer.has_redirect_location:
                return answer.headers["location"]
            if answer.status_code != httpx.codes.OK:
                raise _unfetched(part, f"was answered with status {answer.status_code}")
            media_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media_type not in _MEDIA_TYPES:
                raise _unfetched(
                    part, f"is of type {media_type[:80]!r}, which is no image that this server reads"
                )
            return await self._body(answer, part)

    async def _body(self, answer: httpx.Response, part: ImagePart) -> bytes:
        data = bytearray()
        async for piece in answer.aiter_raw():
            data += piece
            if len(data) > self._max_bytes:
                raise _too_large(part, self._max_bytes)
        return bytes(data)


def _unfetched(part: ImagePart, reason: str) -> InvalidRequest:
    return InvalidRequest(f"The image at {part.url[:200]!r} {reason}.", param=part.param)


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None
