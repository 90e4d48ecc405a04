"""The reference: FastAPI, a pydantic model, and Celery's `apply_async` with publisher confirms on a quorum queue.

uvicorn tests.benchmarks.usual_way:app
"""

from __future__ import annotations

from celery import Celery
from fastapi import FastAPI
from kombu import Queue  # type: ignore[attr-defined]
from pydantic import BaseModel

from brokers.settings import load

QUEUE = "usual-way"

celery = Celery("usual", broker=load().here.amqp.get_secret_value())
celery.conf.update(
    broker_transport_options={"confirm_publish": True},
    task_queues=[Queue(QUEUE, queue_arguments={"x-queue-type": "quorum"}, durable=True)],  # type: ignore[no-untyped-call]
    task_default_queue=QUEUE,
    task_ignore_result=True,
    broker_pool_limit=64,
)


@celery.task(name="usual.generate")  # type: ignore[untyped-decorator]
def generate(**request: object) -> None:
    """Never run here: what is measured is getting it into the queue."""


class Submission(BaseModel):
    model: str
    prompt: str
    max_tokens: int = 256
    temperature: float = 1.0


app = FastAPI()


@app.post("/jobs", status_code=202)
def submit(submission: Submission) -> dict[str, str]:
    result = generate.apply_async(kwargs=submission.model_dump())
    return {"id": result.id, "status": "queued"}
