"""vLLM's own words: our options and requests put into its arguments and parameters. Nothing is ignored in silence."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import lru_cache
from hashlib import blake2b
from importlib.metadata import entry_points
from pathlib import Path
from struct import pack
from typing import TYPE_CHECKING, Any

import msgspec

from workers.engine import lifeline
from workers.engine.protocol import Request, SamplingParams
from workers.engine.wire import EngineOptions

if TYPE_CHECKING:
    import vllm

_BLOCK = 32  # tokens in a block of KV; its CPU kernels want a multiple of it
_PLUGINS = "vllm.general_plugins"
_OBEYED = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "stop",  # by text.py
        "ignore_eos",
        "logit_bias",
        "stop_token_ids",
        "logprobs",
    }
)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The card's `options` for a model whose card names this engine."""

    eager: bool | None = None  # no torch.compile and no CUDA graphs; None is eager on the CPU, where compiling is slow
    step_tokens: int = 0  # prompt and output tokens in one step; 0 is 512 on the CPU and 2048 elsewhere
    tensor_parallel: int = 1  # GPUs that share the model
    quantization: str | None = None  # what the weights do not say themselves


def prepare_environment(options: EngineOptions) -> None:
    """What vLLM reads from the environment, here and in its processes. To be called before it is imported.

    Raises ValueError when its processes would outlive this one.
    """
    if not any(point.name == "lingbot" for point in entry_points(group=_PLUGINS)):
        raise ValueError(f"this installation of lingbot declares no {_PLUGINS}: install it again (pip install -e .)")
    kind, _, index = options.device.partition(":")
    if kind == "cuda" and index:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(index)] if visible else index
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # else it binds to cores that others may be busy on
        VLLM_WORKER_MULTIPROC_METHOD="spawn",  # there are threads here already
        VLLM_COMPUTE_NANS_IN_LOGITS="1",  # they are told by the sequence; else it draws token 0 from them
        VLLM_NO_USAGE_STATS="1",
        VLLM_DO_NOT_TRACK="1",
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads or 1))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    lifeline.let_children_die_with_us()


def engine_args(folder: Path, max_context: int, options: EngineOptions, own: Options) -> Any:
    """vLLM's AsyncEngineArgs. Raises ValueError when this build of vLLM is not for the device."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    from workers.engine import dtype

    kind = options.device.partition(":")[0]
    if current_platform.device_type != kind:
        raise ValueError(f"this vLLM is built for {current_platform.device_type or 'nothing here'}, not for {kind}")
    on_cpu = kind == "cpu"
    return AsyncEngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,  # it sees token ids only; text.py makes text of them
        generation_config="vllm",  # the model's own sampling defaults are applied at the door, or not at all
        trust_remote_code=False,
        dtype=dtype.chosen(options),
        max_model_len=context(max_context, options),
        max_num_seqs=options.slots,
        max_num_batched_tokens=max(own.step_tokens or (512 if on_cpu else 2048), options.slots),
        block_size=_BLOCK,
        # The blocks decide how much there is. The bytes only keep vLLM from taking 90 % of all memory instead.
        num_gpu_blocks_override=-(-options.kv_tokens // _BLOCK) + 1,  # it keeps one for itself
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=options.prefix_tokens > 0,
        scheduling_policy="priority",  # whose KV is taken when it runs out: the lowest and newest
        enforce_eager=on_cpu if own.eager is None else own.eager,
        tensor_parallel_size=own.tensor_parallel,
        quantization=own.quantization,
        logits_processors=[
            "workers.engine.vllm_penalties:ContinuedPenalties",
            "workers.engine.vllm_scrub:ScrubbedCache",
        ],
        disable_log_stats=True,  # its own loggers; ours is given to it
    )


def context(max_context: int, options: EngineOptions) -> int:
    """Prompt and output of one sequence, in tokens; alone it must fit into the cache."""
    return min(max_context, options.kv_tokens)


def unsupported(sampling: SamplingParams) -> list[str]:
    """What the request asks for and vLLM is not told of."""
    default = SamplingParams()
    names = [name for name in SamplingParams.__struct_fields__ if name not in _OBEYED]
    return [name for name in names if getattr(sampling, name) != getattr(default, name)]


def sampling_params(request: Request, max_context: int, eos_ids: frozenset[int]) -> vllm.SamplingParams:
    """vLLM's parameters, to go on after `request.output`, which it takes for a part of the prompt.

    Raises what vLLM raises for what it refuses.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    asked, done = request.sampling, len(request.output)
    # These count output only, and to vLLM what came before is prompt: ContinuedPenalties takes over.
    continued = done > 0 and bool(asked.presence_penalty or asked.frequency_penalty)
    penalties = asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty
    repetition, presence, frequency = (1.0, 0.0, 0.0) if continued else penalties
    return VllmParams(
        max_tokens=min(asked.max_tokens - done, max_context - len(request.prompt) - done),
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        min_p=asked.min_p,
        seed=_seed(request) if asked.temperature > 0 else None,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        extra_args={"lingbot": {"earlier": done, "penalties": penalties}} if continued else None,
        logit_bias=asked.logit_bias or None,
        logprobs=asked.logprobs,
        stop_token_ids=sorted(stop_ids(asked, eos_ids)),
        ignore_eos=True,  # the card's ids count, which are among the stop ids
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def stop_ids(asked: SamplingParams, eos_ids: Collection[int]) -> set[int]:
    """The tokens that end a sequence and are not shown."""
    return {*asked.stop_token_ids, *(() if asked.ignore_eos else eos_ids)}


def _seed(request: Request) -> int:
    """vLLM's generator begins anew with each sequence it is given, wherever that one stands. With the position in the
    seed, what goes on does not draw the same numbers a second time."""
    key = pack("<QQQ", request.sampling.seed % (1 << 64), request.choice, len(request.output))
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1


@lru_cache(maxsize=1)
def client_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request it refuses."""
    from vllm.exceptions import VLLMClientError

    return VLLMClientError, ValueError
