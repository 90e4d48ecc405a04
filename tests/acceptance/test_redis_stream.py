"""A job watched straight from its Redis stream, with nothing of ours but the documented format."""

from __future__ import annotations

import hashlib
import json
import struct

import httpx
import redis

from tests.platform import Platform


def submit(platform: Platform, **fields: object) -> dict[str, object]:
    body = {"model": platform.model, "prompt": "from redis", "max_tokens": 60, "ignore_eos": True, **fields}
    headers = {"Authorization": f"Bearer {platform.api_key}"}
    answer = httpx.post(f"{platform.base_url}/v1/jobs", json=body, headers=headers, timeout=5)
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def test_xread_sees_the_whole_text_by_the_documented_format(platform: Platform) -> None:
    job = submit(platform)
    stream = job["stream"]
    assert isinstance(stream, dict)
    url = platform.settings.here.redis.get_secret_value()
    text, pos, last = "", 0, f"{stream['after']}-0"
    with redis.Redis.from_url(url, socket_timeout=15, protocol=2) as client:
        while True:
            ((_, entries),) = client.xread({stream["key"]: last}, block=10_000)
            for entry_id, fields in entries:
                last = entry_id.decode()
                at, n = (int(part) for part in last.split("-"))
                if n:  # control
                    assert at == pos
                    if fields[b"k"] == b"end":
                        end = json.loads(fields[b"d"])
                        assert end["status"] == "succeeded"
                        assert end["usage"]["completion_tokens"] == pos == 60
                        assert end["digest"] == hashlib.sha256(text.encode()).hexdigest()[:16]
                        return
                    continue
                assert int(fields[b"p"]) == pos  # no gap
                ids = struct.unpack(f"<{len(fields[b'i']) // 4}I", fields[b"i"])
                assert len(ids) == at - pos
                text += fields[b"t"].decode()
                assert fields[b"h"].decode() == hashlib.sha256(text.encode()).hexdigest()[:16]
                pos = at


def test_no_prompt_is_readable_in_the_store_or_the_broker(platform: Platform) -> None:
    prompt = "thewordthatmustnotshow"
    job = submit(platform, prompt=prompt + " !slow@20", max_tokens=100)
    url = platform.settings.here.redis.get_secret_value()
    with redis.Redis.from_url(url, socket_timeout=15) as client:
        record = next(client.scan_iter(f"*:job:{job['id']}", count=1000))
        assert prompt.encode() not in b"".join(client.hvals(record))
