"""One small tree of errors. A class's docstring is its default message; `code` is stable and public."""

from __future__ import annotations

from typing import ClassVar


class LingbotError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "internal_error"
    hint: ClassVar[str] = "This is a fault of the platform; its log has more under the request id."

    def __init__(self, message: str | None = None, *, hint: str | None = None) -> None:
        self.message = message or (type(self).__doc__ or "").strip().splitlines()[0]
        self.advice = hint or self.hint
        super().__init__(self.message)


class ConfigurationError(LingbotError):
    """A setting is missing or wrong."""

    code = "bad_configuration"
    hint = "Mend the setting that is named, then start again."


class Unavailable(LingbotError):
    """A part of the platform cannot be reached right now."""

    code = "unavailable"
    hint = "Nothing was started. Try again after the time in Retry-After."


class BrokerUnavailable(Unavailable):
    """The message broker did not confirm in time."""

    code = "broker_unavailable"


class Unroutable(Unavailable):
    """No queue takes jobs for this model and lane in this region."""

    code = "no_queue"


class QueueFull(Unavailable):
    """The queue for this model and lane is full."""

    code = "queue_full"


class StoreUnavailable(Unavailable):
    """The job store did not answer in time."""

    code = "store_unavailable"


class UnknownModel(LingbotError):
    """There is no such model."""

    code = "unknown_model"
    hint = "GET /v1/models lists what is served here."


class UnsupportedModel(LingbotError):
    """This model cannot do what was asked."""

    code = "unsupported_model"
    hint = "Choose a model of the right kind; GET /v1/models names each one's kind."


class PromptRejected(LingbotError):
    """The prompt cannot be rendered for this model."""

    code = "bad_prompt"
    hint = "Check the roles and the order of the messages."


class JobNotFound(LingbotError):
    """There is no such job, or it is not yours."""

    code = "job_not_found"
    hint = "Job ids are kept for the retention time after the job's last change."


class StreamGone(LingbotError):
    """The stream no longer holds what was asked for."""

    code = "stream_gone"
    hint = "GET the job for its final state, or read from the position given here."


class StreamGap(LingbotError):
    """The stream has a gap: text between two positions is missing."""

    code = "stream_gap"
    hint = "Read the stream again from position 0."


class SealBroken(LingbotError):
    """A sealed message does not open: it was changed, or moved to another job."""

    code = "seal_broken"


class UnknownSealKey(LingbotError):
    """A sealed message names a key this process does not hold."""

    code = "unknown_seal_key"
    hint = "Give this process the master key with that id (seal_keys)."


class NewerRequest(LingbotError):
    """The job asks for what this version does not know: a newer one took it."""

    code = "newer_request"
    hint = "Upgrade the workers before whatever submits, and go back in the opposite order."


class EngineFailed(LingbotError):
    """The engine failed while it ran this job."""

    code = "engine_failed"
