"""vLLM's AsyncLLM, asked directly, with its own defaults but for sizes and what a CPU needs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.benchmarks.engine.contender import Contender, Setup
from tests.benchmarks.engine.workload import Arrival, Trace

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_BLOCK = 32  # tokens; its CPU kernels want a multiple of it
_STEP_TOKENS = 512  # of prompts and outputs in one step, as many as transformers' batching gets


def load(setup: Setup) -> Vllm:
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # taskset has bound it
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_NO_USAGE_STATS="1",
        VLLM_DO_NOT_TRACK="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    return Vllm(setup)


class Vllm(Contender):
    def __init__(self, setup: Setup) -> None:
        self._loop = asyncio.new_event_loop()
        self._llm: AsyncLLM = self._loop.run_until_complete(_start(setup))
        self._runs = 0

    def serve(self, arrivals: Sequence[Arrival]) -> list[Trace]:
        return self._loop.run_until_complete(self._serve(arrivals))

    def close(self) -> None:
        self._llm.shutdown()
        del self._llm

    async def _serve(self, arrivals: Sequence[Arrival]) -> list[Trace]:
        self._runs += 1
        start = time.perf_counter()
        ways = (self._one(arrival, f"{self._runs}-{number}", start) for number, arrival in enumerate(arrivals))
        return list(await asyncio.gather(*ways))

    async def _one(self, arrival: Arrival, name: str, start: float) -> Trace:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        await asyncio.sleep(max(0.0, start + arrival.after_s - time.perf_counter()))
        how = SamplingParams(
            temperature=0, max_tokens=arrival.tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        times, tokens = list[float](), list[int]()
        async for output in self._llm.generate(tokens_input(list(arrival.prompt)), how, name):
            new = output.outputs[0].token_ids
            times += [time.perf_counter() - start] * len(new)
            tokens += new
        return Trace(arrival.after_s, times, len(tokens), tokens)


async def _start(setup: Setup) -> AsyncLLM:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=setup.folder,
            generation_config="vllm",
            dtype=setup.dtype,
            max_model_len=min(8192, setup.kv_tokens),
            max_num_seqs=setup.slots,
            max_num_batched_tokens=_STEP_TOKENS,
            block_size=_BLOCK,
            num_gpu_blocks_override=-(-setup.kv_tokens // _BLOCK) + setup.slots,
            kv_cache_memory_bytes=256 << 20,  # the blocks decide; the bytes keep it from taking most of the memory
            enable_prefix_caching=setup.prefix_tokens > 0,
            enforce_eager=True,  # compiling for a CPU takes minutes
            disable_log_stats=True,
        )
    )
