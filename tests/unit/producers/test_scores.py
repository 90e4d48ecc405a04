"""Log probabilities in JSON: numbers that JSON has, bytes that need not be whole characters."""

from __future__ import annotations

import math

import msgspec

from brokers.job import Scored
from brokers.spelling import Spelling
from producers.scores import Score, worded
from workers.weights.scripted import byte_tokenizer


def test_half_a_character_is_escaped_and_impossible_is_a_number() -> None:
    first, second = "é".encode()
    (shown,) = worded([Score(first, 0, Scored(-math.inf, ((second, -0.5), (65, -2.0))))], Spelling(byte_tokenizer()))
    assert msgspec.to_builtins(shown) == {
        "token": "\\xc3",
        "logprob": -9999.0,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "\\xa9", "logprob": -0.5, "bytes": [0xA9]},
            {"token": "A", "logprob": -2.0, "bytes": [65]},
        ],
    }


def test_token_ids_are_shown_where_they_are_wanted() -> None:
    (shown,) = worded([Score(65, 0, Scored(-1.0))], Spelling(byte_tokenizer()), with_ids=True)
    assert msgspec.to_builtins(shown) == {
        "token_id": 65,
        "token": "A",
        "logprob": -1.0,
        "bytes": [65],
        "top_logprobs": [],
    }
