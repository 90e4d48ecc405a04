"""What every engine refuses in the same way: the request ends alone, at once, with a code that is the same for all."""

from __future__ import annotations

import math

from workers.engine.protocol import Capabilities, Output, Request

UNSUPPORTED = "unsupported_by_engine"


def refused(request: Request, can: Capabilities, *, live: bool) -> Output | None:
    """Its end when it cannot be run. `live`: another sequence has its id."""
    if live:
        return failed(request.seq, "duplicate_sequence", "a live sequence has this id")
    fault = _fault(request, can)
    return failed(request.seq, *fault) if fault else None


def _fault(request: Request, can: Capabilities) -> tuple[str, str] | None:
    """Code and message."""
    if not request.prompt:
        return "empty_prompt", "the prompt has no tokens"
    if not 0 < request.weight < math.inf or (request.sampling.logprobs or 0) < 0:
        return "bad_parameter", "weight must be above 0, and logprobs not below it"
    vocab = range(can.vocab_size)
    named = (*request.sampling.logit_bias, *request.sampling.stop_token_ids)
    if not all(token in vocab for token in (*request.prompt, *request.output, *named)):
        return "bad_token", f"a token id is not in 0..{len(vocab) - 1}"
    if len(request.prompt) >= can.max_context:
        return "context_exceeded", f"the prompt fills all {can.max_context} tokens"
    if request.sampling.json_schema is not None and not can.json_schema:
        return UNSUPPORTED, "this engine cannot hold a text to a JSON schema"
    return None


def already_over(request: Request, can: Capabilities) -> Output | None:
    """What was taken over may have ended on its last token, without anyone having said so."""
    full = len(request.prompt) + len(request.output) >= can.max_context
    over = full or len(request.output) >= request.sampling.max_tokens
    return Output(request.seq, finish="length") if over else None


def failed(seq: str, code: str, message: str) -> Output:
    return Output(seq, finish="error", error_code=code, error=message)
