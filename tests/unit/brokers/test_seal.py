"""The key of a job is HKDF's, as the contract says: another implementation must open what this one seals."""

from __future__ import annotations

import base64
import os

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from brokers.errors import NewerRequest
from brokers.job import Sampling, TextSpec
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


class _Tomorrow(Sampling, frozen=True, omit_defaults=True):
    """A later version's: it has learned to rhyme."""

    rhyme: bool = False


class _Spec(msgspec.Struct, frozen=True, omit_defaults=True, tag="text"):
    prompt_ids: tuple[int, ...]
    sampling: _Tomorrow = _Tomorrow()


def _sealer() -> Sealer:
    return Sealer(Settings(seal_keys={"k": base64.b64encode(os.urandom(32)).decode()}))  # type: ignore[dict-item]


def test_what_a_newer_version_asks_for_is_refused_and_never_ignored() -> None:
    sealer = _sealer()
    with pytest.raises(NewerRequest):
        sealer.open(job(), sealer.seal(job(), _Spec((1,), _Tomorrow(rhyme=True))))  # type: ignore[arg-type]


def test_a_newer_versions_request_that_asks_for_nothing_new_is_taken() -> None:
    sealer = _sealer()
    sealed = sealer.seal(job(), _Spec((1,), _Tomorrow(max_tokens=5)))  # type: ignore[arg-type]
    assert sealer.open(job(), sealed) == TextSpec((1,), Sampling(max_tokens=5))


def test_resealing_loses_nothing_of_what_it_does_not_know() -> None:
    sealer, spec = _sealer(), _Spec((1,), _Tomorrow(rhyme=True))
    sealed = sealer.reseal(job(), sealer.seal(job(), spec), gen=9)  # type: ignore[arg-type]
    later = msgspec.structs.replace(job(), gen=9)
    assert msgspec.msgpack.decode(sealer._open(later, sealed, ("batch", "text", "9")), type=_Spec) == spec
