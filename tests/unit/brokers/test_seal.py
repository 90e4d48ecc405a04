"""The key of a job is HKDF's, as the contract says: another implementation must open what this one seals."""

from __future__ import annotations

import base64
import os

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from brokers.job import TextSpec
from brokers.seal import Sealer
from brokers.settings import Settings
from tests.unit.brokers.test_envelope import job


def test_a_jobs_key_is_that_of_hkdf_expand() -> None:
    master = os.urandom(32)
    sealer = Sealer(Settings(seal_keys={"k": base64.b64encode(master).decode()}))  # type: ignore[dict-item]
    sealed = sealer.seal(job(), TextSpec(prompt_ids=(1, 2)))
    nonce, box = sealed[3:15], sealed[15:]
    bound = b"\0".join([b"k", *(word.encode() for word in (job().id, "acme", "eu", "batch", "text", "3"))])
    key = HKDFExpand(SHA256(), 32, job().id.encode()).derive(master)
    assert AESGCM(key).decrypt(nonce, box, bound)
