"""`python -m producers`: the API behind uvicorn, as settings say."""

from __future__ import annotations

import uvicorn

from brokers import logs
from brokers.settings import load
from producers.heads import BoundedHeads

_BACKLOG = 2048
_GRACE_S = 5  # open streams are told to end at once; this is for answers being written


def main() -> None:
    settings = load()
    logs.configure(settings)
    uvicorn.run(
        "producers.app:app",
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=BoundedHeads,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here depends on the client's address
        backlog=_BACKLOG,
        log_config=None,  # ours
        timeout_graceful_shutdown=_GRACE_S,
    )


if __name__ == "__main__":
    main()
