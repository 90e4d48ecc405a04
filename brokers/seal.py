"""Sealing of specs: what a job asks for is readable in no queue, no record, no log.

A sealed spec is   1 byte version | 1 byte length of kid | kid | 12 bytes nonce | AES-256-GCM ciphertext and tag
with a key of its own per job, HKDF-SHA256(master[kid], info=job id), so that random nonces never meet, and with kid,
job, tenant, home, lane, kind and publish generation as associated data: moved to another job, it does not open.
A sealed webhook has the word webhook in the place of the last three.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from brokers.errors import ConfigurationError, NewerRequest, SealBroken, UnknownSealKey
from brokers.job import Job, Spec, Webhook
from brokers.settings import Settings

_VERSION = 1
_NONCE = 12
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Spec)
_webhook_decoder = msgspec.msgpack.Decoder(Webhook)

_WEBHOOK = ("webhook",)


class Sealer:
    """Seals with the newest master key, opens with any it holds."""

    def __init__(self, settings: Settings) -> None:
        self._masters = {kid: _master(kid, key.get_secret_value()) for kid, key in settings.seal_keys.items()}
        if not self._masters:
            raise ConfigurationError("seal_keys is empty: give at least one key id with 32 bytes in base64")
        self._newest = list(self._masters)[-1]

    def seal(self, job: Job, spec: Spec) -> bytes:
        return self._seal(job, _encoder.encode(spec), _message(job))

    def open(self, job: Job, sealed: bytes) -> Spec:
        """Its spec. Raises UnknownSealKey (hold the message: a key is missing here), SealBroken, NewerRequest."""
        plain = self._open(job, sealed, _message(job))
        try:
            return _decoder.decode(plain)
        except msgspec.ValidationError:
            raise NewerRequest from None

    def seal_webhook(self, job: Job, webhook: Webhook) -> bytes:
        return self._seal(job, _encoder.encode(webhook), _WEBHOOK)

    def open_webhook(self, job: Job, sealed: bytes) -> Webhook:
        """Raises UnknownSealKey or SealBroken."""
        return _webhook_decoder.decode(self._open(job, sealed, _WEBHOOK))

    def reseal(self, job: Job, sealed: bytes, gen: int) -> bytes:
        """What is sealed for the job's generation, for generation `gen` instead. It is not read, so that a version that
        does not know all of its fields loses none. Raises UnknownSealKey or SealBroken."""
        then = msgspec.structs.replace(job, gen=gen)
        return self._seal(then, self._open(job, sealed, _message(job)), _message(then))

    def _seal(self, job: Job, plain: bytes, use: tuple[str, ...]) -> bytes:
        nonce = os.urandom(_NONCE)
        kid = self._newest.encode()
        box = self._cipher(self._newest, job).encrypt(nonce, plain, _bound(kid, job, use))
        return bytes((_VERSION, len(kid))) + kid + nonce + box

    def _open(self, job: Job, sealed: bytes, use: tuple[str, ...]) -> bytes:
        kid, nonce, box = _split(sealed)
        try:
            return self._cipher(kid.decode(), job).decrypt(nonce, box, _bound(kid, job, use))
        except InvalidTag:
            raise SealBroken from None

    def _cipher(self, kid: str, job: Job) -> AESGCM:
        try:
            master = self._masters[kid]
        except KeyError:
            raise UnknownSealKey(f"no seal key with id {kid!r} is configured here") from None
        # HKDF's expand (RFC 5869), whose first 32 bytes are one HMAC; the masters are uniformly random already, which
        # is what its extract would make them.
        return AESGCM(hmac.digest(master, job.id.encode() + b"\x01", "sha256"))


def first_generation(job: Job) -> Job:
    """The job as it was when its record was sealed."""
    return job if job.gen == 1 else msgspec.structs.replace(job, gen=1)


def _message(job: Job) -> tuple[str, ...]:
    return (job.lane, job.kind, str(job.gen))


def _bound(kid: bytes, job: Job, use: tuple[str, ...]) -> bytes:
    words = (job.id, job.tenant, job.home, *use)
    return b"\0".join((kid, *(word.encode() for word in words)))


def _split(sealed: bytes) -> tuple[bytes, bytes, bytes]:
    if len(sealed) < 2 + _NONCE or sealed[0] != _VERSION:
        raise SealBroken
    end = 2 + sealed[1]
    return sealed[2:end], sealed[end : end + _NONCE], sealed[end + _NONCE :]


def _master(kid: str, text: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != 32 or not 1 <= len(kid.encode()) <= 64:
        raise ConfigurationError(f"seal_keys.{kid} must be 32 bytes in base64 under a key id of at most 64 bytes")
    return key
