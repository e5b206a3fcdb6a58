"""A registry in the API server of Kubernetes, for fleets that need no Redis to find each other. It consists of Lease
objects, so one right, to use Leases, is all that a fleet needs:

    FLEET-leader            the lease of the leader; its leaseTransitions are the epoch
    FLEET-documents-N       a part of the documents of the leader, as annotations; its leaseTransitions are the epoch
                            whose leader may write them
    FLEET-host-HASH         the record of a host, as an annotation, with the lease of that host

No write of the API server covers two objects. So a new leader raises the epoch of every part of the documents before
it begins. An earlier leader then has read a part that has changed since, and its write is refused, however late it
comes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import time
import zlib
from datetime import UTC, datetime
from math import ceil
from typing import Any, NamedTuple

from penstock.cluster import registry
from penstock.cluster.kubernetes_leases import Lease, LeaseCache, Leases, ObservedLease, now_text
from penstock.cluster.registry import RegistryError

NUM_PARTS = 16  # of the documents; the annotations of one object may have 256 KiB together
HOSTS_SILENCE_S = 3.0  # hosts renew their records as often: a silent watch may be a dead one
DOCUMENTS_SILENCE_S = 15.0
_TRIES = 5
_RECORD = "penstock/record"
_DOCUMENT = "penstock/document-"
_LARGEST_EPOCH = (1 << 31) - 1  # that leaseTransitions can hold


class Pod(NamedTuple):
    """The pod of this process. Kubernetes removes the record of a host with its pod."""

    name: str
    uid: str


class KubernetesRegistry:
    """Implements `registry.Registry`. `pod` must be in the namespace of the leases: Kubernetes removes objects whose
    owner it cannot find there."""

    def __init__(self, leases: Leases, pod: Pod | None = None) -> None:
        self._leases = leases
        self._pod = pod
        self._changed = asyncio.Event()
        self._hosts = LeaseCache(leases, "host", HOSTS_SILENCE_S, self._tell)
        self._documents = LeaseCache(leases, "documents", DOCUMENTS_SILENCE_S, self._tell)
        self._parts: dict[str, Lease] = {}  # of the documents, as this leader left them
        self._leader = f"{leases.fleet}-leader"
        self._leader_seen: ObservedLease | None = None  # while another candidate leads
        self._held_until_s = 0.0
        self._fenced_epoch = 0  # to which this process has raised all parts of the documents

    async def publish(self, name: str, record: bytes, lease_s: float) -> None:
        object_name = f"{self._leases.fleet}-host-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        spec = {"holderIdentity": name, "leaseDurationSeconds": ceil(lease_s), "renewTime": now_text()}
        metadata: dict[str, Any] = {"annotations": {_RECORD: base64.b64encode(record).decode()}}
        body = {"metadata": metadata, "spec": spec}
        if await self._leases.change(object_name, body) == "gone":
            await self._remove_forgotten()
            if self._pod is not None:
                owner = {"apiVersion": "v1", "kind": "Pod", "name": self._pod.name, "uid": self._pod.uid}
                metadata["ownerReferences"] = [owner]
            await self._leases.create(object_name, "host", body)
        self._hosts.outdate()

    async def records(self) -> dict[str, bytes]:
        seen = await self._hosts.read()
        heard_s = self._hosts.heard_s
        return {
            each.lease.spec.holder_identity or "": _bytes_in(each.lease, _RECORD)
            for each in seen.values()
            if heard_s - each.since_s < _duration_s(each.lease) and _RECORD in each.lease.metadata.annotations
        }

    async def lead(self, candidate: str, lease_s: float, above: int) -> int | None:
        for _ in range(_TRIES):
            asked_s = time.monotonic()
            lease = await self._leases.get(self._leader)
            holder = None if lease is None else lease.spec.holder_identity
            if lease is not None and holder not in (None, candidate) and self._is_held(lease, asked_s):
                return None
            epoch = 0 if lease is None else lease.epoch
            if holder != candidate or asked_s >= self._held_until_s:  # a new lease, and none that is renewed
                epoch = max(epoch, above) + 1
            if epoch > _LARGEST_EPOCH:
                raise RegistryError(f"the Lease {self._leader} cannot hold the epoch {epoch}")
            if await self._take(lease, candidate, epoch, lease_s):
                self._held_until_s = asked_s + lease_s
                return epoch if await self._fence(epoch) else None
        return None

    def _is_held(self, lease: Lease, asked_s: float) -> bool:
        """Return whether the lease of another candidate has not ended: whether it was seen to change lately."""
        seen, version = self._leader_seen, lease.metadata.resource_version
        if seen is None or seen.lease.metadata.resource_version != version:
            self._leader_seen = ObservedLease(lease, time.monotonic())
            return True
        return asked_s - seen.since_s < _duration_s(lease)

    async def _take(self, lease: Lease | None, candidate: str, epoch: int, lease_s: float) -> bool:
        spec: dict[str, Any] = {
            "holderIdentity": candidate,
            "leaseDurationSeconds": ceil(lease_s),
            "leaseTransitions": epoch,
            "renewTime": now_text(),
        }
        if lease is None or lease.epoch != epoch:
            spec["acquireTime"] = spec["renewTime"]
        if lease is None:
            return await self._leases.create(self._leader, "leader", {"spec": spec}) is not None
        return isinstance(await self._leases.change(self._leader, _if_unchanged(lease, spec=spec)), Lease)

    async def _fence(self, epoch: int) -> bool:
        """Let the leader of this epoch, and no earlier one, write documents. Returns False if a later one may."""
        if self._fenced_epoch == epoch:
            return True
        found = {lease.metadata.name: lease for lease in (await self._leases.all("documents"))[0]}
        names = [self._part(number) for number in range(NUM_PARTS)]
        parts = await asyncio.gather(*(self._fence_part(name, found.get(name), epoch) for name in names))
        kept = {part.metadata.name: part for part in parts if part is not None}
        if len(kept) < NUM_PARTS:
            return False
        self._parts, self._fenced_epoch = kept, epoch
        self._documents.outdate()
        return True

    async def _fence_part(self, name: str, part: Lease | None, epoch: int) -> Lease | None:
        spec = {"leaseTransitions": epoch}
        for _ in range(_TRIES):
            if part is None:
                part = await self._leases.create(name, "documents", {"spec": spec})
                if part is not None:
                    return part
            elif part.epoch > epoch:
                return None
            else:
                changed = await self._leases.change(name, _if_unchanged(part, spec=spec))
                if isinstance(changed, Lease):
                    return changed
            part = await self._leases.get(name)
        raise RegistryError(f"the Lease {name} changes all the time")

    async def resign(self, candidate: str) -> None:
        self._held_until_s = 0.0
        for _ in range(_TRIES):
            lease = await self._leases.get(self._leader)
            if lease is None or lease.spec.holder_identity != candidate:
                return
            spec = {"holderIdentity": None, "renewTime": now_text()}
            if await self._leases.change(self._leader, _if_unchanged(lease, spec=spec)) != "changed":
                return

    async def write(self, name: str, document: bytes | None, epoch: int) -> bool:
        part_name = self._part(zlib.crc32(name.encode()) % NUM_PARTS)
        key = _DOCUMENT + hashlib.sha256(name.encode()).hexdigest()[:32]
        value = None if document is None else f"{name}\n{base64.b64encode(document).decode()}"
        for _ in range(_TRIES):
            part = self._parts.pop(part_name, None) or await self._leases.get(part_name)
            if part is None or part.epoch < epoch:  # the object was removed, or an old one was restored
                leader = await self._leases.get(self._leader)
                self._fenced_epoch = 0
                if leader is None or leader.epoch != epoch or not await self._fence(epoch):
                    return False
                continue
            if part.epoch != epoch:
                return False
            changed = await self._leases.change(part_name, _if_unchanged(part, annotations={key: value}))
            if isinstance(changed, Lease):
                self._parts[part_name] = changed
                self._documents.outdate()
                return True
        raise RegistryError(f"the Lease {part_name} changes all the time")

    async def documents(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for each in (await self._documents.read()).values():
            for key in each.lease.metadata.annotations:
                if key.startswith(_DOCUMENT):
                    name, _, _ = each.lease.metadata.annotations[key].partition("\n")
                    found[name] = _bytes_in(each.lease, key)
        return found

    async def wait_for_change(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def close(self) -> None:
        await self._hosts.close()
        await self._documents.close()
        await self._leases.close()

    async def _remove_forgotten(self) -> None:
        """Remove the records that were not renewed for long: a pod continues when its process is started again, with
        another name."""
        now = datetime.now(UTC)
        for lease in (await self._leases.all("host"))[0]:
            if _age_s(lease, now) > registry.LONGEST_LEASE_S:
                await self._leases.remove(lease)

    def _part(self, number: int) -> str:
        return f"{self._leases.fleet}-documents-{number}"

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _if_unchanged(lease: Lease, **changes: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a change that is refused if the object is no longer as it was read."""
    metadata: dict[str, Any] = {"resourceVersion": lease.metadata.resource_version}
    if "annotations" in changes:
        metadata["annotations"] = changes.pop("annotations")
    return {"metadata": metadata, **changes}


def _duration_s(lease: Lease) -> float:
    return min(float(lease.spec.lease_duration_seconds or 0), registry.LONGEST_LEASE_S)


def _age_s(lease: Lease, now: datetime) -> float:
    """Return the time since a lease was renewed, by the clock of its holder; 0 if that is not known."""
    try:
        return (now - datetime.fromisoformat(lease.spec.renew_time or "")).total_seconds()
    except (ValueError, TypeError):
        return 0.0


def _bytes_in(lease: Lease, key: str) -> bytes:
    """Return what an annotation holds. If the text is no base64, no fleet wrote it, and b"" is never accepted."""
    try:
        return base64.b64decode(lease.metadata.annotations[key].rpartition("\n")[2], validate=True)
    except (binascii.Error, ValueError):
        return b""
