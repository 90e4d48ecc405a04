"""What the door takes, beyond what settings say: sizes and times that no operator needs to move."""

from __future__ import annotations

BODY_DEADLINE_S = 10.0  # a client that trickles its body holds a connection this long at most
STATUS_DEADLINE_S = 5.0  # RabbitMQ's management answers slowly while it collects statistics

DEFAULT_MAX_TOKENS = 256  # when the request names none and the context has room
INLINE_CHARS = 4096  # longer prompts are tokenized in a thread (about 0.2 ms of event loop at this length)

CHOICES = 8  # `n`
PROMPTS = 16  # in one completion request
SEQUENCES = 32  # prompts x n
INPUTS = 2048  # of one embedding request; OpenAI's own limit, as is the next
INPUT_TOKENS = 300_000  # all of them together
STOPS = 16
STOP_CHARS = 256
BIASES = 1024  # tokens in `logit_bias`
TOP_LOGPROBS = 20  # OpenAI's own limit
SCHEMA_BYTES = 32_768

OPENAI_EXPIRES_S = 600  # a waiting caller is gone by then: the openai client's own timeout

REPLAY_S = 2.0  # reading an ended job's text back
RETRY_MS = 1000  # how soon an SSE client reconnects
FIRST_LOOK_S = 0.25  # an events route waits this long for the stream to be found gone, then answers 200

PAGE = 20
PAGE_MOST = 100
SCAN_MOST = 1000  # records one filtered listing looks at
